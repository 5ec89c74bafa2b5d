"""The model a run trains: its weights, tokenizer and adapters, whole and checked before the first step."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import families, tokenizers, weight_files
from .config import Config, ConfigError, Lora, Model

# Every projection of attention and MLP, under the names of all families. The head is left out on purpose: a frozen
# head is what makes the loss cost two matrix products instead of three, and cutloss.tunix refuses adapters on it.
TARGETS = (
    "q_einsum", "kv_einsum", "qkv_einsum", "attn_vec_einsum", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj",
    "up_proj", "down_proj",
)  # fmt: skip


@dataclass(frozen=True)
class Source:
    """Where a model comes from, known without loading it.

    Attributes:
        family: its name.
        config: Tunix's ModelConfig.
        folder: of the weights, or None for random ones.
        tokenizer: what to read it from.
    """

    family: str
    config: Any
    folder: Path | None
    tokenizer: str

    @property
    def vocab(self) -> int:
        return getattr(self.config, families.FAMILIES[self.family].vocab)


def find(model: Model) -> Source:
    """Returns what the settings describe; raises ConfigError if there is no such model, file or tokenizer."""
    if model.family is not None and model.family not in families.FAMILIES:
        raise ConfigError(f"model.family: {model.family!r} is not one of {', '.join(families.FAMILIES)}")
    folder = _folder(model)
    if model.name is not None:
        family = families.by_constructor(model.name)
        config = getattr(families.FAMILIES[family].module.ModelConfig, model.name)()
        path = folder / "config.json" if folder else None
        if path is not None and path.is_file():
            families.check_config_json(json.loads(path.read_text()), path)
    elif folder is not None:
        path = folder / "config.json"
        if not path.is_file():
            raise ConfigError(f"{path}: no such file; set model.name to one of Tunix's, such as gemma3_270m")
        family, values = families.by_config_json(json.loads(path.read_text()), path)
        config = families.FAMILIES[family].module.ModelConfig(**values)
    elif model.family is None:
        raise ConfigError("model: set model.path (weights), model.name (their shapes), or model.family for a tiny model")
    else:
        family, config = model.family, families.tiny(model.family, model.tied, model.sizes)
    if model.family not in (None, family):
        raise ConfigError(f"model.family: {model.family!r}, but the model is a {family!r}")
    tokenizer = model.tokenizer or (str(folder) if folder else "bytes")
    return Source(family, _with_choices(config, model), folder, tokenizer)


def _folder(model: Model) -> Path | None:
    """The folder of the weights; a GGUF file is converted into one."""
    if model.path is None:
        return None
    path = Path(model.path).expanduser()
    if not path.exists():
        raise ConfigError(f"model.path: {path}: no such file or folder")
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigError(f"model.path: {path} is a {path.suffix or 'nameless'} file; expected a folder or .gguf")
        from . import gguf_file

        path = gguf_file.prepare(path)
    if not any(path.glob("*.safetensors")):
        raise ConfigError(f"model.path: {path} has no *.safetensors")
    return path


def _with_choices(config: Any, model: Model) -> Any:
    """The config with the settings' dtype and rematerialisation, in those fields the family has."""
    import sys

    import jax.numpy as jnp

    remat = sys.modules[type(config).__module__].RematConfig[model.remat]
    chosen = {"dtype": jnp.dtype(model.dtype), "param_dtype": jnp.dtype(model.dtype), "remat_config": remat}
    have = {field.name for field in dataclasses.fields(config)}
    return dataclasses.replace(config, **{key: value for key, value in chosen.items() if key in have})


# ---- weights ---------------------------------------------------------------------------------------------------------


def load(source: Source, settings: Config, mesh: Any = None) -> Any:
    """Returns the model with its adapters, spread over `mesh` if that is not None.

    Raises:
        ConfigError: weights are missing or of other shapes, or the adapters hit nothing.
    """
    families.use_own_positions(source.family, source.config)
    with mesh if mesh is not None else contextlib.nullcontext():
        if source.folder is None:
            model = _random(source, settings)
        else:
            model = add_lora(_loaded(source, settings.model, mesh), settings.lora, settings.train.seed)
        if mesh is not None:
            model = _spread(model, mesh)
    check_adapters(model, settings.lora)
    return model


def abstract(source: Source, settings: Config, mesh: Any = None) -> Any:
    """Returns the model with shapes in place of arrays: enough to compile a step.

    Quantised weights are made from values, so for QLoRA random ones are made and forgotten.
    """
    import jax
    from flax import nnx

    families.use_own_positions(source.family, source.config)
    if settings.lora.bits:
        model = _random(source, settings)
    else:
        model = nnx.eval_shape(lambda: add_lora(_base(source, settings), settings.lora, settings.train.seed))
    check_adapters(model, settings.lora)
    graph, state = nnx.split(model)
    placed = () if mesh is None else (places(state, mesh),)

    def shape(leaf, place=None):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

    return nnx.merge(graph, jax.tree.map(shape, state, *placed))


def _base(source: Source, settings: Config) -> Any:
    from flax import nnx

    cls = getattr(families.FAMILIES[source.family].module, families.FAMILIES[source.family].cls)
    return _cast(cls(source.config, rngs=nnx.Rngs(params=settings.model.seed)), settings.model.dtype)


def _random(source: Source, settings: Config) -> Any:
    """In one program: op by op, Tunix and qwix take seconds. Not so QLoRA: traced, qwix 0.1.8 leaves out the MLP."""
    from flax import nnx

    def adapted(model):
        return add_lora(model, settings.lora, settings.train.seed)

    if settings.lora.bits:
        return adapted(nnx.jit(lambda: _base(source, settings))())
    return nnx.jit(lambda: adapted(_base(source, settings)))()


def _cast(model: Any, dtype: str) -> Any:
    import jax
    from flax import nnx

    graph, state = nnx.split(model)
    return nnx.merge(graph, jax.tree.map(lambda leaf: leaf.astype(dtype), state))


def _loaded(source: Source, settings: Model, mesh: Any) -> Any:
    import jax
    import jax.numpy as jnp
    from flax import nnx

    check_head(source)
    create = families.FAMILIES[source.family].loader_module.create_model_from_safe_tensors
    try:
        with loader_of(source):
            model = create(str(source.folder), source.config, mesh, dtype=jnp.dtype(settings.dtype))
    except (AssertionError, RuntimeError, ValueError) as error:  # as it finds another shape, or none
        # Tunix's loader puts None where a file has no weight, and fails over the difference.
        lacking = re.search(r"tree(\[.*\])\nAt that key path.*NoneType", str(error), re.DOTALL)
        what = f"it lacks weights, the first is {lacking[1]}" if lacking else str(error)
        raise ConfigError(f"model.path: {source.folder}: {what}") from error
    flat = jax.tree_util.tree_flatten_with_path(nnx.to_pure_dict(nnx.state(model)))[0]
    missing = [jax.tree_util.keystr(path) for path, leaf in flat if not isinstance(leaf, jax.Array)]
    if missing:
        raise ConfigError(f"model.path: {source.folder}: it lacks weights, the first is {missing[0]}")
    return model


@contextlib.contextmanager
def loader_of(source: Source) -> Iterator[Any]:
    """Yields Tunix's loader, which knows where each tensor of a file belongs.

    Gemma 1's norm before the MLP has the name of Gemma 2's after attention, for which 0.1.7's takes it.
    """
    loader = families.FAMILIES[source.family].loader_module
    own = getattr(loader, "_get_key_and_transform_mapping", None)
    if source.family != "gemma" or own is None:
        yield loader
        return

    def mapping(config):
        place = r"layers.\1.pre_ffw_norm.scale"
        return {name: (place, None) if "post_attention_layernorm" in name else to for name, to in own(config).items()}

    loader._get_key_and_transform_mapping = mapping
    try:
        yield loader
    finally:
        loader._get_key_and_transform_mapping = own


def check_head(source: Source) -> None:
    """Raises ConfigError if the folder's head is not the one the configuration says: tied, or of its own."""
    flag = families.FAMILIES[source.family].tied_flag
    tied = flag is None or getattr(source.config, flag)
    heads, tables = (_tensors(source.folder, name) for name in ("lm_head.weight", "embed_tokens.weight"))
    if not tied and not heads:
        raise ConfigError(
            f"model.path: {source.folder} has no lm_head.weight, and its configuration says the head is not the "
            "embedding; set tie_word_embeddings in its config.json if it is"
        )
    if tied and heads and tables and not _same(heads[0], tables[0]):
        raise ConfigError(
            f"model.path: {source.folder} has a lm_head.weight that is not the embedding, and its configuration says "
            "they are one; set tie_word_embeddings to false in its config.json to train with it"
        )


def _tensors(folder: Path, suffix: str) -> list[tuple[Path, str]]:
    found = []
    for path in sorted(folder.glob("*.safetensors")):
        with weight_files.safetensors(path) as file:
            found += [(path, name) for name in file.keys() if name.endswith(suffix) and "per_layer" not in name]
    return found


def _same(*places: tuple[Path, str]) -> bool:
    from safetensors import safe_open

    slices = []
    for path, name in places:
        slices.append(safe_open(path, framework="flax").get_slice(name))
    rows = slices[0].get_shape()[0]
    if slices[0].get_shape() != slices[1].get_shape():
        return False
    step = max(1, rows // 64)  # a thousand rows of the table would do as well
    return all((slices[0][i : i + 1] == slices[1][i : i + 1]).all() for i in range(0, rows, step))


# ---- adapters --------------------------------------------------------------------------------------------------------


def add_lora(model: Any, lora: Lora, seed: int) -> Any:
    """Returns a copy of `model` with adapters, sharing its weights; the model itself for rank 0.

    B starts at zero, so the first loss is the base model's own. The product is scaled by `lora.scale`; qwix divides its
    alpha by the rank.
    """
    if lora.rank == 0:
        return model
    import qwix
    from flax import nnx

    names = "|".join(lora.targets or TARGETS)
    bits = {} if lora.bits is None else {"weight_qtype": f"int{lora.bits}", "tile_size": None}
    provider = qwix.LoraProvider(
        module_path=rf"(.*/)?({names})", rank=lora.rank, alpha=lora.scale * lora.rank, **bits
    )
    try:
        adapted = qwix.apply_lora_to_model(model, provider, rngs=nnx.Rngs(seed), **model.get_model_input())
    except TypeError as error:
        if lora.bits is None:
            raise
        raise ConfigError(
            f"lora.bits: this Tunix cannot run {type(model).__name__} with quantised weights ({error}); leave it out"
        ) from error
    return _with_adapters_in(adapted, "float32")


def as_run(model: Any, settings: Config) -> Any:
    """Returns the model as its forward pass runs: sharing all arrays, with the adapters in the dtype of the weights.

    The adapters themselves stay in f32, and Adam's moments with them: an update of 1e-5 of a bf16 number is none.
    """
    if settings.lora.rank == 0 or settings.model.dtype == "float32":
        return model
    return _with_adapters_in(model, settings.model.dtype)


def _with_adapters_in(model: Any, dtype: str) -> Any:
    import jax
    from flax import nnx

    graph, adapters, rest = nnx.split(model, nnx.LoRAParam, ...)
    return nnx.merge(graph, jax.tree.map(lambda leaf: leaf.astype(dtype), adapters), rest)


def trained(model: Any) -> Any:
    """Returns the filter of what is trained: the adapters, or everything."""
    from flax import nnx
    from tunix.sft import utils

    return nnx.LoRAParam if utils.is_lora_enabled(model) else nnx.Param


def check_adapters(model: Any, lora: Lora) -> None:
    """Raises ConfigError unless every target of `lora` names modules that have adapters now."""
    if lora.rank == 0:
        return
    from flax import nnx

    have, could, could_have = set(), set(), set()
    for path, variable in nnx.iter_graph(model):
        if isinstance(variable, nnx.Variable) and len(path) > 1:
            name = str(path[-2])
            if isinstance(variable, nnx.LoRAParam):
                have.add(name)
            elif getattr(variable.get_value(), "ndim", 2) >= 2:
                could.add(name)
            could_have.update(set(map(str, path)) & set(TARGETS))
    wrong = [name for name in lora.targets or could_have if name not in have]
    if wrong or not have:
        raise ConfigError(
            f"lora.targets: {', '.join(wrong or lora.targets or TARGETS)}: no such module in this model; there is: "
            f"{', '.join(sorted(could))}"
        )


def _spread(model: Any, mesh: Any) -> Any:
    """Every array on the mesh, as its metadata says; those without any, on all devices."""
    import jax
    from flax import nnx

    graph, state = nnx.split(model)
    return nnx.merge(graph, jax.tree.map(jax.device_put, state, places(state, mesh)))


def places(state: Any, mesh: Any) -> Any:
    import jax
    from flax import nnx

    return jax.tree.map(
        lambda leaf, spec: jax.sharding.NamedSharding(mesh, _fitting(spec, leaf.shape, mesh)),
        state,
        nnx.get_partition_spec(state),
    )


def _fitting(spec: Any, shape: tuple[int, ...], mesh: Any) -> Any:
    """The spec without the axes that do not divide their dimension: JAX has no arrays of unequal parts."""
    import math

    from jax.sharding import PartitionSpec

    kept = []
    for extent, axes in zip(shape, (*(spec or ()), *[None] * len(shape)), strict=False):
        names = () if axes is None else axes if isinstance(axes, tuple) else (axes,)
        kept.append(axes if extent % math.prod(mesh.shape.get(name, 1) for name in names) == 0 else None)
    return PartitionSpec(*kept)


# ---- the tokenizer ---------------------------------------------------------------------------------------------------


def load_tokenizer(source: Source) -> Any:
    """Returns the tokenizer, with encode, decode, bos_id, eos_id, pad_id and vocab_size; raises ConfigError."""
    return tokenizers.load(source.tokenizer)
