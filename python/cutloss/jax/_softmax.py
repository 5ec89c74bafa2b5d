"""A token's softmax from tiles of logits: what is carried from tile to tile, and what becomes of it at the end."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from . import _metrics, _objective
from ._head import Head, Tokens, at_label, finite
from ._manual import vary_like
from ._place import Place

_F32 = jnp.float32


class State(NamedTuple):
    """The softmax of tokens over the ids seen so far, and the label's logit apart from it."""

    top: jax.Array  # f32, the largest logit that is not the label's
    total: jax.Array  # f32, sum of exp(z - top), without the label's
    label_logit: jax.Array  # f32, 0 until the label is seen
    weighted: jax.Array | None  # f32 [..., D], sum of exp(z - top) dz/dx, without the label's
    soft_logits: jax.Array | None  # f32 [..., K], 0 until seen
    smooth: jax.Array | None  # f32, sum of the logits by class weight
    smooth_rows: jax.Array | None  # f32 [..., D], sum of dz/dx by class weight
    metrics: dict[str, jax.Array]


class Found(NamedTuple):
    """What the first pass finds out about each token."""

    loss: jax.Array
    nll: jax.Array
    peak: jax.Array
    log_mass: jax.Array
    label_logit: jax.Array
    metrics: dict[str, jax.Array]
    d_x: jax.Array | None


def start(head: Head, want_d_x: bool, tokens: Tokens) -> State:
    zero = vary_like(jnp.zeros(tokens.target.shape, _F32), tokens.x)
    weighted = vary_like(jnp.zeros(tokens.x.shape, _F32), tokens.x) if want_d_x else None
    rows, options = tokens.rows, head.options
    soft = None if rows.soft_ids is None else vary_like(jnp.zeros(rows.soft_ids.shape, _F32), tokens.x)
    bent = bool(options.label_smoothing and options.softcap is not None and want_d_x)
    return State(zero - jnp.inf, zero, zero, weighted, soft, zero if options.label_smoothing else None,
                  jnp.zeros_like(weighted) if bent else None, _metrics.start(options, zero))


def absorb(head: Head, tokens: Tokens, ids: jax.Array, tile: jax.Array, state: State) -> State:
    """Takes the logits of one vocabulary tile into the softmax."""
    return absorb_logits(head, tokens, ids, tile, *head.logits(tokens.counted, tile, ids), state)


def absorb_logits(head: Head, tokens: Tokens, ids: jax.Array, tile: jax.Array, z: jax.Array, slope: jax.Array | None,
                  state: State) -> State:
    is_label = at_label(tokens.target, ids)
    others = jnp.where(is_label, -jnp.inf, z)
    top = jnp.maximum(state.top, others.max(axis=1))
    shift = finite(top)
    scale = jnp.exp(state.top - shift)
    p = jnp.exp(others - shift[:, None])
    weighted = state.weighted
    if weighted is not None:
        weighted = weighted * scale[:, None] + head.rows_of(p if slope is None else p * slope, tile)
    label_logit = state.label_logit + jnp.sum(jnp.where(is_label, z, 0), axis=1)
    soft_logits, smooth, smooth_rows = state.soft_logits, state.smooth, state.smooth_rows
    if soft_logits is not None:
        soft_logits = soft_logits + _each_target(tokens.rows.soft_ids, ids, z)
    if smooth is not None:
        weights = head.class_weights(ids)
        smooth = smooth + jnp.where(weights == 0, 0, weights * z).sum(axis=1)
        if smooth_rows is not None:
            smooth_rows = smooth_rows + head.rows_of(slope * weights, tile)
    metrics = _metrics.absorb(head.options, state.metrics, ids, z, p, shift, finite(state.top), scale, state.total)
    return State(top, state.total * scale + p.sum(axis=1), label_logit, weighted, soft_logits, smooth, smooth_rows,
                  metrics)


def _each_target(targets: jax.Array, ids: jax.Array, z: jax.Array) -> jax.Array:
    """The logits of targets [T, K], 0 for those outside the tile."""
    def one(k: jax.Array, found: jax.Array) -> jax.Array:
        return found.at[:, k].set(jnp.where(at_label(targets[:, k], ids), z, 0).sum(axis=1))

    return lax.fori_loop(0, targets.shape[1], one, jnp.zeros_like(targets, _F32) + 0 * z[:, :1])


def _combine(place: Place, state: State) -> State:
    """The softmax over all of the vocabulary's parts; `weighted` and `smooth_rows` stay parts of their sums."""
    if not place.vocab_axes:
        return state
    top = place.largest(state.top)
    scale = jnp.exp(state.top - finite(top))

    def sums(a: jax.Array | None) -> jax.Array | None:
        return None if a is None else place.over_vocab(a)

    return state._replace(
        top=top, total=place.over_vocab(state.total * scale), label_logit=place.over_vocab(state.label_logit),
        weighted=None if state.weighted is None else state.weighted * scale[:, None],
        soft_logits=sums(state.soft_logits), smooth=sums(state.smooth),
        metrics=_metrics.combine(place, state.metrics, finite(top), finite(state.top), scale, state.total))


def finish(head: Head, tokens: Tokens, state: State, label_rows: jax.Array | None, even: jax.Array | None) -> Found:
    """label_rows: [T, D], or None without dx. even: `constant`, where dx needs it.

    The label's entry was left out of sum and accumulator. With s the sum of exp(z - m) over the others, nll is
    log1p(s exp(m - z_y)) and p_y - 1 = -s / (s + exp(z_y - m)): both keep their digits when p_y is almost 1, where
    z_y - lse and p_y - 1 taken as differences have none left.
    """
    state = _combine(head.place, state)
    top, total, label_logit, options, rows = state.top, state.total, state.label_logit, head.options, tokens.rows
    label_logit = jnp.where(rows.target < 0, -jnp.inf, label_logit)  # the softmax is known all the same
    confident = label_logit >= top
    nll = jnp.where(confident, jnp.log1p(total * jnp.exp(top - label_logit)),
                    (top - label_logit) + jnp.log(total + jnp.exp(label_logit - top)))
    nll = jnp.where(label_logit == jnp.inf, jnp.nan, nll)  # an infinite logit must not look like certainty
    peak = jnp.maximum(top, label_logit)
    nll = jnp.where(peak == -jnp.inf, jnp.inf, nll)
    base = finite(peak)
    others = jnp.exp(top - base)
    mass = total * others + jnp.exp(label_logit - base)
    log_mass = jnp.where(peak == -jnp.inf, 0, jnp.log(mass))
    lse = peak + log_mass
    metrics = _metrics.finish(options, state.metrics, rows, top, label_logit, total, peak, log_mass)
    loss = _objective.losses(options, rows, nll, lse, state.soft_logits, state.smooth, head.total, head.vocab)
    nll = jnp.where(rows.target < 0, jnp.where(rows.bad, jnp.nan, 0), nll)
    out = (jnp.where(rows.valid, a, 0) for a in (nll, peak, log_mass, label_logit))
    if state.weighted is None:
        return Found(loss, *out, metrics, None)

    mass = jnp.where(mass == 0, 1, mass)
    c = _objective.coefficients(options, rows, total * others / mass, lse, head.total, head.vocab)
    # Coefficients outside the sum over the vocabulary's parts: each token's are the same on all of them.
    d_x = (c.softmax * (others / mass))[:, None] * state.weighted
    d_x += (c.label * _slope(head, state.label_logit))[:, None] * label_rows.astype(_F32)
    d_x = _other_targets(head, tokens, state, lse, d_x)
    if c.smooth is not None:
        d_x -= c.smooth[:, None] * (even if state.smooth_rows is None else state.smooth_rows)
    d_x = head.place.over_vocab(d_x) * options.logit_scale
    return Found(loss, *out, metrics, jnp.where(rows.valid[:, None], d_x, 0).astype(options.d_x_dtype(tokens.x)))


def _slope(head: Head, z: jax.Array) -> Any:
    slope = head.slope(z)
    return 1 if slope is None else slope


def _other_targets(head: Head, tokens: Tokens, state: State, lse: jax.Array, d_x: jax.Array) -> jax.Array:
    rows = tokens.rows
    if rows.soft_ids is None:
        return d_x
    upstream = jnp.where(lse == -jnp.inf, 0, rows.upstream)
    weights = upstream[:, None] * rows.soft_weight * _slope(head, state.soft_logits)

    def one(k: jax.Array, d_x: jax.Array) -> jax.Array:
        return d_x - weights[:, k, None] * head.label_rows(rows.soft_ids[:, k]).astype(_F32)

    return lax.fori_loop(0, weights.shape[1], one, d_x)


def constant(head: Head) -> jax.Array:
    """Sum of the table's rows by class weight, f32 [1, D]; of a vocabulary shard, of its own. Each device adds up what it
    holds, so that no table is gathered for it."""
    own = head.own

    def add(_: Any, ids: jax.Array, tile: jax.Array, even: jax.Array) -> jax.Array:
        return even + own.rows_of(own.class_weights(ids)[None], tile)

    return head.place.spread(own.over_tiles(add, vary_like(jnp.zeros((1, own.w.shape[own.hidden_axis]), _F32), own.w)))
