"""A finished run's model as a folder like the one it began from: the same files and names, with what was trained in them."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import adapter, models, run, weight_files
from .config import ConfigError

INDEX = "model.safetensors.index.json"


def export(path: Path, out: Path, dtype: str | None = None) -> int:
    """Writes the model of the finished run in the folder `path`, adapters merged, to `out`; returns the bytes of its weights.

    The folder appears whole or not at all. What Tunix's model has no place for, such as a vision tower, is copied.

    Args:
        dtype: of the weights, float32 or bfloat16; none: the run's model.dtype.

    Raises:
        ConfigError: `out` holds something, the run is not finished, its model came from no folder, or it is quantised.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is not empty; give another folder")
    config, source = run.settings(path)
    if source.folder is None:
        raise ConfigError(f"{path}: its model began with random weights; there is no folder whose names and files it has")
    if config.lora.bits:
        raise ConfigError(
            f"lora.bits: the weights of {path} are quantised to {config.lora.bits} bits and cannot take the adapters; "
            "its adapter.safetensors is what to keep"
        )
    model = models.load(source, config)
    _check_places(source, model)
    adapter.load(model, path / "adapter.safetensors", config.lora)
    if config.lora.rank:
        model = adapter.merged(model, config.lora)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=out.name + ".", dir=out.parent) as name:
        building = Path(name, out.name)
        building.mkdir()
        size = _write(source, model, building, dtype or config.model.dtype)
        building.rename(out)  # also over an empty folder
    return size


def _write(source: models.Source, model: Any, folder: Path, dtype: str) -> int:
    import ml_dtypes  # noqa: F401  (makes "bfloat16" a NumPy dtype)
    import numpy as np
    from safetensors.numpy import save_file

    places, total = _Places(source, model), 0
    for path in sorted(source.folder.glob("*.safetensors")):
        tensors = {}
        with weight_files.safetensors(path) as file:
            told = file.metadata() or {"format": "pt"}
            for name in file.keys():
                stored = file.get_tensor(name)
                found = places.value(name, stored.shape)
                tensors[name] = stored if found is None else np.ascontiguousarray(found.astype(np.dtype(dtype)))
        total += sum(array.nbytes for array in tensors.values())
        save_file(tensors, folder / path.name, told)
    for path in source.folder.iterdir():
        if path.is_file() and path.suffix != ".safetensors":
            shutil.copyfile(path, folder / path.name)
    _retell(folder, dtype, total)
    return total


def _retell(folder: Path, dtype: str, size: int) -> None:
    """Puts the dtype and the size where the copied files tell another."""
    path = folder / "config.json"
    if path.is_file():
        config = json.loads(path.read_text())
        for part in (config, config.get("text_config") or {}):
            for key in part.keys() & {"dtype", "torch_dtype"}:
                part[key] = dtype
        path.write_text(json.dumps(config, indent=2) + "\n")
    path = folder / INDEX
    if path.is_file():
        index = json.loads(path.read_text())
        index.setdefault("metadata", {})["total_size"] = size
        path.write_text(json.dumps(index, indent=2) + "\n")


# ---- where a tensor of a file is in Tunix's model --------------------------------------------------------------------


class _Places:
    """Tunix's loader backwards: the values of a model under the names and in the shapes of the files it was read from.

    Its table gives, for the name of a tensor, a place in the model, and how the tensor's axes are permuted and then
    reshaped on the way there. Gemma's queries, keys and values go to places of their own that begin with `tmp.`, from
    which they are stacked.
    """

    def __init__(self, source: models.Source, model: Any) -> None:
        self.arrays = dict(_arrays(model))
        self.tied = not any(place.startswith("lm_head.") for place in self.arrays)
        with models.loader_of(source) as loader:
            self.table = loader._get_key_and_transform_mapping(source.config)

    def value(self, name: str, shape: tuple[int, ...]) -> Any:
        """Returns what the model has for the tensor `name`, or None if it has no place for it."""
        import numpy as np
        from tunix.utils import torch_utils

        if self.tied and name.endswith("lm_head.weight"):
            return np.asarray(self.arrays["embedder.input_embedding"])
        try:
            place, transform = torch_utils.torch_key_to_jax_key(self.table, name)
        except ValueError:
            return None
        array = self._at(place.removesuffix(".value"))
        if array is None:
            return None
        axes = (transform or (None, None))[0] or tuple(range(len(shape)))
        return array.reshape([shape[axis] for axis in axes]).transpose(np.argsort(axes))

    def _at(self, place: str) -> Any:
        import numpy as np

        if not place.startswith("tmp."):
            array = self.arrays.get(place)
            return None if array is None else np.asarray(array)
        layer, _, part = place.removeprefix("tmp.").rpartition(".")
        # [heads, width, head] of each, one on top of the other; the files have the width first.
        for stack, parts in (("qkv_einsum", "qkv"), ("q_einsum", "q"), ("kv_einsum", "kv"), ("k_einsum", "k")):
            array = self.arrays.get(f"{layer}.{stack}.w")
            if array is not None and part in parts:
                one = array[parts.index(part)] if len(parts) > 1 else array
                return np.asarray(one).transpose(1, 0, 2)
        return None


def _arrays(model: Any) -> Iterator[tuple[str, Any]]:
    import jax
    from flax import nnx

    state = nnx.state(model, nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam)))
    for path, leaf in jax.tree_util.tree_flatten_with_path(nnx.to_pure_dict(state))[0]:
        yield ".".join(str(key.key) for key in path), leaf


def _check_places(source: models.Source, model: Any) -> None:
    """Raises RuntimeError unless the loaded model, written back, has the values of the files: before anything is changed.

    The loader's table is Tunix's own; another version's may say something else.
    """
    import numpy as np

    places, seen = _Places(source, model), 0
    for path in sorted(source.folder.glob("*.safetensors")):
        with weight_files.safetensors(path) as file:
            for name in file.keys():
                stored = file.get_tensor(name)
                found = places.value(name, stored.shape)
                if found is None:
                    continue
                if found.tobytes() != stored.astype(found.dtype).tobytes():
                    raise RuntimeError(f"{path}: {name} is not what this Tunix's model has in its place")
                seen += found.size if not (places.tied and name.endswith("lm_head.weight")) else 0
    if (held := sum(np.size(array) for array in places.arrays.values())) != seen:
        raise RuntimeError(f"{source.folder}: of {held} numbers of this Tunix's model {seen} have a place in the files")
