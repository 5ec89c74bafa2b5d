"""What a fine-tuning run is to do: one file in YAML, TOML or JSON, and `section.key=value` over it.

Every value is checked here, before anything is loaded. docs/sft.md lists the keys; the classes below are their one
definition.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROMPT = "Translate English to French.\nEnglish: {source}\nFrench:"


class ConfigError(ValueError):
    """A setting cannot be used; the message names it, its value, the limit and what to do."""


@dataclass(frozen=True)
class Model:
    """The base model.

    Attributes:
        family: gemma, gemma2, gemma3, gemma4, qwen2, qwen3 or llama3; found from `name` or the folder's config.json.
        path: a folder of *.safetensors with Hugging Face names, or a .gguf file; none: random weights.
        name: a constructor of Tunix's ModelConfig, such as gemma3_270m; none: from the folder's config.json.
        tied: of random weights: whether the head is the embedding, where the family leaves a choice.
        sizes: of random weights: fields of Tunix's ModelConfig over the tiny ones, such as {embed_dim: 64}.
        dtype: of the weights.
        tokenizer: tokenizer.model or tokenizer.json; none: in `path`; "bytes": one token a byte, for tests.
        remat: Tunix's rematerialisation: NONE, BLOCK or DECODER.
        seed: of random weights.
    """

    family: str | None = None
    path: str | None = None
    name: str | None = None
    tied: bool = True
    sizes: dict = field(default_factory=dict)
    dtype: str = "float32"
    tokenizer: str | None = None
    remat: str = "NONE"
    seed: int = 0


@dataclass(frozen=True)
class Data:
    """The pairs of texts.

    Attributes:
        path: a .tsv, .jsonl, .parquet or .mo file; none: the gettext catalogues of this system.
        source, target: fields of a JSONL or Parquet record, or of its `translation`.
        prompt: what stands before the answer; {source} is replaced by the source text.
        held_out_one_in: about one source text in so many is kept out of training, for evaluation and generation.
    """

    path: str | None = None
    source: str = "en"
    target: str = "fr"
    prompt: str = PROMPT
    held_out_one_in: int = 20


@dataclass(frozen=True)
class Lora:
    """The adapters.

    Attributes:
        rank: 0 trains every weight of the model instead.
        alpha: the adapters' product is scaled by alpha / rank; none: alpha = rank.
        rank_stabilized: scaled by alpha / sqrt(rank) instead.
        targets: module names, such as [q_proj, v_proj], each of which must exist; none: all of attention and MLP.
        bits: 4 or 8: the adapted weights are quantised (QLoRA); none: as they are.
    """

    rank: int = 16
    alpha: float | None = None
    rank_stabilized: bool = False
    targets: list | None = None
    bits: int | None = None

    @property
    def scale(self) -> float:
        """What the adapters' product is multiplied by."""
        return float(self.alpha or self.rank) / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)


@dataclass(frozen=True)
class Train:
    """The training.

    Attributes:
        steps: updates of the weights.
        batch: rows of a micro-batch, over all devices.
        context: tokens of a row.
        accumulation: micro-batches of an update. Their tokens count alike, however many each has.
        lr, schedule, warmup: learning rate, "constant" or "cosine" (to 0 at the last step), and steps of warm-up.
        clip: largest norm of the gradient; none: no limit.
        seed: of the adapters and of the order of the data.
        checkpoint_every: steps between checkpoints; 0: only at the end.
        keep: checkpoints kept.
    """

    steps: int = 100
    batch: int = 4
    context: int = 256
    accumulation: int = 1
    lr: float = 2e-4
    schedule: str = "constant"
    warmup: int = 0
    clip: float | None = None
    seed: int = 0
    checkpoint_every: int = 50
    keep: int = 2


@dataclass(frozen=True)
class Loss:
    """How the loss is computed.

    Attributes:
        arm: "cutloss", or "dense" for Tunix's own loss.
        mode, budget, filter, tolerance, epsilon: of the loss, as in cutloss.linear_cross_entropy.
        token_chunk, vocab_chunk: tile sizes on TPU and GPU.
    """

    arm: str = "cutloss"
    mode: str = "auto"
    budget: int | str | None = None
    filter: str | None = None
    tolerance: float | None = None
    epsilon: float | None = None
    token_chunk: int | None = None
    vocab_chunk: int | None = None


@dataclass(frozen=True)
class Mesh:
    """Devices along the axes of the mesh: the batch is split over fsdp; the weights over both."""

    fsdp: int = 1
    tp: int = 1


@dataclass(frozen=True)
class Evaluation:
    """Loss of held-out pairs.

    Attributes:
        every: steps between evaluations; 0: none.
        batches: of each evaluation.
    """

    every: int = 0
    batches: int = 4


@dataclass(frozen=True)
class Generation:
    """Greedy answers to held-out prompts, before and after training.

    Attributes:
        prompts: how many; 0: none.
        tokens: length limit of an answer.
        batch: prompts answered at a time.
        quality: compute BLEU and chrF of the answers; needs sacrebleu.
    """

    prompts: int = 0
    tokens: int = 48
    batch: int = 8
    quality: bool = False


@dataclass(frozen=True)
class Config:
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    lora: Lora = field(default_factory=Lora)
    train: Train = field(default_factory=Train)
    loss: Loss = field(default_factory=Loss)
    mesh: Mesh = field(default_factory=Mesh)
    evaluation: Evaluation = field(default_factory=Evaluation)
    generation: Generation = field(default_factory=Generation)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def load(path: Path | None, overrides: typing.Iterable[str] = ()) -> Config:
    """Returns the configuration of a file (or the defaults) with `section.key=value` settings over it, checked.

    Raises:
        ConfigError: the file cannot be read, a key is unknown, a value is of the wrong type or out of range.
    """
    settings = _read(path) if path is not None else {}
    for override in overrides:
        name, equals, text = override.partition("=")
        section, dot, key = name.strip().partition(".")
        if not equals or not dot:
            raise ConfigError(f"{override!r}: expected section.key=value, such as train.steps=20")
        inner = settings.setdefault(section, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{section}: {inner!r} is no section of settings")
        inner[key] = _value(text)
    return from_dict(settings)


def from_dict(settings: dict[str, Any]) -> Config:
    """Returns the configuration of nested dictionaries, checked; raises ConfigError."""
    config = _build(Config, settings, "")
    _check_values(config)
    return config


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    try:
        if path.suffix == ".toml":
            import tomllib

            found = tomllib.loads(text)
        elif path.suffix in (".yaml", ".yml", ".json"):
            import yaml

            found = yaml.safe_load(text)
        else:
            raise ConfigError(f"{path}: unknown kind of file; expected .yaml, .toml or .json")
    except ConfigError:
        raise
    except Exception as error:  # each parser has errors of its own
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from error
    if not isinstance(found or {}, dict):
        raise ConfigError(f"{path}: expected sections of settings, found {type(found).__name__}")
    return found or {}


def _value(text: str) -> Any:
    import yaml

    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{text!r}: {' '.join(str(error).split())}") from error
    return value


def _build(cls: type, settings: Any, where: str) -> Any:
    if not isinstance(settings, dict):
        raise ConfigError(f"{where.rstrip('.')}: {settings!r} is not a section of settings")
    hints = typing.get_type_hints(cls)
    values = {}
    for key, value in settings.items():
        if key not in hints:
            close = difflib.get_close_matches(str(key), hints, 1)
            hint = f"did you mean {where}{close[0]}?" if close else f"there is: {', '.join(hints)}"
            raise ConfigError(f"{where}{key}: no such setting; {hint}")
        kind = hints[key]
        inner = dataclasses.is_dataclass(kind)
        values[key] = _build(kind, value or {}, f"{key}.") if inner else _typed(f"{where}{key}", value, kind)
    return cls(**values)


def _typed(name: str, value: Any, kind: Any) -> Any:
    kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if value is None and type(None) in kinds:
        return None
    if isinstance(value, bool):
        if bool in kinds:
            return value
    elif isinstance(value, kinds):
        return value
    elif float in kinds and isinstance(value, (int, str)):  # YAML 1.1 reads 2e-4 as text
        try:
            return float(value)
        except ValueError:
            pass
    elif value is not None and kinds[0] is str:
        return str(value)
    wanted = " or ".join("nothing" if k is type(None) else k.__name__ for k in kinds)
    raise ConfigError(f"{name}: {value!r} is {type(value).__name__}; expected {wanted}")


# ---- limits ----------------------------------------------------------------------------------------------------------

_AT_LEAST = {
    "data.held_out_one_in": 2,
    "lora.rank": 0,
    "train.steps": 1,
    "train.batch": 1,
    "train.context": 2,
    "train.accumulation": 1,
    "train.warmup": 0,
    "train.checkpoint_every": 0,
    "train.keep": 1,
    "mesh.fsdp": 1,
    "mesh.tp": 1,
    "evaluation.every": 0,
    "evaluation.batches": 1,
    "generation.prompts": 0,
    "generation.tokens": 1,
    "generation.batch": 1,
}
_ONE_OF = {
    "model.dtype": ("float32", "bfloat16"),
    "model.remat": ("NONE", "BLOCK", "DECODER"),
    "lora.bits": (None, 4, 8),
    "train.schedule": ("constant", "cosine"),
    "loss.arm": ("cutloss", "dense"),
}
_POSITIVE = ("lora.alpha", "train.lr", "train.clip")


def _get(config: Config, name: str) -> Any:
    section, _, key = name.partition(".")
    return getattr(getattr(config, section), key)


def _check_values(config: Config) -> None:
    for name, least in _AT_LEAST.items():
        if _get(config, name) < least:
            raise ConfigError(f"{name}: {_get(config, name)} is less than {least}")
    for name, allowed in _ONE_OF.items():
        if _get(config, name) not in allowed:
            shown = ", ".join("nothing" if a is None else str(a) for a in allowed)
            more = " (float16 overflows in Gemma: 65504 is its largest number)" if name == "model.dtype" else ""
            raise ConfigError(f"{name}: {_get(config, name)!r} is not one of {shown}{more}")
    for name in _POSITIVE:
        value = _get(config, name)
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ConfigError(f"{name}: {value} is not a positive number")
    if "{source}" not in config.data.prompt:
        raise ConfigError(f"data.prompt: {config.data.prompt!r} has no {{source}}: the model would not see the text")
    _check_together(config)


def _check_together(config: Config) -> None:
    model, train, loss = config.model, config.train, config.loss
    if train.batch % config.mesh.fsdp:
        raise ConfigError(
            f"train.batch: {train.batch} rows cannot be split over mesh.fsdp = {config.mesh.fsdp} devices; make it a "
            f"multiple of {config.mesh.fsdp}"
        )
    if train.warmup >= train.steps > 1:
        raise ConfigError(f"train.warmup: {train.warmup} steps, and train.steps is {train.steps}; nothing is left")
    if model.sizes and (model.path or model.name):
        raise ConfigError("model.sizes: for random weights only, without model.path and model.name")
    if config.lora.bits and not config.lora.rank:
        raise ConfigError("lora.bits: quantised weights cannot be trained; set lora.rank to 1 or more")
    if config.generation.quality and not config.generation.prompts:
        raise ConfigError("generation.quality: needs answers; set generation.prompts to 1 or more")
    chosen = [key for key in dataclasses.asdict(loss) if key != "arm" and _differs(loss, key)]
    if loss.arm == "dense" and chosen:
        raise ConfigError(f"loss.{chosen[0]}: {getattr(loss, chosen[0])!r} is for loss.arm=cutloss, not for dense")
    if loss.mode == "loss":
        raise ConfigError("loss.mode: 'loss' computes no gradient; training needs auto, stream, chunk, recompute or sparse")
    _check_loss(config)


def loss_options(loss: Loss) -> dict[str, Any]:
    """Returns the options of `cutloss.tunix` that the settings of a loss are."""
    return {**{key: value for key, value in dataclasses.asdict(loss).items() if key != "arm"}, "strict": True}


def _check_loss(config: Config) -> None:
    """What the loss itself says of its options, asked for a problem of one token and two ids."""
    import numpy as np

    from .. import linear_cross_entropy
    from ..tunix import settings

    options = {key: getattr(config.loss, key) for key in ("mode", "filter", "tolerance", "epsilon")}
    options["wrt"] = ("e",) if config.lora.rank else ("e", "c")
    try:
        settings.read(**loss_options(config.loss))
        one = np.ones((1, 1), np.float32)
        linear_cross_entropy(one, np.ones((2, 1), np.float32), np.zeros(1, np.int32), **options)
    except (TypeError, ValueError) as error:
        where = "" if str(error).startswith("CUTLOSS_") else "loss."
        raise ConfigError(f"{where}{error}") from error


def _differs(section: Any, key: str) -> bool:
    return getattr(section, key) != getattr(type(section)(), key)


# ---- resuming --------------------------------------------------------------------------------------------------------

# These may change between the parts of one run: they do not change what the steps compute.
_FREE = ("train.steps", "train.checkpoint_every", "train.keep", "evaluation", "generation")


def difference(ours: Config, theirs: dict[str, Any]) -> str | None:
    """Returns which setting of an earlier part of the run forbids going on with `ours`, or None."""
    for section, values in ours.to_dict().items():
        for key, value in values.items():
            name = f"{section}.{key}"
            free = name in _FREE or section in _FREE
            if name == "train.steps" and ours.train.schedule != "constant":
                free = False  # the learning rate of every step follows from the number of steps
            unset = getattr(getattr(Config(), section), key)  # a run from before there was this setting
            before = json.loads(json.dumps(theirs.get(section, {}).get(key, unset)))
            if not free and before != json.loads(json.dumps(value)):
                return f"{name} was {before!r} and is {value!r}"
    return None
