"""What a run trained, as a file: the adapters (or all weights) with the rank, alpha and targets that give them meaning."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from . import folder, models, weight_files
from .config import Config, ConfigError, Lora


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


def load(model: Any, path: Path, lora: Lora) -> None:
    """Puts what `save` wrote into the model, whose adapters `lora` describes.

    Raises:
        ConfigError: there is no such file, it is unsound, of another model, or of another scale.
    """
    import jax
    import jax.numpy as jnp
    from flax import nnx

    if not path.is_file():
        raise ConfigError(f"{path}: no such file; the run is not finished")
    with weight_files.safetensors(path) as file:
        saved, told = {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}
    scale = told.get("scale", "")
    if lora.rank and scale != str(lora.scale):
        raise ConfigError(
            f"{path}: its adapters were trained with a scale of {scale or '(it does not say)'}, the configuration's is "
            f"{lora.scale}; they mean something else with another"
        )
    expected, _ = of(model)
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
        "scale": str(lora.scale) if lora.rank else "1.0",
        "targets": json.dumps(lora.targets or list(models.TARGETS)),
    }
    folder.write(path, serialized({name: np.ascontiguousarray(array) for name, array in state.items()}, told))


def merged(model: Any, lora: Lora) -> Any:
    """Returns a copy of `model` with each adapter's product added to its weight, and the adapters' B zero.

    Raises:
        ConfigError: an adapted weight is quantised: there is no adding to it.
    """
    import jax.numpy as jnp
    from flax import nnx

    copy = nnx.clone(model)  # merge(*split()) would share the variables
    for path, module in list(nnx.iter_graph(copy)):
        if not isinstance(module, nnx.Module):
            continue
        adapted = [name.removesuffix("_lora_a") for name in vars(module) if name.endswith("_lora_a")]
        for name in adapted:
            weight = getattr(module, name)
            if not isinstance(weight, nnx.Variable):
                where = ".".join(map(str, (*path, name)))
                raise ConfigError(f"lora.bits: {where} is quantised; it cannot take the adapters")
            b = getattr(module, f"{name}_lora_b")
            change = lora.scale * _product(module, name, getattr(module, f"{name}_lora_a").get_value(), b.get_value())
            value = weight.get_value()
            weight.set_value((value + change.reshape(value.shape)).astype(value.dtype))
            b.set_value(jnp.zeros_like(b.get_value()))
    return copy


def _product(module: Any, name: str, a: Any, b: Any) -> Any:
    """A times B with its axes in the order of the weight's."""
    import jax.numpy as jnp

    equation = getattr(module, f"{name}_lora_einsum_str", None)  # qwix: "input,a,b->output"
    if equation is None:
        return a @ b
    parts = equation.split("->")[0].split(",")
    weight = module.einsum_str.replace(" ", "").split("->")[0].split(",")[1]
    return jnp.einsum(f"{parts[1]},{parts[2]}->{weight}", a, b)
