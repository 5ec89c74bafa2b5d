"""GGUF files as what Tunix loads: a folder of safetensors, with a config.json and the tokenizer. Gemma 3 so far."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from .config import ConfigError
from .paths import cached_folder


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
            settings = config_json(path)
            gemma3.convert(path, folder)
        except (ValueError, KeyError) as error:
            raise ConfigError(f"model.path: {path}: {error}") from error
        (folder / "config.json").write_text(json.dumps(settings, indent=1))

    return cached_folder(f"{path.stem}-{seen}-v{gemma3.FORMAT}", build)


def config_json(path: Path) -> dict[str, Any]:
    """Returns the Hugging Face configuration that a Gemma 3 GGUF file amounts to.

    Raises:
        ValueError: the file is not GGUF, or holds another model.
    """
    import gguf

    reader = gguf.GGUFReader(path)
    architecture = reader.fields["general.architecture"].contents()
    if architecture != "gemma3":
        raise ValueError(f"it holds a {architecture!r} model; of GGUF files only 'gemma3' is read, give a folder of "
                         "safetensors")  # fmt: skip

    def value(key: str) -> Any:
        return reader.fields[f"gemma3.{key}"].contents()

    rows = next(tensor for tensor in reader.tensors if tensor.name == "token_embd.weight").shape[-1]
    scale = reader.fields.get("gemma3.rope.scaling.factor")
    return {
        "model_type": "gemma3_text",
        "num_hidden_layers": value("block_count"),
        "hidden_size": value("embedding_length"),
        "intermediate_size": value("feed_forward_length"),
        "num_attention_heads": value("attention.head_count"),
        "num_key_value_heads": value("attention.head_count_kv"),
        "head_dim": value("attention.key_length"),
        "sliding_window": value("attention.sliding_window"),
        "rope_theta": value("rope.freq_base"),
        "vocab_size": int(rows),
        **({} if scale is None else {"rope_scaling": {"factor": scale.contents()}}),
    }
