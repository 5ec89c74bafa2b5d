"""GGUF files as what Tunix loads: a folder of safetensors, with a config.json and the tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import gguf_tokenizer, weight_files
from .config import ConfigError
from .paths import cached_folder

# Part of the cache's folder name: raise it when a conversion changes, so that an old cache is never read as a new one.
FORMAT = 3


def prepare(path: Path) -> Path:
    """Returns the cached folder for a GGUF file, converting it at the first call; raises ConfigError.

    The folder's name follows from the file's size, time and first MiB.
    """
    from . import gemma3

    status = path.stat()
    with path.open("rb") as file:
        seen = hashlib.sha256(file.read(2**20) + f"{status.st_size} {status.st_mtime_ns}".encode()).hexdigest()[:12]

    def build(folder: Path) -> None:
        try:
            convert(path, folder)
        except (ValueError, KeyError) as error:
            raise ConfigError(f"model.path: {path}: {error}") from error

    return cached_folder(f"{path.stem}-{seen}-v{gemma3.FORMAT}.{FORMAT}", build)


def convert(path: Path, folder: Path) -> None:
    """Writes model.safetensors, config.json and the tokenizer of a GGUF file into the folder.

    Raises:
        ValueError or KeyError: the file is not GGUF, or holds something that is not known here.
    """
    from . import gemma3

    reader = weight_files.gguf(path)
    name = reader.fields["general.architecture"].contents()
    if name != "gemma3" and name not in ARCHITECTURES:
        known = ", ".join(["gemma3", *ARCHITECTURES])
        raise ValueError(f"it holds a {name!r} model; of GGUF files {known} are read, else give a folder of safetensors")
    config = config_json(reader, name)
    if name == "gemma3":
        gemma3.convert(reader, folder)
    else:
        _write_tensors(reader, ARCHITECTURES[name], folder)
        gguf_tokenizer.write(reader, folder)
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def config_json(reader: Any, name: str) -> dict[str, Any]:
    """Returns the Hugging Face configuration that a GGUF file amounts to."""
    fields = reader.fields

    def value(key: str, default: Any = None) -> Any:
        field = fields.get(f"{name}.{key}")
        if field is None and default is None:
            raise KeyError(f"{name}.{key}")
        return default if field is None else field.contents()

    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if (holds := fields["general.architecture"].contents()) != name:
        raise ValueError(f"it holds a {holds!r} model; a {name!r} one is needed")
    heads, width = value("attention.head_count"), value("embedding_length")
    found = {
        "num_hidden_layers": value("block_count"),
        "hidden_size": width,
        "intermediate_size": value("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": value("attention.head_count_kv", heads),
        "head_dim": value("attention.key_length", width // heads),
        "vocab_size": int(tensors["token_embd.weight"].shape[-1]),
        "rope_theta": value("rope.freq_base", 10_000.0),
    }
    for key, plain in (("rope.dimension_count", found["head_dim"]), ("attention.value_length", found["head_dim"]),
                       ("expert_count", 0), ("final_logit_softcapping", 0.0)):  # fmt: skip
        if value(key, plain) != plain:
            raise ValueError(f"its {name}.{key} is {value(key)}; Tunix's model computes with {plain} only")
    kind = value("rope.scaling.type", "linear")  # as llama.cpp takes a factor alone
    scale = 1.0 if kind == "none" else value("rope.scaling.factor", value("rope.scale_linear", 1.0))
    if name == "gemma3":
        scaling = {"rope_scaling": {"rope_type": kind, "factor": scale}} if scale != 1 or kind != "linear" else {}
        # llama.cpp knows the 27B, which alone scales queries by its width, by the number of layers too.
        scalar = width // heads if found["num_hidden_layers"] == 62 else found["head_dim"]
        window = value("attention.sliding_window")
        more = {"sliding_window": window, "query_pre_attn_scalar": scalar}
        return {"model_type": "gemma3_text", **found, **more, **scaling}
    if scale != 1 or kind not in ("linear", "none"):
        raise ValueError(f"it scales rotary positions by {scale} ({kind}), which Tunix's {name} does not")
    return {
        "model_type": name,
        **found,
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in tensors,
    }


# ---- tensors ---------------------------------------------------------------------------------------------------------

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True)
class Architecture:
    """How one of llama.cpp's architectures differs from the others.

    Attributes:
        more: its tensors beyond _BLOCK_NAMES, {GGUF's: Hugging Face's}, each with what follows the block's number.
        interleaved: maps (GGUF name, heads, kv heads) to the number of heads whose rows lie in pairs, or 0.
    """

    more: dict[str, str]
    interleaved: Callable[[str, int, int], int] = lambda kind, heads, kv_heads: 0


ARCHITECTURES = {
    "llama": Architecture({}, lambda kind, heads, kv_heads: {"attn_q": heads, "attn_k": kv_heads}.get(kind, 0)),
    "qwen2": Architecture({f"attn_{x}.bias": f"self_attn.{x}_proj.bias" for x in "qkv"}),
    "qwen3": Architecture({f"attn_{x}_norm.weight": f"self_attn.{x}_norm.weight" for x in "qk"}),
}


def hugging_face_name(gguf_name: str, architecture: Architecture) -> str:
    """Maps a GGUF tensor name to the Hugging Face one; raises ValueError for one the architecture does not have."""
    if gguf_name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[gguf_name]
    block, _, rest = gguf_name.partition(".")
    layer, _, kind = rest.partition(".")
    if block == "blk" and layer.isdigit():
        known = {**{f"{a}.weight": f"{b}.weight" for a, b in _BLOCK_NAMES.items()}, **architecture.more}
        if kind in known:
            return f"model.layers.{layer}.{known[kind]}"
    raise ValueError(f"its tensor {gguf_name!r} is nothing that Tunix's model computes with")


def halves(rows: Any, heads: int) -> Any:
    """Returns the rows of a projection with each head's two halves apart, as Hugging Face and Tunix rotate them.

    llama.cpp rotates neighbours: row 2 i + j of a head is row i of its half j.
    """
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _write_tensors(reader: Any, architecture: Architecture, folder: Path) -> None:
    import gguf
    import ml_dtypes
    import numpy as np
    from safetensors.numpy import save_file

    kinds = gguf.GGMLQuantizationType
    exact = {kinds.F32, kinds.F16}
    # bf16 beside the 2^-5 of 4-bit weights costs nothing, and halves the file; one dtype, as Tunix's loader wants it.
    dtype = np.float32 if {t.tensor_type for t in reader.tensors} <= exact else ml_dtypes.bfloat16
    name = reader.fields["general.architecture"].contents()
    heads = reader.fields[f"{name}.attention.head_count"].contents()
    kv_heads = reader.fields.get(f"{name}.attention.head_count_kv")
    kv_heads = heads if kv_heads is None else kv_heads.contents()
    tensors = {}
    for tensor in reader.tensors:
        to = hugging_face_name(tensor.name, architecture)
        values = np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        paired = architecture.interleaved(tensor.name.split(".")[-2], heads, kv_heads)
        values = halves(values, paired) if paired else values
        tensors[to] = np.ascontiguousarray(values.astype(dtype))
    save_file(tensors, folder / "model.safetensors")
