"""What a run trained, as a file: the adapters (or all weights) with the rank, alpha and targets that give them meaning."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from . import folder, models
from .config import Config, ConfigError


def of(model: Any) -> tuple[dict[str, Any], str]:
    """Returns what was trained as {path: array}, and a hash of its bytes."""
    import jax
    import numpy as np
    from flax import nnx

    flat = jax.tree_util.tree_flatten_with_path(nnx.to_pure_dict(nnx.state(model, models.trained(model))))[0]
    state = {_name(path): np.asarray(leaf) for path, leaf in flat}
    total = hashlib.sha256()
    for name in sorted(state):
        total.update(name.encode() + b"\0" + np.ascontiguousarray(state[name]).tobytes())
    return state, total.hexdigest()


def _name(path: Any) -> str:
    return "/".join(str(getattr(key, "key", key)) for key in path)


def load(model: Any, path: Path) -> None:
    """Puts what `save` wrote into the model.

    Raises:
        ConfigError: there is no such file, or it is of another model.
    """
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from safetensors.flax import load_file

    if not path.is_file():
        raise ConfigError(f"{path}: no such file; the run is not finished")
    saved, (expected, _) = load_file(path), of(model)
    shapes = {name: array.shape for name, array in expected.items()}
    if {name: array.shape for name, array in saved.items()} != shapes:
        raise ConfigError(f"{path}: its {len(saved)} arrays are not the {len(shapes)} of this model's adapters")
    state = nnx.state(model, models.trained(model))
    named = jax.tree_util.tree_map_with_path(
        lambda place, leaf: jnp.asarray(saved[_name(place)], leaf.dtype), nnx.to_pure_dict(state)
    )
    nnx.replace_by_pure_dict(state, named)
    nnx.update(model, state)


def save(path: Path, state: dict[str, Any], config: Config, source: models.Source) -> None:
    """Writes the adapters with what is needed to use them: without alpha and rank their scale is anyone's guess."""
    import numpy as np
    from safetensors.numpy import save as serialized

    lora = config.lora
    told = {
        "format": "cutloss-sft 1",
        "family": source.family,
        "rank": str(lora.rank),
        "alpha": str(float(lora.alpha or lora.rank)),
        "targets": json.dumps(lora.targets or list(models.TARGETS)),
    }
    folder.write(path, serialized({name: np.ascontiguousarray(array) for name, array in state.items()}, told))
