"""Tunix's model families as cutloss-sft knows them: classes, tiny sizes for tests, and Hugging Face's config.json."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .config import ConfigError

TINY = {"num_layers": 2, "embed_dim": 32, "hidden_dim": 64, "num_heads": 4, "head_dim": 8}
TINY_VOCAB = 320  # the 259 of the byte tokenizer, and some that no text uses


@dataclass(frozen=True)
class Family:
    """One family.

    Attributes:
        package: the package under tunix.models.
        cls: the model's class there.
        loader: the module there that has `create_model_from_safe_tensors`.
        hugging_face: `model_type` of a config.json of it.
        tiny: maps (module, tied) to the fields of a tiny ModelConfig, beyond TINY.
        convert: maps (module, config.json's text part) to the fields of ModelConfig.
        vocab: the field that has the number of ids.
        tied_flag: the field that says whether the head is the embedding; None: it always is.
    """

    package: str
    cls: str
    loader: str
    hugging_face: tuple[str, ...]
    tiny: Callable[[Any, bool], dict[str, Any]]
    convert: Callable[[Any, dict[str, Any]], dict[str, Any]] | None
    vocab: str = "num_embed"
    tied_flag: str | None = None

    @property
    def module(self) -> Any:
        return importlib.import_module(f"tunix.models.{self.package}.model")

    @property
    def loader_module(self) -> Any:
        return importlib.import_module(f"tunix.models.{self.package}.{self.loader}")


def _common(found: dict[str, Any], head_dim: int | None = None) -> dict[str, Any]:
    """What all have; `head_dim` is that of a file which does not say."""
    heads = found["num_attention_heads"]
    return {
        "num_layers": found["num_hidden_layers"],
        "embed_dim": found["hidden_size"],
        "hidden_dim": found["intermediate_size"],
        "num_heads": heads,
        "num_kv_heads": found.get("num_key_value_heads") or heads,
        "head_dim": found.get("head_dim") or head_dim or found["hidden_size"] // heads,
    }


def _plain(found: dict[str, Any], **only: Any) -> None:
    """Raises ValueError for a key whose value is not the one Tunix's model has built in: it would be another model."""
    for key, value in only.items():
        if found.get(key) not in (None, value):
            raise ValueError(f"{key} is {found[key]!r}, and Tunix's model computes with {value!r} only")


def _rope(found: dict[str, Any], kind: str | None = None, default: Any = 10_000) -> tuple[Any, float]:
    """Returns (base, what positions are divided by) of a kind of attention, or of all.

    Transformers 5 keeps both in rope_parameters, which Gemma 3 has for each kind; before, the scaling was of full
    attention.
    """
    told = found.get("rope_parameters") or {}
    if any(isinstance(value, dict) for value in told.values()):
        if kind is None:
            raise ValueError("rope_parameters is of several kinds of attention; Tunix's model has one")
        told = told.get(kind) or {}
    elif kind == "sliding_attention":
        told = {}
    scaling = told if kind == "sliding_attention" else {**(found.get("rope_scaling") or {}), **told}
    type_ = scaling.get("rope_type") or scaling.get("type") or "default"
    if type_ not in ("default", "linear"):
        raise ValueError(f"rope_scaling is of the type {type_!r}; Tunix's models scale positions linearly or not at all")
    partial = {"partial_rotary_factor": scaling.get("partial_rotary_factor", found.get("partial_rotary_factor"))}
    _plain(partial, partial_rotary_factor=1.0)
    theta = told.get("rope_theta") or (None if kind == "sliding_attention" else found.get("rope_theta")) or default
    return theta, float(scaling.get("factor", 1.0)) if type_ == "linear" else 1.0


def _unscaled_rope(found: dict[str, Any]) -> Any:
    theta, factor = _rope(found)
    _plain({"rope_scaling": factor}, rope_scaling=1.0)
    return theta


def _layers(found: dict[str, Any], local: Callable[[int], bool]) -> list[bool]:
    """Returns which layers see a window only; raises ValueError if the file says others do."""
    mine = [local(i) for i in range(found["num_hidden_layers"])]
    _plain(found, layer_types=["sliding_attention" if one else "full_attention" for one in mine])
    return mine


def _gemma(module: Any, found: dict[str, Any], second: bool) -> dict[str, Any]:
    kinds = module.AttentionType
    common = _common(found, head_dim=256)
    _plain({"rope_theta": _unscaled_rope(found)}, rope_theta=10_000)
    _plain(found, rms_norm_eps=1e-6, attention_bias=False)
    if second:
        scalar = {"query_pre_attn_scalar": found.get("query_pre_attn_scalar", 256)}
        _plain(scalar, query_pre_attn_scalar=common["head_dim"])
    return {
        **common,
        "num_embed": found["vocab_size"],
        "final_logit_softcap": found.get("final_logit_softcapping", 30.0) if second else None,
        "attn_logits_soft_cap": found.get("attn_logit_softcapping", 50.0) if second else None,
        "use_post_attn_norm": second,
        "use_post_ffw_norm": second,
        "sliding_window_size": found.get("sliding_window", 4096) if second else None,
        "attention_types": tuple(
            kinds.LOCAL_SLIDING if local else kinds.GLOBAL for local in _layers(found, lambda i: second and i % 2 == 0)
        ),
    }


def _gemma3(module: Any, found: dict[str, Any]) -> dict[str, Any]:
    kinds = module.QueryPreAttentionNormalisation
    common = _common(found, head_dim=256)
    _plain(found, rms_norm_eps=1e-6, attention_bias=False, sliding_window_pattern=6, use_bidirectional_attention=False,
           final_logit_softcapping=0.0, attn_logit_softcapping=0.0)  # fmt: skip
    _layers(found, lambda i: i % 6 != 5)
    scalar = found.get("query_pre_attn_scalar", 256)
    by_head = scalar == common["head_dim"]
    if not by_head:
        _plain({"query_pre_attn_scalar": scalar}, query_pre_attn_scalar=common["embed_dim"] // common["num_heads"])
    local, local_scale = _rope(found, "sliding_attention", found.get("rope_local_base_freq") or 10_000)
    everywhere, scale = _rope(found, "full_attention", 1_000_000)
    return {
        **common,
        "num_embed": found["vocab_size"],
        "sliding_window_size": found.get("sliding_window"),
        "local_base_frequency": local,
        "local_scale_factor": local_scale,
        "global_base_frequency": everywhere,
        "global_scale_factor": scale,
        "query_pre_attn_norm": (
            kinds.BY_ONE_OVER_SQRT_HEAD_DIM if by_head else kinds.BY_ONE_OVER_SQRT_EMBED_DIM_DIV_NUM_HEADS
        ),
    }


def _qwen_or_llama(
    tied_flag: str, tied_by_default: bool, bias: bool, head_dim: int | None
) -> Callable[[Any, dict[str, Any]], dict[str, Any]]:
    def convert(module: Any, found: dict[str, Any]) -> dict[str, Any]:
        _plain(found, hidden_act="silu", attention_bias=bias, mlp_bias=False, use_sliding_window=False)
        _layers(found, lambda i: False)
        return {
            **_common(found, head_dim),
            "vocab_size": found["vocab_size"],
            "rope_theta": _unscaled_rope(found),
            "norm_eps": found["rms_norm_eps"],
            tied_flag: found.get("tie_word_embeddings", tied_by_default),
        }

    return convert


def _tiny_gemma(second: bool) -> Callable[[Any, bool], dict[str, Any]]:
    def tiny(module: Any, tied: bool) -> dict[str, Any]:
        kinds = module.AttentionType
        return {
            "num_kv_heads": 1,
            "final_logit_softcap": 30.0 if second else None,
            "attn_logits_soft_cap": 50.0 if second else None,
            "use_post_attn_norm": second,
            "use_post_ffw_norm": second,
            "sliding_window_size": 32,
            "attention_types": (kinds.LOCAL_SLIDING if second else kinds.GLOBAL, kinds.GLOBAL),
        }

    return tiny


def _tiny_gemma4(module: Any, tied: bool) -> dict[str, Any]:
    kinds = module.AttentionType
    return {
        "num_layers": 4,  # fewer have no layer to share keys and values with
        "num_kv_heads": 1,
        "final_logit_softcap": 30.0,
        "sliding_window_size": 32,
        "per_layer_input_dim": 4,
        "frac_shared_layers": 0.5,
        "global_key_size": 8,
        # The last two share the keys and values of the last before them of their kind.
        "attention_pattern": (kinds.LOCAL_SLIDING, kinds.GLOBAL, kinds.LOCAL_SLIDING, kinds.GLOBAL),
    }


def _tiny_qwen_or_llama(tied_flag: str) -> Callable[[Any, bool], dict[str, Any]]:
    return lambda module, tied: {"num_kv_heads": 2, "rope_theta": 10_000, "norm_eps": 1e-6, tied_flag: tied}


def _newer(package: str, cls: str, model_type: str, tied_flag: str) -> Family:
    return Family(
        package,
        cls,
        "params",
        (model_type,),
        _tiny_qwen_or_llama(tied_flag),
        _qwen_or_llama(tied_flag, False, bias=model_type == "qwen2", head_dim=128 if model_type == "qwen3" else None),
        vocab="vocab_size",
        tied_flag=tied_flag,
    )


FAMILIES = {
    "gemma": Family(
        "gemma", "Gemma", "params_safetensors", ("gemma",), _tiny_gemma(False), lambda m, f: _gemma(m, f, False)
    ),
    "gemma2": Family(
        "gemma", "Gemma", "params_safetensors", ("gemma2",), _tiny_gemma(True), lambda m, f: _gemma(m, f, True)
    ),
    "gemma3": Family(
        "gemma3",
        "Gemma3",
        "params_safetensors",
        ("gemma3_text", "gemma3"),
        lambda m, tied: {"num_kv_heads": 1, "sliding_window_size": 32},
        _gemma3,
    ),
    "gemma4": Family("gemma4", "Gemma4", "params_safetensors", (), _tiny_gemma4, None),
    "qwen2": _newer("qwen2", "Qwen2", "qwen2", "use_tied_embedding"),
    "qwen3": _newer("qwen3", "Qwen3", "qwen3", "use_tied_embedding"),
    "llama3": _newer("llama3", "Llama3", "llama", "weight_tying"),
}


def by_constructor(name: str) -> str:
    """Returns the family whose ModelConfig has the constructor `name`, such as gemma3_270m; raises ConfigError."""
    for family in FAMILIES:
        # Gemma 2's constructors are on the class it shares with Gemma.
        if name in constructors(family) and (name.startswith("gemma2") == (family == "gemma2")):
            return family
    known = sorted({n for family in FAMILIES for n in constructors(family)})
    raise ConfigError(f"model.name: {name!r} is no model of Tunix's; there is: {', '.join(known)}")


def constructors(family: str) -> list[str]:
    """Returns the names of the whole models whose configuration Tunix has."""
    config = FAMILIES[family].module.ModelConfig
    return [name for name, value in vars(config).items() if isinstance(value, classmethod) and name[0] != "_"]


def by_config_json(found: dict[str, Any], path: Any) -> tuple[str, dict[str, Any]]:
    """Returns (family, fields of its ModelConfig) of a Hugging Face config.json; raises ConfigError."""
    kind = found.get("model_type")
    for name, family in FAMILIES.items():
        if kind in family.hugging_face:
            try:
                return name, family.convert(family.module, {**found, **found.get("text_config", {})})
            except KeyError as missing:
                raise ConfigError(f"{path}: no {missing}, which a {kind!r} model's configuration has") from missing
            except ValueError as error:
                raise ConfigError(f"{path}: {error}") from error
    known = ", ".join(kind for family in FAMILIES.values() for kind in family.hugging_face)
    raise ConfigError(f"{path}: model_type {kind!r} is not known (there is: {known}); set model.name if Tunix has it")


def check_config_json(found: dict[str, Any], path: Any) -> None:
    """Raises ConfigError if a config.json is of a model that Tunix's of its family is not."""
    try:
        if any(found.get("model_type") in family.hugging_face for family in FAMILIES.values()):
            by_config_json(found, path)
    except ConfigError as error:
        if not isinstance(error.__cause__, KeyError):  # Tunix's own configuration has what the file leaves out
            raise


def tiny(name: str, tied: bool, sizes: dict[str, Any]) -> Any:
    """Returns the ModelConfig of a tiny model of the family, with `sizes` over its fields; raises ConfigError."""
    family = FAMILIES[name]
    fields = {**TINY, family.vocab: TINY_VOCAB, **family.tiny(family.module, tied)}
    known = family.module.ModelConfig.__dataclass_fields__
    for key in sizes:
        if key not in known:
            raise ConfigError(f"model.sizes: {key!r} is no field of {name}'s ModelConfig; there is: {', '.join(known)}")
    return family.module.ModelConfig(**{**fields, **sizes})


def use_own_positions(name: str, config: Any) -> None:
    """Makes Tunix turn positions by the configuration's own `rope_theta`, in this process.

    Tunix 0.1.7 reads it for Llama 3 and Qwen 3 and does not pass it on: 1,000,000 is used for all. The mean nll of
    SmolLM2 135M, whose own is 100,000, is then 3.146 on the first 512 tokens of the GPL, not 2.992. Llama 3 has 500,000.
    """
    module = FAMILIES[name].module
    rope = getattr(module, "apply_rope", None)
    rope = getattr(rope, "func", rope)
    if rope is not None and "rope_theta" in inspect.signature(rope).parameters:
        module.apply_rope = functools.partial(rope, rope_theta=config.rope_theta)
