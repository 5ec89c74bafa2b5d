"""The C++ kernels as an operation of an XLA program on CPU."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _check, _core
from ._manual import vary_like
from ._options import Options, Wants

_TARGET = "cutloss_linear_cross_entropy"


@functools.cache
def available() -> bool:
    """Registers the handler at the first use; False for a build made without XLA's headers."""
    handler = _core.xla_handler()
    if handler is None:
        return False
    jax.ffi.register_ffi_target(_TARGET, handler, platform="cpu")
    return True


def make_plan(options: Options, wants: Wants, x: Any, w: Any, labels: Any) -> tuple[_core.Plan, _core.Machine]:
    """The plan for arrays of these shapes and dtypes; every rule on the problem is checked in here, in C++."""
    machine = _core.detect_machine()
    vocab = w.shape[0 if options.head_layout == "vd" else 1]
    plan = _core.make_plan(
        machine,
        tokens=x.shape[0], hidden=x.shape[1], vocab=vocab,
        e_dtype=_check.dtype_name("x", x.dtype), c_dtype=_check.dtype_name("w", w.dtype),
        label_dtype="i32" if labels.dtype == np.int32 else "i64", head_layout=options.head_layout,
        reduction=options.reduction, ignore_index=options.ignore_index, softcap=options.softcap,
        nan_for_bad_labels=True, want_d_e=wants.d_x, want_d_c=wants.d_w,
        mode=_mode(options, wants), budget=options.budget, threads=options.threads,
    )
    return plan, machine


def _mode(options: Options, wants: Wants) -> str:
    # A mode names a way to get gradients; evaluating the loss alone (say, between training steps) needs none.
    return options.mode if any(wants) else "auto"


def evaluate(options: Options, wants: Wants, x: jax.Array, w: jax.Array, labels: jax.Array,
             cotangent: jax.Array) -> tuple[jax.Array, ...]:
    """(loss [1] or [N], lse [N], dx or [0], dw or [0]). cotangent: f32, [1], or [N] for reduction "none"."""
    plan, machine = make_plan(options, wants, x, w, labels)
    tokens = x.shape[0]
    none = options.reduction == "none"
    results = (
        jax.ShapeDtypeStruct((tokens if none else 1,), jnp.float32),
        jax.ShapeDtypeStruct((tokens,), jnp.float32),
        jax.ShapeDtypeStruct(x.shape if wants.d_x else (0,), x.dtype),
        jax.ShapeDtypeStruct(w.shape if wants.d_w else (0,), w.dtype),
        # A result, not a malloc in the handler: XLA places it, reuses it and reports it.
        jax.ShapeDtypeStruct((plan.workspace_bytes,), jnp.uint8),
    )
    call = jax.ffi.ffi_call(_TARGET, results, vmap_method="sequential")
    *values, _ = call(
        x, w, labels, cotangent,
        head_layout=options.head_layout, reduction=options.reduction,
        ignore_index=np.int64(options.ignore_index), softcap=np.float32(options.softcap or 0),
        want_d_e=wants.d_x, want_d_c=wants.d_w,
        mode=_mode(options, wants), threads=np.int64(options.threads),
        budget=np.int64(-1 if options.budget is None else options.budget),
        target=machine.target, machine_threads=np.int64(machine.threads), l1_bytes=np.int64(machine.l1_bytes),
        l2_bytes=np.int64(machine.l2_bytes), l3_bytes=np.int64(machine.l3_bytes),
    )
    return tuple(vary_like(value, x) for value in values)
