"""Inside shard_map, every array's type says along which mesh axes its values differ from device to device. Without care
an FFI result is taken for the same on all devices, and a psum over it, or the gradient of a replicated table, is wrong
without a word. So: all arguments are made varying along the axes of any of them (the transpose sums gradients over the
others), and so is everything computed from them."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType


def in_shard_map() -> bool:
    return AxisType.Manual in (jax.sharding.get_abstract_mesh().axis_types or ())


def _axes(kind: Any) -> frozenset[str] | None:
    """The axes in an array's type; None where this JAX keeps them elsewhere. They are no documented part of it: 0.10 has
    `manual_axis_type`, what came before had `vma`."""
    found = getattr(kind, "manual_axis_type", None)
    return getattr(kind, "vma", None) if found is None else found.varying


def varying_axes(array: Any) -> frozenset[str]:
    return _axes(jax.typeof(array)) or frozenset()


def vary(array: Any, axes: frozenset[str]) -> jax.Array:
    missing = tuple(sorted(axes - varying_axes(array)))
    return lax.pcast(array, missing, to="varying") if missing else array


def vary_alike(*arrays: Any) -> list[jax.Array]:
    """Of the arguments of a call."""
    if in_shard_map() and any(_axes(jax.typeof(a)) is None for a in arrays):
        raise NotImplementedError("inside jax.shard_map, cutloss has to see along which axes its arguments differ, and "
                                  f"JAX {jax.__version__} does not show it where 0.10 does: call the loss outside "
                                  "shard_map, with mesh=, x_spec= and w_spec=, or take a JAX that cutloss is tested with")
    axes = frozenset().union(*map(varying_axes, arrays))
    return [vary(a, axes) for a in arrays]


def vary_like(array: Any, model: Any) -> jax.Array:
    return vary(array, varying_axes(model))
