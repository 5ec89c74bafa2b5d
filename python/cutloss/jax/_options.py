"""What is fixed when a program is traced. Hashable: a static argument of jit and a nondiff argument of custom_vjp."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Options(NamedTuple):
    reduction: str = "mean"
    ignore_index: int = -100
    softcap: float | None = None
    head_layout: str = "vd"
    mode: str = "auto"
    budget: int | None = None
    threads: int = 0
    impl: str = "auto"  # "auto": C++ on CPU, XLA elsewhere; "cpu" or "xla": that one, whatever the platform (tests)
    layout: Any = None  # _mesh.Layout of arguments that are spread over a mesh
    logit_scale: float = 1.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    shift: int = 0
    sequence: int = 0  # rows of a sequence, for the shift; 0: all rows are one
    filter: str | None = None
    tolerance: float | None = None
    epsilon: float | None = None
    chunk_size: int = 4096
    filter_eps: float | None = None  # a gap in logits
    wide_d_x: bool = False  # the gradient of x in f32, whatever x is
    metrics: frozenset[str] = frozenset()  # "top_k" among them if top_k > 0
    top_k: int = 0
    tiles: tuple[int | None, int | None] = (None, None)  # of the XLA lowering: tokens, ids; None for its own size

    def d_x_dtype(self, x: jax.Array) -> Any:
        return jnp.float32 if self.wide_d_x else x.dtype


class Extra(NamedTuple):
    """The optional arrays of a call; None for one that is not there."""

    bias: jax.Array | None = None  # [V]
    token_weights: jax.Array | None = None  # f32 [N]
    class_weights: jax.Array | None = None  # f32 [V]
    soft_ids: jax.Array | None = None  # i32 or i64 [N, K]
    soft_probabilities: jax.Array | None = None  # f32 [N, K]
    vocab_order: jax.Array | None = None  # i32 [V]
    denominator: jax.Array | None = None  # f32 []
    seed: jax.Array | None = None  # u32 [2], the low word first
    lse_cotangent: jax.Array | None = None  # f32 [N]


# What a filter did, in the order of the kernels; cutloss.linear_cross_entropy says what each is.
FILTER_REPORT = ("rows", "rows_redone", "kept_entries", "epsilon", "dropped_mass_mean", "dropped_mass_max", "error_bound")


class Wants(NamedTuple):
    d_x: bool
    d_w: bool
    d_bias: bool = False

    @property
    def head(self) -> bool:
        return self.d_w or self.d_bias


class Values(NamedTuple):
    loss: jax.Array  # f32: a scalar, or [N] for reduction "none"
    nll: jax.Array  # f32 [N]
    peak: jax.Array  # f32 [N], the largest logit or, from the kernels, the lse
    log_mass: jax.Array  # f32 [N], lse - peak: kept apart, since lse rounded to f32 loses lse * 2^-24 of every softmax
    d_x: jax.Array | None  # [N, D], x's dtype
    d_w: jax.Array | None  # like w
    d_bias: jax.Array | None = None  # like the bias
    metrics: dict[str, jax.Array] = {}  # by the names of cutloss.linear_cross_entropy
