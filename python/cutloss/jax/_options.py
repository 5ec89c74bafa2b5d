"""What is fixed when a program is traced. Hashable: a static argument of jit and a nondiff argument of custom_vjp."""

from __future__ import annotations

from typing import NamedTuple

import jax


class Options(NamedTuple):
    reduction: str
    ignore_index: int
    softcap: float | None
    head_layout: str
    mode: str
    budget: int | None
    threads: int
    impl: str  # "auto": C++ on CPU, XLA elsewhere; "cpu" or "xla": that one, whatever the platform (tests)
    tiles: tuple[int | None, int | None] = (None, None)  # of the XLA lowering: tokens, ids; None for its own size


class Wants(NamedTuple):
    d_x: bool
    d_w: bool


class Values(NamedTuple):
    loss: jax.Array  # f32: a scalar, or [N] for reduction "none"
    peak: jax.Array  # f32 [N], the largest logit or, from the kernels, the lse
    log_mass: jax.Array  # f32 [N], lse - peak: kept apart, since lse rounded to f32 loses lse * 2^-24 of every softmax
    d_x: jax.Array | None  # [N, D], x's dtype
    d_w: jax.Array | None  # like w
