"""What becomes of each row: its target, its weights, its loss and the coefficients of its gradient.

With g the upstream gradient of a row's loss, h that of its lse, q the label's weight, Q the weight of all targets, s
smoothing, w class weights and W their sum (see cutloss.hpp), the gradient by a logit is

    dz_v = A p_v - g (s / V) w_v - g q [v is the label] - g q_k [v is another target k],   A = g (Q + 2 z_loss lse) + h

The label's entry is A p - g q = -A (1 - p) + (A - g q), with 1 - p and A - g q never formed by subtraction.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ._options import Extra, Options
from ._place import Place

_F32 = jnp.float32


class Rows(NamedTuple):
    """Token-wise arrays, [N] but for soft_*."""

    target: jax.Array  # the label (of soft targets the likeliest), or -1 where there is none: bad, all padding
    valid: jax.Array  # looked at: not ignored, and no weight makes it vanish
    bad: jax.Array  # valid, but no id of the vocabulary
    weight: jax.Array  # f32, q: (1 - s) w_y, or the target's probability
    scale: jax.Array  # f32, the token's weight
    upstream: jax.Array  # f32, g: 0 where not valid, NaN where bad
    lse_upstream: jax.Array | None  # f32, h
    soft_ids: jax.Array | None  # i32 [N, K], -1 for none
    soft_weight: jax.Array | None  # f32 [N, K], 0 for the one that is `target`


class Reduced(NamedTuple):
    denominator: jax.Array  # f32 []
    valid_count: jax.Array  # i32 []


def prepare(options: Options, labels: jax.Array | None, cotangent: jax.Array, extra: Extra, tokens: int, vocab: int,
            place: Place) -> tuple[Rows, Reduced]:
    soft_ids = soft_weight = None
    inside = _shifted_in(options, tokens)
    if extra.soft_ids is None:
        labels = _shift(options, labels)
        valid = inside & (labels != options.ignore_index)
        bad = valid & ((labels < 0) | (labels >= vocab))
        target = jnp.where(valid & ~bad, labels, -1).astype(jnp.int32)
        by_class = jnp.ones((tokens,), _F32)
        if extra.class_weights is not None:
            by_class = jnp.where(bad, 1, extra.class_weights[jnp.maximum(target, 0)])
        counted, weight = by_class, (1 - options.label_smoothing) * by_class
        vanishes = (by_class == 0) & (options.label_smoothing == 0)
    else:
        ids, probabilities = _shift(options, extra.soft_ids), _shift(options, extra.soft_probabilities)
        there = (ids != options.ignore_index) & inside[:, None]
        broken = there & ((ids < 0) | (ids >= vocab))
        valid, bad = inside, broken.any(1)
        soft_ids = jnp.where(there & ~broken, ids, -1).astype(jnp.int32)
        soft_weight = jnp.where(there & ~broken, probabilities, 0)
        best = jnp.argmax(jnp.where(there, probabilities, -jnp.inf), axis=1)[:, None]
        target = jnp.where(bad, -1, jnp.take_along_axis(soft_ids, best, 1)[:, 0])
        counted = jnp.where(there, probabilities, 0).sum(1)
        weight = jnp.take_along_axis(soft_weight, best, 1)[:, 0]
        soft_weight = jnp.where(lax.broadcasted_iota(jnp.int32, ids.shape, 1) == best, 0, soft_weight)
        vanishes = ~jnp.any(there & (probabilities != 0), axis=1) & ~bad
    needs_lse = options.z_loss != 0 or extra.lse_cotangent is not None
    scale = jnp.ones((tokens,), _F32) if extra.token_weights is None else extra.token_weights
    reduced = Reduced(_F32(1), place.over_tokens(jnp.sum(valid)))
    if options.reduction == "mean":
        weights = jnp.where(valid, jnp.where(scale == 0, 0, scale * counted), 0)
        plain = extra.token_weights is None and extra.class_weights is None and extra.soft_ids is None
        total = reduced.valid_count.astype(_F32) if plain else place.over_tokens(_sum(weights))
        given = extra.denominator
        if given is not None:
            taken = (given == 0) | ((given >= jnp.finfo(_F32).tiny) & jnp.isfinite(given))
            total = jnp.where(taken, given, jnp.nan)
        reduced = reduced._replace(denominator=total)
    looked_at = valid & (scale != 0) & (bad | ~vanishes | needs_lse)
    bad = bad & looked_at
    g = divide(cotangent, reduced.denominator) * scale
    upstream = jnp.where(looked_at, jnp.where(bad, jnp.nan, g), 0)
    h = extra.lse_cotangent
    h = None if h is None else jnp.where(looked_at, jnp.where(bad, jnp.nan, h), 0)
    return Rows(jnp.where(looked_at, target, -1), looked_at, bad, weight, scale, upstream, h, soft_ids,
                soft_weight), reduced


def divide(total: Any, denominator: jax.Array) -> jax.Array:
    """0 where the denominator is: no row, or no weight, is no loss."""
    return jnp.where(denominator == 0, 0, total / jnp.where(denominator == 0, 1, denominator))


def _sum(values: jax.Array) -> jax.Array:
    """By parts first: one f32 sum over 2**20 tokens would lose three digits."""
    extra = -len(values) % 1024
    return jnp.pad(values, (0, extra)).reshape(-1, 1024).sum(1).sum()


def _shifted_in(options: Options, tokens: int) -> jax.Array:
    position = lax.iota(jnp.int32, tokens) % max(options.sequence or tokens, 1)
    return position + options.shift < (options.sequence or tokens)


def _shift(options: Options, a: jax.Array) -> jax.Array:
    return jnp.roll(a, -options.shift, axis=0) if options.shift else a


def class_total(extra: Extra, vocab: int) -> Any:
    return float(vocab) if extra.class_weights is None else _sum(extra.class_weights)


class Coefficients(NamedTuple):
    """f32 [N]."""

    softmax: jax.Array  # A
    label: jax.Array  # of the label's entry, p included
    smooth: jax.Array | None  # g s / V


def coefficients(options: Options, rows: Rows, miss: jax.Array, lse: jax.Array, total: Any, vocab: int) -> Coefficients:
    """miss: 1 - p_label. total: sum of the class weights."""
    g, s = rows.upstream, options.label_smoothing
    rest: Any = 0
    if rows.soft_weight is not None:
        rest = rows.soft_weight.sum(-1)
    if s:
        rest = rest + s * total / vocab
    if options.z_loss:
        rest = rest + 2 * options.z_loss * lse
    # A row without any logit above -inf: no gradient, where -inf would make NaN. A bad label's is NaN all the same.
    dead = (lse == -jnp.inf) & ~rows.bad
    extra = g * rest
    if rows.lse_upstream is not None:
        extra = extra + rows.lse_upstream
    a = jnp.where(dead, 0, g * rows.weight + extra)
    label = jnp.where(dead, 0, jnp.where(dead, 0, extra) - a * miss)
    return Coefficients(a, label, jnp.where(dead, 0, g * (s / vocab)) if s else None)


def losses(options: Options, rows: Rows, nll: jax.Array, lse: jax.Array, soft_logits: jax.Array | None,
           smooth: jax.Array | None, total: Any, vocab: int) -> jax.Array:
    """The rows' losses, f32 [N]. soft_logits [N, K]; smooth: sum_v w_v z_v."""
    loss = jnp.where(rows.weight == 0, 0, rows.weight * nll)
    if soft_logits is not None:
        loss += jnp.where(rows.soft_weight == 0, 0, rows.soft_weight * (lse[:, None] - soft_logits)).sum(-1)
    if smooth is not None:
        loss += (options.label_smoothing / vocab) * (total * lse - smooth)
    if options.z_loss:
        loss += options.z_loss * lse * lse
    loss = jnp.where(lse == -jnp.inf, jnp.inf, loss) * rows.scale
    return jnp.where(rows.valid, jnp.where(rows.bad, jnp.nan, loss), 0)
