"""The loss for arrays in CPU memory: NumPy in, NumPy out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from . import _check, _core
from ._call import Call


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LossResult:
    """What ``linear_cross_entropy`` returns. Tokens that are ignored have 0 in every field (-1 for an id)."""

    loss: np.float32 | np.ndarray  #: float32: a scalar, or one for each token for reduction "none"
    nll: np.ndarray  #: float32, one for each token: lse - logit of the label
    lse: np.ndarray  #: float32, one for each token: log-sum-exp of the logits
    d_e: np.ndarray | None  #: shape and dtype of e, if "e" is in wrt
    d_c: np.ndarray | None  #: shape and dtype of c, if "c" is in wrt
    d_bias: np.ndarray | None  #: shape and dtype of the bias, if "bias" is in wrt
    metrics: dict[str, np.ndarray]  #: by name; "top_k=5" gives "top_k_ids" and "top_k_logprobs", [..., 5]
    valid_count: int  #: number of labels that are not ignore_index
    plan: _core.Plan  #: how it was done: .mode, .workspace_bytes, .threads, ..., .as_dict()
    filter_report: _core.FilterReport | None  #: what the filter did, if there was one


def linear_cross_entropy(
    e: Any,
    c: Any,
    labels: Any = None,
    *,
    bias: Any = None,
    wrt: str | Iterable[str] = ("e", "c"),
    reduction: str = "mean",
    denominator: float | None = None,
    ignore_index: int = -100,
    token_weights: Any = None,
    class_weights: Any = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    shift: int = 0,
    soft_targets: tuple[Any, Any] | None = None,
    cotangent: Any = None,
    lse_cotangent: Any = None,
    metrics: str | Iterable[str] = (),
    mode: str = "auto",
    filter: str | None = None,
    tolerance: float | None = None,
    epsilon: float | None = None,
    vocab_order: Any = None,
    budget: int | str | None = None,
    threads: int | None = None,
    seed: int = 0,
    head_layout: str = "vd",
    accumulate: Mapping[str, np.ndarray] | None = None,
    compensated: bool = False,
    target: str | None = None,
) -> LossResult:
    """Cross-entropy of the logits ``e @ c.T`` against labels, and its gradients, without storing the logits.

    With raw logits ``r = logit_scale * e @ c.T + bias``, logits ``z = softcap * tanh(r / softcap)`` (or r), class
    weights w (or 1, W = sum(w)), token weights t (or 1), smoothing s and label y::

        lse_i = log(sum_v exp(z_iv))      nll_i = lse_i - z_iy           (0 where y is ignore_index)
        l_i = t_i * ((1-s) * w_y * nll_i + s/V * sum_v w_v * (lse_i - z_iv) + z_loss * lse_i**2)
        mean:  sum(l) / denominator, by default sum_i t_i * w_y over the valid rows; 0 if that is 0
        sum:   sum(l)                     none: l

    Args:
      e: hidden states, [..., D], float32, bfloat16 (``ml_dtypes.bfloat16``) or float16.
      c: the head's table, [V, D] for head_layout "vd", [D, V] for "dv"; float32, bfloat16 or float16, whatever e is.
      labels: [...], any integer dtype: ids in [0, V), or ignore_index. None with soft_targets.
      bias: [V], float32, bfloat16 or float16; -inf masks an id (with a softcap it is a logit of -softcap).
      wrt: which gradients to compute: any of "e", "c" and "bias"; () for the loss alone.
      denominator: of a mean, where it is known better than from this call: gradient accumulation, several devices.
      token_weights: [...], real or bool. A row of weight 0 is not looked at.
      class_weights, label_smoothing: as in ``torch.nn.functional.cross_entropy``.
      z_loss: coefficient of lse**2, under the token's weight.
      logit_scale: the inverse of a temperature.
      shift: row i is matched with label (or soft target) i + shift of its sequence, the second last axis of e; the last
        `shift` rows count as ignored. Weights belong to rows, not to labels.
      soft_targets: (ids, probabilities), both [..., K], in place of labels: the loss is sum_k q_k * (lse - z_k).
        Probabilities may add up to less than 1; ignore_index pads the ids. nll, "correct" and "rank" are those of the
        likeliest id; a row that is all padding has none: nll 0, rank -1, not correct.
      cotangent: upstream gradient of the loss: a number, or for reduction "none" also one for each token.
      lse_cotangent: upstream gradient of lse: a number, or one for each token.
      metrics: any of "entropy" (of the softmax), "argmax" (the lowest id of the largest logit), "correct" (whether that
        is the label), "rank" (number of logits above the label's), "top_k=5" (ids and log-probabilities of the 5
        largest logits; any k up to 128), "mean_logits" ([V], the mean over valid rows). Where the lse is NaN, ids and
        rank are -1.
      mode: "auto" takes the fastest that fits the budget. In units u of one product of the logits' size, 2*N*V*D flops:
        "loss" no gradient, 1u; "stream" dE only, 2u; "chunk" 3u, holds the logits of some tokens; "recompute" 4u,
        3u for dC alone, holds a tile; "sparse", with a filter, 1u and the kept entries' share of the rest.
      filter: None: exact gradients. "certified" drops entries of the softmax below epsilon and bounds what that costs;
        "unbiased" keeps such an entry p with probability p / epsilon and weight epsilon, right in expectation, by random
        numbers from `seed`; "tile" drops whole tiles as Cut Cross-Entropy does. The loss is exact with any.
      tolerance: what the filter may cost a row: "certified": softmax mass dropped; "unbiased": sqrt(epsilon * mass below
        epsilon). Rows that would pass it are done exactly. Give this or epsilon.
      epsilon: a probability, in (0, 1).
      vocab_order: [V], a permutation in which the vocabulary is worked through, or "learned": by falling mean logit, for
        this call (``cutloss.learn_vocab_order`` gives it for many). Filters keep fewer entries with it.
      budget: most memory to use beside inputs and results, in bytes or as text: "64MiB", "1.5GiB".
      threads: most threads to use; None (or 0) for what the machine and the work suggest. The result does
        not depend on it, unless a budget makes the chunk of mode "chunk" depend on it.
      accumulate: ``{"d_c": array, ...}``: gradients ("d_e", "d_c", "d_bias") that are added to an array instead of
        written to a new one, rounding once. C-contiguous, of the input's shape; d_e and d_c of any of the three dtypes.
      compensated: in mode "chunk", sum dC over chunks with its rounding errors kept: for a bfloat16 dC of many chunks.
      target: kernel target, one of ``available_targets()``; None for the best.

    Arrays may be NumPy arrays (read-only, memory-mapped, strided, reversed, broadcast) or speak DLPack (PyTorch CPU
    tensors, JAX arrays). e, c and labels are read in place, without a copy, unless e's leading axes cannot be merged by
    strides or an address is not aligned. Results are contiguous NumPy arrays. All sums are in float32.

    Raises:
      ValueError: shapes that do not fit together, an option out of range, a label outside [0, V).
      TypeError: a dtype or a kind of value that is not taken.
      BudgetError: (a ValueError) no mode fits the budget; the text names the smallest that works.
      MemoryError: the workspace or a result could not be allocated.
      RuntimeError: this CPU or build does not have the kernel target.
    """
    reduction = _check.reduction(reduction)
    wanted = _check.metrics(metrics)
    call = Call(e, c, head_layout, labels, soft_targets)
    call.bias(bias)
    call.weights(token_weights, class_weights)
    call.cotangents(cotangent, lse_cotangent, reduction)
    call.shift(_check.integer("shift", shift, -(2**63)))
    call.vocab_order(vocab_order)
    call.metrics(wanted)
    call.gradients(_check.wrt(wrt), accumulate)
    call.values = {"denominator": _check.optional_number("denominator", denominator),
                   "seed": _check.integer("seed", seed, 0, 2**64 - 1)}
    plan = call.plan(
        _check.target(target), reduction=reduction, ignore_index=_check.ignore_index(ignore_index),
        label_smoothing=_check.number("label_smoothing", label_smoothing), z_loss=_check.number("z_loss", z_loss),
        logit_scale=_check.number("logit_scale", logit_scale), softcap=_check.softcap(softcap),
        filter=_check.filter_name(filter), tolerance=_check.optional_number("tolerance", tolerance),
        epsilon=_check.optional_number("epsilon", epsilon), compensated=_check.flag("compensated", compensated),
        mode=_check.mode(mode), budget=_check.budget(budget), threads=_check.threads(threads),
    )

    loss = np.empty(call.shape if reduction == "none" else (), np.float32)
    nll, lse = np.empty(call.shape, np.float32), np.empty(call.shape, np.float32)
    call.outputs |= {"loss": loss, "nll": nll, "lse": lse}
    metric_arrays = call.metric_arrays(wanted)
    report = None if filter is None else _core.FilterReport()
    valid_count = call.run(plan, report)
    gradients = (call.outputs.get(name) for name in ("d_e", "d_c", "d_bias"))
    return LossResult(loss if reduction == "none" else loss[()], nll, lse, *gradients, metric_arrays, valid_count, plan,
                      report)


def learn_vocab_order(
    e: Any,
    c: Any,
    labels: Any = None,
    *,
    bias: Any = None,
    ignore_index: int = -100,
    token_weights: Any = None,
    class_weights: Any = None,
    logit_scale: float = 1.0,
    shift: int = 0,
    soft_targets: tuple[Any, Any] | None = None,
    head_layout: str = "vd",
) -> np.ndarray:
    """The vocabulary by falling mean logit over the rows that count: int64 [V], for ``vocab_order``.

    The order changes slowly while a model trains: learn it once, use it for many calls. Arguments as in
    ``linear_cross_entropy``. Costs V * D.
    """
    call = Call(e, c, head_layout, labels, soft_targets)
    call.bias(bias)
    call.weights(token_weights, class_weights)
    call.shift(_check.integer("shift", shift, -(2**63)))
    plan = call.plan(None, ignore_index=_check.ignore_index(ignore_index),
                     logit_scale=_check.number("logit_scale", logit_scale))
    return call.learn_vocab_order(plan)
