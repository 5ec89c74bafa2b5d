"""The loss as a function that JAX can differentiate: which gradients are needed, when they are formed, what is kept."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from . import _ffi, _sharded, _xla
from ._manual import vary_like
from ._options import Options, Values, Wants

_NOTHING = Wants(False, False)


# ------------------------------------------------------------------------------------------------------- evaluation


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _evaluate(options: Options, wants: Wants, x: jax.Array, w: jax.Array, labels: jax.Array, cotangent: jax.Array,
              saved: tuple[jax.Array, jax.Array, jax.Array] | None) -> Values:
    return _compiled(options, wants, x, w, labels, cotangent, saved)


@_evaluate.defjvp
def _no_second_derivative(*_: Any) -> Any:
    raise TypeError("cutloss.jax.linear_cross_entropy has first derivatives in reverse mode only: its gradient cannot "
                    "be differentiated again (hessian, jvp of grad, grad of grad)")


@functools.partial(jax.jit, static_argnums=(0, 1))
def _compiled(options: Options, wants: Wants, x: jax.Array, w: jax.Array, labels: jax.Array, cotangent: jax.Array,
              saved: tuple[jax.Array, jax.Array, jax.Array] | None) -> Values:
    def kernels(x: jax.Array, w: jax.Array, labels: jax.Array, cotangent: jax.Array, saved: Any) -> Values:
        loss, lse, d_x, d_w = _ffi.evaluate(options, wants, x, w, labels, cotangent)
        return _shaped(options, wants, Values(loss, lse, jnp.zeros_like(lse), d_x, d_w))

    def tiles(x: jax.Array, w: jax.Array, labels: jax.Array, cotangent: jax.Array, saved: Any) -> Values:
        return _shaped(options, wants, _xla.evaluate(options, wants, x, w, labels, cotangent, saved))

    arguments = (x, w, labels, cotangent, saved)
    _check_plan(options, wants, x, w, labels)
    if options.layout is not None:
        return _sharded.evaluate(options, wants, *arguments)
    if options.impl == "xla":
        return tiles(*arguments)
    if not _ffi.available():
        _warn_no_kernels()
        return tiles(*arguments)
    return kernels(*arguments) if options.impl == "cpu" else lax.platform_dependent(
        *arguments, cpu=kernels, default=tiles)


def _shaped(options: Options, wants: Wants, values: Values) -> Values:
    loss = values.loss if options.reduction == "none" else values.loss.reshape(())
    return values._replace(loss=loss, d_x=values.d_x if wants.d_x else None, d_w=values.d_w if wants.d_w else None)


@functools.cache
def _warn_no_kernels() -> None:
    warnings.warn("this build of cutloss was made without JAX's FFI headers: on CPU the loss runs as plain XLA, "
                  "slower. Build it again where jax is installed, or set CUTLOSS_XLA_INCLUDE_DIR.", stacklevel=2)


def _check_plan(options: Options, wants: Wants, x: jax.Array, w: jax.Array, labels: jax.Array) -> None:
    """Makes the plan of the kernels for its checks, the same on every platform and mesh."""
    flat = jax.ShapeDtypeStruct((labels.size, x.shape[-1]), x.dtype)
    _ffi.make_plan(options, wants, flat, w, labels)


def _ones(options: Options, x: jax.Array) -> jax.Array:
    return vary_like(jnp.ones(x.shape[:-1] if options.reduction == "none" else (1,), jnp.float32), x)


# -------------------------------------------------------------------------------------------------- differentiation


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def loss(options: Options, x: jax.Array, w: jax.Array, labels: jax.Array) -> jax.Array:
    """x [N, D], w [V, D] or [D, V], labels [N] -> f32, a scalar or [N]. On a mesh N may be several axes."""
    return _evaluate(options, _NOTHING, x, w, labels, _ones(options, x), None).loss


def _forward(options: Options, x: Any, w: Any, labels: Any) -> tuple[jax.Array, Any]:
    wants = Wants(x.perturbed, w.perturbed)
    x, w, labels = x.value, w.value, labels.value
    if wants.d_w and options.reduction == "none":
        # dw is no sum of saved parts scaled by one number: the backward pass has to see the cotangent.
        _check_plan(options, wants, x, w, labels)  # refuse now what the backward pass would refuse
        now = _evaluate(options, _NOTHING, x, w, labels, _ones(options, x), None)
        return now.loss, _Later(wants, (x, w, labels, now.loss, now.peak, now.log_mass))
    now = _evaluate(options, wants, x, w, labels, _ones(options, x), None)
    return now.loss, _Scaled((now.d_x, now.d_w, labels if wants.d_x else None))


def _backward(options: Options, kept: Any, cotangent: Any) -> tuple[Any, Any, None]:
    if isinstance(cotangent, SymbolicZero):
        return None, None, None
    if isinstance(kept, _Later):
        x, w, labels, *saved = kept.arrays
        values = _evaluate(options, kept.wants, x, w, labels, cotangent, tuple(saved))
        return values.d_x, values.d_w, None
    d_x, d_w, labels = kept.arrays
    if d_x is not None:
        # 0 * inf is no 0: an ignored token's cotangent may be anything.
        scale = jnp.where(labels == options.ignore_index, 0, cotangent)[..., None]
        d_x = (d_x.astype(jnp.float32) * scale).astype(d_x.dtype)
    if d_w is not None:
        d_w = (d_w.astype(jnp.float32) * cotangent).astype(d_w.dtype)
    return d_x, d_w, None


@jax.tree_util.register_pytree_node_class
class _Scaled:
    """Gradients for a cotangent of 1."""

    def __init__(self, arrays: tuple[Any, ...]):
        self.arrays = arrays

    def tree_flatten(self) -> tuple[Any, None]:
        return self.arrays, None

    @classmethod
    def tree_unflatten(cls, _: None, arrays: Any) -> _Scaled:
        return cls(tuple(arrays))


@jax.tree_util.register_pytree_node_class
class _Later:
    """What it takes to form the gradients once the cotangent is known."""

    def __init__(self, wants: Wants, arrays: tuple[Any, ...]):
        self.wants, self.arrays = wants, arrays

    def tree_flatten(self) -> tuple[Any, Wants]:
        return self.arrays, self.wants

    @classmethod
    def tree_unflatten(cls, wants: Wants, arrays: Any) -> _Later:
        return cls(wants, tuple(arrays))


loss.defvjp(_forward, _backward, symbolic_zeros=True)
