"""The C++ kernels as an operation of an XLA program on CPU."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _check, _core
from ._manual import vary_like
from ._options import FILTER_REPORT, Extra, Options, Values, Wants

_TARGET = "cutloss_linear_cross_entropy"


@functools.cache
def available() -> bool:
    """Registers the handler at the first use; False for a build made without XLA's headers."""
    handler = _core.xla_handler()
    if handler is None:
        return False
    jax.ffi.register_ffi_target(_TARGET, handler, platform="cpu")
    return True


def _fields(options: Options, wants: Wants, x: Any, w: Any, labels: Any, extra: Extra) -> dict[str, Any]:
    """The Problem and the Limits, by the names of their fields."""
    targets = labels if extra.soft_ids is None else extra.soft_ids
    fields = {
        "tokens": x.shape[0], "hidden": x.shape[1], "vocab": w.shape[0 if options.head_layout == "vd" else 1],
        "e_dtype": _check.dtype_name("x", x.dtype), "c_dtype": _check.dtype_name("w", w.dtype),
        "label_dtype": "i32" if targets.dtype == np.int32 else "i64",
        "head_layout": options.head_layout, "reduction": options.reduction, "ignore_index": options.ignore_index,
        "softcap": options.softcap, "logit_scale": options.logit_scale, "label_smoothing": options.label_smoothing,
        "z_loss": options.z_loss, "shift": options.shift, "sequence": options.sequence,
        "token_weights": extra.token_weights is not None, "class_weights": extra.class_weights is not None,
        "soft_targets": 0 if extra.soft_ids is None else extra.soft_ids.shape[-1],
        "lse_cotangent": extra.lse_cotangent is not None,
        "entropy": "entropy" in options.metrics, "argmax": bool({"argmax", "correct"} & options.metrics),
        "rank": "rank" in options.metrics, "top_k": options.top_k, "mean_logits": "mean_logits" in options.metrics,
        "want_d_e": wants.d_x, "want_d_c": wants.d_w, "want_d_bias": wants.d_bias,
        # A mode names a way to get gradients; evaluating the loss alone (say, between training steps) needs none.
        "mode": options.mode if any(wants) else "auto", "budget": options.budget, "threads": options.threads,
    }
    if extra.bias is not None:
        fields["bias_dtype"] = _check.dtype_name("bias", extra.bias.dtype)
    if options.filter is not None and any(wants):
        fields |= {"filter": options.filter, "tolerance": options.tolerance, "epsilon": options.epsilon,
                   "vocab_order": extra.vocab_order is not None}
    return fields


def validate(options: Options, size: _check.Sizes, bias: bool, class_weights: bool, soft_targets: bool) -> None:
    """Every rule on the options, which may hold for gradients alone and would else be looked at where those are formed."""
    _core.validate(
        tokens=size.tokens, hidden=size.hidden, vocab=size.vocab, softcap=options.softcap,
        logit_scale=options.logit_scale, label_smoothing=options.label_smoothing, z_loss=options.z_loss,
        shift=options.shift, sequence=options.sequence, top_k=options.top_k, class_weights=class_weights,
        soft_targets=int(soft_targets), bias_dtype="f32" if bias else None, filter=options.filter,
        tolerance=options.tolerance, epsilon=options.epsilon)


def make_plan(options: Options, wants: Wants, x: Any, w: Any, labels: Any,
              extra: Extra = Extra()) -> tuple[_core.Plan, _core.Machine]:
    """The plan for arrays of these shapes and dtypes; every rule on the problem is checked in here, in C++."""
    machine = _core.detect_machine()
    return _core.make_plan(machine, nan_for_bad_labels=True,
                           **_fields(options, wants, x, w, labels, extra)), machine


def evaluate(options: Options, wants: Wants, x: jax.Array, w: jax.Array, labels: jax.Array | None,
             cotangent: jax.Array, extra: Extra = Extra()) -> Values:
    """cotangent: f32, [1], or [N] for reduction "none"."""
    x = x.astype(options.d_x_dtype(x)) if wants.d_x else x  # the kernels write a gradient in the dtype of its input
    plan, machine = make_plan(options, wants, x, w, labels, extra)
    fields = _fields(options, wants, x, w, labels, extra)
    tokens, vocab = fields["tokens"], fields["vocab"]
    filtered = "filter" in fields
    nothing = jnp.zeros((0,), jnp.float32)
    order = _words(extra.vocab_order) if filtered and extra.vocab_order is not None else nothing

    def given(array: jax.Array | None) -> jax.Array:
        return nothing if array is None else array

    def result(there: bool, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape if there else (0,), dtype)

    results = (
        result(True, (tokens if options.reduction == "none" else 1,), jnp.float32),
        result(True, (tokens,), jnp.float32),
        result(True, (tokens,), jnp.float32),
        result(wants.d_x, x.shape, x.dtype),
        result(wants.d_w, w.shape, w.dtype),
        result(wants.d_bias, (vocab,), jnp.float32 if extra.bias is None else extra.bias.dtype),
        result(fields["entropy"], (tokens,), jnp.float32),
        result(fields["argmax"], (tokens, 2), jnp.int32),  # ids of 64 bits, by words
        result(fields["argmax"], (tokens,), jnp.uint8),
        result(fields["rank"], (tokens, 2), jnp.int32),
        result(options.top_k > 0, (tokens, options.top_k, 2), jnp.int32),
        result(options.top_k > 0, (tokens, options.top_k), jnp.float32),
        result(fields["mean_logits"], (vocab,), jnp.float32),
        result("filter_report" in options.metrics, (len(FILTER_REPORT),), jnp.float32),
        # A result, not a malloc in the handler: XLA places it, reuses it and reports it.
        jax.ShapeDtypeStruct((plan.workspace_bytes,), jnp.uint8),
    )
    call = jax.ffi.ffi_call(_TARGET, results, vmap_method="sequential")
    attributes = {key: _attribute(value) for key, value in fields.items()
                  if value is not None and not key.endswith("dtype") and key not in ("tokens", "hidden", "vocab")}
    loss, nll, lse, d_x, d_w, d_bias, entropy, argmax, correct, rank, top_ids, top_logprobs, mean_logits, report, _ = (
        vary_like(value, x) for value in call(
            x, w, given(labels), cotangent, given(extra.bias), given(extra.token_weights), given(extra.class_weights),
            given(extra.lse_cotangent), given(extra.soft_ids), given(extra.soft_probabilities),
            order, given(extra.denominator).reshape(-1), given(extra.seed),
            **attributes, has_bias=extra.bias is not None, has_labels=labels is not None,
            target=machine.target, machine_threads=np.int64(machine.threads), l1_bytes=np.int64(machine.l1_bytes),
            l2_bytes=np.int64(machine.l2_bytes), l3_bytes=np.int64(machine.l3_bytes),
            spare_bytes=np.int64(machine.spare_bytes), tuning=machine.tuning))
    metrics = {"entropy": entropy, "argmax": argmax, "correct": correct != 0, "rank": rank, "mean_logits": mean_logits,
               "filter_report": report}
    metrics = {name: value for name, value in metrics.items() if name in options.metrics}
    if options.top_k:
        metrics |= {"top_k_ids": top_ids, "top_k_logprobs": top_logprobs}
    for name in metrics.keys() & {"argmax", "rank", "top_k_ids"}:
        metrics[name] = metrics[name][..., 0]
    return Values(loss if options.reduction == "none" else loss.reshape(()), nll, lse, jnp.zeros_like(lse),
                  d_x if wants.d_x else None, d_w if wants.d_w else None, d_bias if wants.d_bias else None, metrics)


def _words(ids: jax.Array) -> jax.Array:
    """int32 -> [..., 2], the low and the high word of 64 bits (all platforms of the kernels are little-endian)."""
    return jnp.stack([ids, ids >> 31], axis=-1)


def _attribute(value: Any) -> Any:
    if isinstance(value, float):
        return np.float32(value)
    return np.int64(value) if type(value) is int else value
