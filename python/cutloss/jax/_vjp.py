"""The loss as a function that JAX can differentiate: which gradients are needed, when they are formed, what is kept."""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from . import _ffi, _lowering, _sharded, _xla
from ._manual import vary_like
from ._options import Extra, Options, Values, Wants

_NOTHING = Wants(False, False)


# ------------------------------------------------------------------------------------------------------- evaluation


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _evaluate(options: Options, wants: Wants, x: jax.Array, w: jax.Array, labels: jax.Array | None,
              cotangent: jax.Array, saved: tuple[jax.Array, jax.Array, jax.Array] | None, extra: Extra) -> Values:
    return _compiled(options, wants, x, w, labels, cotangent, saved, extra)


@_evaluate.defjvp
def _no_second_derivative(*_: Any) -> Any:
    raise TypeError("cutloss.jax.linear_cross_entropy has first derivatives in reverse mode only: its gradient cannot "
                    "be differentiated again (hessian, jvp of grad, grad of grad)")


@functools.partial(jax.jit, static_argnums=(0, 1))
def _compiled(options: Options, wants: Wants, x: jax.Array, w: jax.Array, labels: jax.Array | None,
              cotangent: jax.Array, saved: tuple[jax.Array, jax.Array, jax.Array] | None, extra: Extra) -> Values:
    def kernels(options: Options, x: Any, w: Any, labels: Any, cotangent: Any, _: Any, extra: Extra) -> Values:
        return _ffi.evaluate(options, wants, x, w, labels, cotangent, extra)

    def tiles(options: Options, x: Any, w: Any, labels: Any, cotangent: Any, saved: Any, extra: Extra) -> Values:
        return _xla.evaluate(options, wants, x, w, labels, cotangent, saved, extra=extra)

    arguments = (x, w, labels, cotangent, saved, extra)
    _check_plan(options, wants, x, w, labels, extra)
    if options.layout is not None:
        return _sharded.evaluate(options, wants, *arguments)
    if options.filter is not None and any(wants):
        if options.impl == "xla" or not _ffi.available():
            raise ValueError(f"filter {options.filter!r} runs in the C++ kernels, on CPU only; elsewhere use no filter, "
                             "or filter_eps")
        run = functools.partial(kernels, options)
        return run(*arguments) if options.impl == "cpu" else lax.platform_dependent(*arguments, cpu=run)
    if options.impl == "xla" or (options.filter_eps is not None and any(wants)):
        return tiles(options, *arguments)
    if not _ffi.available():
        _warn_no_kernels()
        return tiles(options, *arguments)
    return _lowering.either(options, "", kernels, tiles, *arguments)


@functools.cache
def _warn_no_kernels() -> None:
    warnings.warn("this build of cutloss was made without JAX's FFI headers: on CPU the loss runs as plain XLA, "
                  "slower. Build it again where jax is installed, or set CUTLOSS_XLA_INCLUDE_DIR.", stacklevel=2)


def _check_plan(options: Options, wants: Wants, x: jax.Array, w: jax.Array, labels: jax.Array | None,
                extra: Extra) -> None:
    """Every rule on the problem, by the kernels' planner on any platform; a budget is that of what runs. On a mesh the
    plan is of one device's part, and made there."""
    flat = jax.ShapeDtypeStruct((math.prod(x.shape[:-1]), x.shape[-1]), x.dtype)
    kernels = options.layout is None and options.filter_eps is None and _lowering.is_for_cpu(options)
    _ffi.make_plan(options if kernels else options._replace(budget=None), wants, flat, w, labels, extra)
    if options.layout is None and not kernels and options.filter is None:
        _xla.check_plan(options, wants, flat, w, extra)


def _ones(options: Options, x: jax.Array) -> jax.Array:
    return vary_like(jnp.ones(x.shape[:-1] if options.reduction == "none" else (1,), jnp.float32), x)


# -------------------------------------------------------------------------------------------------- differentiation


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def loss(options: Options, x: jax.Array, w: jax.Array, labels: jax.Array | None,
         extra: Extra) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """x [N, D], w [V, D] or [D, V], labels [N] -> the loss, f32, a scalar or [N]; lse [N]; the metrics.

    On a mesh N may be several axes. Of the metrics none but lse has a gradient: what is differentiated is refused.
    """
    return _outputs(options, _evaluate(options, _NOTHING, x, w, labels, _ones(options, x), None, _read(options, x, extra)))


def _outputs(options: Options, values: Values) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    metrics = dict(values.metrics)
    if "nll" in options.metrics:
        metrics["nll"] = values.nll
    return values.loss, values.peak + values.log_mass, metrics


def _read(options: Options, x: jax.Array, extra: Extra) -> Extra:
    """A row whose targets have no weight is read for its lse if that is asked for."""
    if "lse" in options.metrics and (extra.class_weights is not None or extra.soft_ids is not None):
        return extra._replace(lse_cotangent=vary_like(jnp.zeros(x.shape[:-1], jnp.float32), x))
    return extra


def _forward(options: Options, x: Any, w: Any, labels: Any, extra: Any) -> tuple[Any, Any]:
    for name in ("token_weights", "class_weights", "soft_probabilities", "denominator"):
        primal = getattr(extra, name)
        if primal is not None and primal.perturbed:
            raise TypeError(f"{name} has no gradient, and is being differentiated: pass jax.lax.stop_gradient({name}), "
                            "or take reduction='none' and weigh the losses outside")
    wants = Wants(x.perturbed, w.perturbed, extra.bias is not None and extra.bias.perturbed)
    x, w, labels, extra = jax.tree.map(lambda primal: primal.value, (x, w, labels, extra))
    read = _read(options, x, extra)
    later = _forms_later(options, wants, w, extra)
    if later and "filter_report" in options.metrics:
        why = "reduction 'none'" if options.reduction == "none" else "a float16 gradient"
        raise ValueError(f"filter_report with {why} and a head that is differentiated: the filter runs in the backward "
                         "pass then, after the metrics are returned. Take 'mean' or 'sum', with token_weights, and a head "
                         "in float32 or bfloat16")
    if later:
        _check_plan(options, wants, x, w, labels, read)  # refuse now what the backward pass would refuse
    wide = options._replace(wide_d_x=x.dtype == jnp.float16)
    now = _evaluate(wide, _NOTHING if later else wants, x, w, labels, _ones(options, x), None, read)
    scaled = None if later else (now.d_x, now.d_w, now.d_bias)
    again = (x, w, labels, extra, (now.nll, now.peak, now.log_mass)) if later or "lse" in options.metrics else None
    return _outputs(options, now), _Kept(wants, x.dtype, scaled, again)


def _forms_later(options: Options, wants: Wants, w: jax.Array, extra: Extra) -> bool:
    """Whether the backward pass forms the gradients, and not the forward pass for a cotangent of 1.

    With reduction "none" dw is no sum of saved parts scaled by one number. In f16 a gradient of a mean over many tokens
    is below the smallest number, 6e-8, before a loss scale of 2^15 lifts it. For x, N x D, f32 is kept instead. (bf16
    has the range of f32: there a cotangent that is no power of 2 rounds a second time, and nothing more. To keep f32
    would take more memory than the gradient itself.)
    """
    narrow = (wants.d_w and w.dtype == jnp.float16) or (wants.d_bias and extra.bias.dtype == jnp.float16)
    return wants.head and (options.reduction == "none" or narrow)


def _backward(options: Options, kept: Any, cotangents: Any) -> tuple[Any, Any, None, Any]:
    of_loss, of_lse, of_metrics = cotangents
    _refuse_metrics(of_metrics)
    lse_is_used = "lse" in options.metrics and not isinstance(of_lse, SymbolicZero)
    if isinstance(of_loss, SymbolicZero) and not lse_is_used:
        return None, None, None, None
    if isinstance(of_loss, SymbolicZero):
        of_loss = jnp.zeros(of_loss.shape, of_loss.dtype)
    if kept.scaled is None or lse_is_used:
        x, w, labels, extra, saved = kept.again
        full = extra._replace(lse_cotangent=of_lse) if lse_is_used else _read(options, x, extra)
        cotangent = of_loss if options.reduction == "none" else of_loss.reshape(1)
        # No metrics a second time.
        bare = options._replace(metrics=options.metrics & {"lse"}, top_k=0)
        values = _evaluate(bare, kept.wants, x, w, labels, cotangent, saved, full)
        return values.d_x, values.d_w, None, _bias_only(values.d_bias)
    d_x, d_w, d_bias = kept.scaled
    if d_x is not None:
        # 0 * inf is no 0: an ignored token's cotangent may be anything.
        scaled = d_x.astype(jnp.float32) * of_loss[..., None]
        scaled = jnp.where(d_x == 0, 0, scaled) if options.reduction == "none" else scaled
        d_x = scaled.astype(kept.dtype)
    d_w, d_bias = (a if a is None else (a.astype(jnp.float32) * of_loss).astype(a.dtype) for a in (d_w, d_bias))
    return d_x, d_w, None, _bias_only(d_bias)


def _refuse_metrics(cotangents: dict[str, Any]) -> None:
    """A gradient of 0 would be wrong without a word. Integers and truth values have none (float0)."""
    for name, cotangent in cotangents.items():
        if isinstance(cotangent, SymbolicZero) or cotangent.dtype == jax.dtypes.float0:
            continue
        if isinstance(cotangent, jax.core.Tracer) or np.any(cotangent):
            other = ", or take the losses of reduction='none'" if name == "nll" else ""
            raise TypeError(f"metric {name!r} has no gradient, and is being differentiated: pass on "
                            f"jax.lax.stop_gradient of it{other}")


def _bias_only(d_bias: Any) -> Any:
    return None if d_bias is None else Extra(bias=d_bias)


@jax.tree_util.register_pytree_node_class
class _Kept:
    """For the backward pass: gradients for a cotangent of 1, or what it takes to form them, or both; the dtype of x."""

    def __init__(self, wants: Wants, dtype: Any, scaled: Any, again: Any):
        self.wants, self.dtype, self.scaled, self.again = wants, dtype, scaled, again

    def tree_flatten(self) -> tuple[Any, tuple[Wants, Any]]:
        return (self.scaled, self.again), (self.wants, self.dtype)

    @classmethod
    def tree_unflatten(cls, static: tuple[Wants, Any], parts: Any) -> _Kept:
        return cls(*static, *parts)


loss.defvjp(_forward, _backward, symbolic_zeros=True)
