"""The loss for arrays in CPU memory: NumPy in, NumPy out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np

from . import _arrays, _check, _core


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LossResult:
    """What ``linear_cross_entropy`` returns. Tokens that are ignored have 0 in every field."""

    loss: np.float32 | np.ndarray  #: float32: a scalar, or of the labels' shape for reduction "none"
    nll: np.ndarray  #: float32, the labels' shape: lse - logit of the label
    lse: np.ndarray  #: float32, the labels' shape: log-sum-exp of the logits
    d_e: np.ndarray | None  #: shape and dtype of e, if "e" is in wrt
    d_c: np.ndarray | None  #: shape and dtype of c, if "c" is in wrt
    valid_count: int  #: number of labels that are not ignore_index
    plan: _core.Plan  #: how it was done: .mode, .workspace_bytes, .threads, ..., .as_dict()


def linear_cross_entropy(
    e: Any,
    c: Any,
    labels: Any,
    *,
    wrt: str | Iterable[str] = ("e", "c"),
    reduction: str = "mean",
    ignore_index: int = -100,
    softcap: float | None = None,
    head_layout: str = "vd",
    cotangent: Any = None,
    mode: str = "auto",
    budget: int | str | None = None,
    threads: int | None = None,
    target: str | None = None,
) -> LossResult:
    """Cross-entropy of the logits ``e @ c.T`` against labels, and its gradients, without storing the logits.

    With logits ``z = e @ c.T`` (or ``softcap * tanh(e @ c.T / softcap)``)::

        lse_i = log(sum_v exp(z_iv))      nll_i = lse_i - z_i[label_i]      (0 where label_i == ignore_index)
        mean:  sum(nll) / number of labels that are not ignore_index, 0 if there is none
        sum:   sum(nll)                   none: nll

    Args:
      e: hidden states, [..., D], float32 or bfloat16 (``ml_dtypes.bfloat16``).
      c: the head's table, [V, D] for head_layout "vd", [D, V] for "dv"; float32 or bfloat16, independent of e.
      labels: [...], any integer dtype: ids in [0, V), or ignore_index.
      wrt: which gradients to compute: any of "e" and "c"; () for the loss alone.
      cotangent: upstream gradient of the loss: a number, or for reduction "none" also an array like the labels.
      mode: "auto" takes the fastest that fits the budget. In units u of one product of the logits' size, 2*N*V*D flops:
        "loss" no gradient, 1u; "stream" dE only, 2u; "chunk" 3u, holds the logits of some tokens; "recompute" 4u,
        3u for dC alone, holds a tile.
      budget: most memory to use beside inputs and results, in bytes or as text: "64MiB", "1.5GiB".
      threads: most threads to use; None for what the machine and the work suggest. The result does
        not depend on it, unless a budget makes the chunk of mode "chunk" depend on it.
      target: kernel target, one of ``available_targets()``; None for the best.

    Arrays may be NumPy arrays (read-only, memory-mapped, strided, reversed, broadcast) or speak DLPack (PyTorch CPU
    tensors, JAX arrays). They are read in place, without a copy, unless e's leading axes cannot be merged by strides or
    an address is not aligned. Gradients are always new, contiguous NumPy arrays. All sums are in float32.

    Raises:
      ValueError: shapes that do not fit together, an option out of range, a label outside [0, V).
      TypeError: a dtype that is not taken.
      BudgetError: (a ValueError) no mode fits the budget; the text names the smallest that works.
      MemoryError: the workspace or a result could not be allocated.
      RuntimeError: this CPU or build does not have the kernel target.
    """
    want_d_e, want_d_c = _check.wrt(wrt)
    reduction = _check.reduction(reduction)
    e, c, labels = _arrays.as_numpy("e", e), _arrays.as_numpy("c", c), _arrays.as_numpy("labels", labels)
    size = _check.sizes("e", e.shape, "c", c.shape, labels.shape, head_layout)
    e_flat, e_dtype, e_strides = _arrays.matrix("e", e)
    c_flat, c_dtype, c_strides = _arrays.matrix("c", c)
    label_flat, label_dtype, label_stride = _arrays.label_vector(labels)
    upstream = _cotangent(cotangent, reduction, labels.shape)

    plan = _core.make_plan(
        _core.detect_machine(target),
        tokens=size.tokens, hidden=size.hidden, vocab=size.vocab,
        e_dtype=e_dtype, c_dtype=c_dtype, label_dtype=label_dtype, head_layout=head_layout,
        e_strides=e_strides, c_strides=c_strides, label_stride=label_stride,
        reduction=reduction, ignore_index=_check.ignore_index(ignore_index), softcap=_check.softcap(softcap),
        want_d_e=want_d_e, want_d_c=want_d_c,
        mode=_check.mode(mode), budget=_check.budget(budget), threads=_check.threads(threads),
    )

    nll = np.empty(labels.shape, np.float32)
    lse = np.empty(labels.shape, np.float32)
    loss = np.empty(labels.shape if reduction == "none" else (), np.float32)
    d_e = np.empty(e.shape, e.dtype) if want_d_e else None
    d_c = np.empty(c.shape, c.dtype) if want_d_c else None
    valid_count = plan.run(
        e=e_flat.ctypes.data, c=c_flat.ctypes.data, labels=label_flat.ctypes.data, cotangent=_address(upstream),
        loss=loss.ctypes.data, nll=nll.ctypes.data, lse=lse.ctypes.data, d_e=_address(d_e), d_c=_address(d_c),
    )
    return LossResult(loss if reduction == "none" else loss[()], nll, lse, d_e, d_c, valid_count, plan)


def _address(array: np.ndarray | None) -> int:
    return 0 if array is None else array.ctypes.data


def _cotangent(value: Any, reduction: str, shape: tuple[int, ...]) -> np.ndarray | None:
    if value is None:
        return None
    array = np.asarray(_arrays.as_numpy("cotangent", value), np.float32)
    if reduction == "none":
        if array.shape not in ((), shape):
            raise ValueError(f"cotangent {array.shape}: a number, or the labels' shape {shape}, is wanted")
        return np.ascontiguousarray(np.broadcast_to(array, shape))
    if array.shape != ():
        raise ValueError(f"cotangent {array.shape}: a number is wanted for reduction {reduction!r}")
    return array
