"""Inside shard_map, every array's type says along which mesh axes its values differ from device to device. Without care
an FFI result is taken for the same on all devices, and a psum over it, or the gradient of a replicated table, is wrong
without a word. So: all arguments are made varying along the axes of any of them (the transpose sums gradients over the
others), and so is everything computed from them."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax


def varying_axes(array: Any) -> frozenset[str]:
    return jax.typeof(array).manual_axis_type.varying


def vary(array: Any, axes: frozenset[str]) -> jax.Array:
    return lax.pcast(array, tuple(sorted(axes - varying_axes(array))), to="varying")


def vary_alike(*arrays: Any) -> list[jax.Array]:
    axes = frozenset().union(*map(varying_axes, arrays))
    return [vary(a, axes) for a in arrays]


def vary_like(array: Any, model: Any) -> jax.Array:
    return vary(array, varying_axes(model))
