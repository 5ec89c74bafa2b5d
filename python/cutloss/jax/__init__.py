"""The loss for JAX programs: a drop-in for "project to the vocabulary, then cross-entropy" that never forms the logits.

On CPU the C++ kernels run inside the jitted program (XLA FFI); on TPU and GPU the same algorithm runs as plain XLA.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _check
from . import _manual, _options, _vjp

__all__ = ["linear_cross_entropy"]


def linear_cross_entropy(
    x: Any,
    w: Any,
    labels: Any,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    softcap: float | None = None,
    head_layout: str = "vd",
    mode: str = "auto",
    budget: int | str | None = None,
    threads: int | None = None,
    _impl: str = "auto",
    _tiles: tuple[int | None, int | None] = (None, None),
) -> jax.Array:
    """Cross-entropy of the logits ``x @ w.T`` against labels, without storing the logits. Differentiable in x and w.

    With logits ``z = x @ w.T`` (or ``softcap * tanh(x @ w.T / softcap)``)::

        nll_i = log(sum_v exp(z_iv)) - z_i[label_i]      (0 where label_i == ignore_index)
        mean:  sum(nll) / number of labels that are not ignore_index, 0 if there is none
        sum:   sum(nll)                   none: nll

    Args:
      x: hidden states, [..., D], float32 or bfloat16.
      w: the head's table, [V, D] for head_layout "vd" (a tied embedding), [D, V] for "dv" (a JAX kernel); float32 or
        bfloat16, independent of x.
      labels: [...], any integer dtype: ids in [0, V), or ignore_index.
      reduction, ignore_index, softcap, head_layout: Python values, as above.
      mode, budget, threads: limits for the CPU kernels, as in ``cutloss.linear_cross_entropy``; the workspace is part
        of the program, so that ``compiled.memory_analysis()`` counts it. Elsewhere tiles are 512 tokens x 8192 ids.

    Returns:
      The loss in float32: a scalar, or of the labels' shape for reduction "none".

    Cost, in units u of one product of the logits' size (2*N*V*D flops), and what is kept for the backward pass. Which
    arguments need a gradient is seen from the differentiation: a head that is not differentiated costs nothing. ::

        not differentiated                  1u          nothing
        x only (frozen head)                2u          the gradient of x, in x's dtype; backward only scales it
        w, or both; mean and sum            3u to 4u    the gradients, in their argument's dtype; backward only scales
        w, or both; "none"                  4u to 5u    two numbers a token; backward forms the logits again

    Gradients have the dtype of their argument, sums are in float32. Products of float32 arrays on TPU and GPU follow
    ``jax.default_matmul_precision``. Works under jit, grad, vjp, vmap, scan, checkpoint and shard_map, with x64 on
    or off. Meshes of explicit axes are refused by JAX: use shard_map there. Outside shard_map, with automatic axes, the
    C++ kernels on CPU see gathered arguments on every device.

    Raises (at trace time):
      ValueError: shapes that do not fit together, an option out of range; in a call outside jit also a label outside
        [0, V). Inside jit such a label gives NaN for its token's loss and gradient.
      TypeError: a dtype that is not taken; a second derivative or forward-mode differentiation.
      BudgetError: (a ValueError) no mode fits the budget.
    """
    options = _options.Options(
        reduction=_check.reduction(reduction),
        ignore_index=_check.ignore_index(ignore_index),
        softcap=_check.softcap(softcap),
        head_layout=_check.one_of("head_layout", head_layout, ("vd", "dv")),
        mode=_check.mode(mode),
        budget=_check.budget(budget),
        threads=_check.threads(threads),
        impl=_check.one_of("_impl", _impl, ("auto", "cpu", "xla")),
        tiles=_tiles,
    )
    labels = labels if isinstance(labels, jax.Array) else np.asarray(labels)
    x, w = jnp.asarray(x), jnp.asarray(w)
    _check.dtype_name("x", x.dtype)
    _check.dtype_name("w", w.dtype)
    _check.label_dtype(labels.dtype)
    size = _check.sizes("x", x.shape, "w", w.shape, labels.shape, head_layout)
    if _known(labels):  # before JAX narrows int64, where an id of 2**32 + 5 would become 5
        _check.label_values(np.asarray(labels), size.vocab, options.ignore_index)
    x, w, ids = _manual.vary_alike(x.reshape(size.tokens, size.hidden), w, _kernel_labels(labels, options).reshape(-1))
    loss = _vjp.loss(options, x, w, ids)
    return loss.reshape(labels.shape) if reduction == "none" else loss


def _known(labels: jax.Array | np.ndarray) -> bool:
    """Whether the values can be looked at now: not while tracing, nor where other hosts hold a part."""
    if isinstance(labels, jax.core.Tracer):
        return False
    return not isinstance(labels, jax.Array) or labels.is_fully_addressable


def _kernel_labels(labels: jax.Array | np.ndarray, options: _options.Options) -> jax.Array:
    """Labels as int32 or int64. Large unsigned ids are kept out of range instead of wrapping into it."""
    taken = labels.dtype
    if labels.dtype.kind == "u" and labels.dtype.itemsize >= 4:
        top = 2**31 - (2 if options.ignore_index == 2**31 - 1 else 1)
        labels = jnp.minimum(jnp.asarray(labels), top).astype(jnp.int32)
    elif labels.dtype in (np.int32, np.int64):
        labels = jnp.asarray(labels)  # int64 becomes int32 where x64 is off
    else:
        labels = jnp.asarray(labels).astype(jnp.int32)
    limits = jnp.iinfo(labels.dtype)
    if not limits.min <= options.ignore_index <= limits.max:
        raise ValueError(f"ignore_index {options.ignore_index} does not fit {labels.dtype}, in which JAX holds these "
                         f"{taken} labels: no label can equal it; use one that fits, such as -100")
    return labels
