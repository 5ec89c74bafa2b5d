"""The loss and its gradients in plain XLA, for platforms that the C++ kernels do not run on.

Two loops over tiles of TOKEN_TILE tokens x VOCAB_TILE ids, whose logits are the only ones that exist at a time:

  stream    loss, lse and dx: per token tile a running maximum, sum and accumulator over the vocabulary; 1u, 2u with dx
  gradients dw and dx from a known softmax: per vocabulary tile over all token tiles; 3u, or 2u without dx

The last, smaller vocabulary tile is a slice of its own static size: neither padding, which would copy the table, nor a
dynamic slice, whose start XLA moves back when it runs over the end. Token tiles are padded and masked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ._manual import vary_like
from ._options import Options, Values, Wants

# 512 x 8192 f32 logits are 16 MiB: they stay in a TPU's on-chip memory, and 512 tokens a tile read the table at
# 512 flops a byte of bf16 and product, twice what a v5e needs to be busy.
TOKEN_TILE = 512
VOCAB_TILE = 8192

_F32 = jnp.float32


class _Tokens(NamedTuple):
    """Token-wise arrays, [tiles, T, ...]."""

    x: jax.Array
    target: jax.Array  # the label, or -1 where there is none to find
    valid: jax.Array  # not ignored
    bad: jax.Array  # valid, but no id of the vocabulary
    upstream: jax.Array  # f32, gradient of the summed loss by this token's nll; 0 where ignored, NaN where bad


def evaluate(options: Options, wants: Wants, x: jax.Array, w: jax.Array, labels: jax.Array, cotangent: jax.Array,
             saved: tuple[jax.Array, jax.Array, jax.Array] | None = None) -> Values:
    """cotangent: f32, [1], or [N] for reduction "none". saved: (nll, peak, log_mass) of an earlier call, when known."""
    tokens, hidden = x.shape
    vocab = w.shape[0 if options.head_layout == "vd" else 1]
    valid = labels != options.ignore_index
    bad = valid & ((labels < 0) | (labels >= vocab))
    count = jnp.maximum(jnp.sum(valid), 1).astype(_F32) if options.reduction == "mean" else _F32(1)
    upstream = jnp.where(valid, jnp.where(bad, jnp.nan, cotangent / count), 0)
    target = jnp.where(valid & ~bad, labels, -1).astype(jnp.int32)

    tiles = -(-tokens // (options.tiles[0] or TOKEN_TILE))
    if tiles == 0:
        empty = jnp.zeros((0,), _F32)
        return Values(empty if options.reduction == "none" else _F32(0), empty, empty,
                      jnp.zeros_like(x) if wants.d_x else None, jnp.zeros_like(w) if wants.d_w else None)
    rows = -(-tokens // (8 * tiles)) * 8  # tiles of one size, a multiple of 8 lanes, as near to equal as that allows
    batch = _Tokens(*(_tile(a, tiles, rows, fill) for a, fill in
                      ((x, 0), (target, -1), (valid, False), (bad, False), (upstream, 0))))

    stream_d_x = wants.d_x and not wants.d_w
    if saved is None or stream_d_x:
        nll, peak, log_mass, d_x = lax.map(lambda t: _stream(options, stream_d_x, t, w), batch)
    else:
        nll, peak, log_mass = (_tile(a, tiles, rows, 0) for a in saved)
        d_x = None
    d_w = None
    if wants.d_w:
        d_x, d_w = _gradients(options, wants, batch, w, nll, peak, log_mass)

    def flat(a: jax.Array) -> jax.Array:
        return a.reshape(tiles * rows, *a.shape[2:])[:tokens]

    # Tile sums first: one f32 sum over 2**20 tokens would lose three digits.
    loss = flat(nll) if options.reduction == "none" else nll.sum(1).sum(0) / count
    return Values(loss, flat(peak), flat(log_mass), flat(d_x).astype(x.dtype) if wants.d_x else None, d_w)


def _tile(a: jax.Array, tiles: int, rows: int, fill: Any) -> jax.Array:
    extra = tiles * rows - a.shape[0]
    if extra:
        a = jnp.concatenate([a, jnp.full((extra, *a.shape[1:]), fill, a.dtype)])
    return a.reshape(tiles, rows, *a.shape[1:])


# ------------------------------------------------------------------------------------------------- one tile's products


def _product(a: jax.Array, b: jax.Array, a_axis: int, b_axis: int) -> jax.Array:
    return lax.dot_general(a, b, (((a_axis,), (b_axis,)), ((), ())), preferred_element_type=_F32)


class _Head(NamedTuple):
    """The table in either layout."""

    options: Options
    w: jax.Array

    @property
    def vocab_axis(self) -> int:
        return 0 if self.options.head_layout == "vd" else 1

    @property
    def vocab(self) -> int:
        return self.w.shape[self.vocab_axis]

    def logits(self, x: jax.Array, tile: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """z [T, ids] and dz/d(x w), None for 1."""
        raw = _product(x, tile, 1, 1 - self.vocab_axis)
        cap = self.options.softcap
        if cap is None:
            return raw, None
        bent = jnp.tanh(raw / cap)
        return cap * bent, 1 - bent * bent

    def rows_of(self, weights: jax.Array, tile: jax.Array) -> jax.Array:
        """weights [T, ids] @ table -> [T, D]"""
        return _product(weights, tile, 1, self.vocab_axis)

    def label_rows(self, target: jax.Array) -> jax.Array:
        rows = jnp.take(self.w, jnp.maximum(target, 0), axis=self.vocab_axis).astype(_F32)
        return rows if self.vocab_axis == 0 else rows.T

    def over_tiles(self, body: Callable[[Any, jax.Array, Any], Any], carry: Any) -> Any:
        """carry = body(first id, tile, carry) over the vocabulary's tiles in order."""
        size = min(self.options.tiles[1] or VOCAB_TILE, self.vocab)
        whole = self.vocab // size

        def step(k: jax.Array, carry: Any) -> Any:
            first = k * size
            return body(first, lax.dynamic_slice_in_dim(self.w, first, size, self.vocab_axis), carry)

        carry = lax.fori_loop(0, whole, step, carry)
        if whole * size < self.vocab:
            carry = body(whole * size, lax.slice_in_dim(self.w, whole * size, self.vocab, axis=self.vocab_axis), carry)
        return carry


def _is_label(target: jax.Array, first: Any, logits: jax.Array) -> jax.Array:
    return (target - first)[:, None] == lax.broadcasted_iota(jnp.int32, logits.shape, 1)


# ---------------------------------------------------------------------------------------------------------- the loops


def _stream(options: Options, want_d_x: bool, tokens: _Tokens, w: jax.Array) -> tuple[jax.Array, ...]:
    """nll, peak, log_mass [T] and dx [T, D] f32 (or None) of one token tile.

    The label's entry stays out of sum and accumulator. With s the sum of exp(z - m) over the others, nll is
    log1p(s exp(m - z_y)) and p_y - 1 = -s / (s + exp(z_y - m)): both keep their digits when p_y is almost 1, where
    z_y - lse and p_y - 1 taken as differences have none left.
    """
    head = _Head(options, w)
    x = jnp.where(tokens.valid[:, None], tokens.x, 0)  # whatever is in an ignored row stays there
    rows, hidden = x.shape

    def body(first: Any, tile: jax.Array, carry: Any) -> Any:
        top, total, label_logit, weighted = carry
        z, slope = head.logits(x, tile)
        is_label = _is_label(tokens.target, first, z)
        label_logit += jnp.sum(jnp.where(is_label, z, 0), axis=1)
        others = jnp.where(is_label, -jnp.inf, z)
        new_top = jnp.maximum(top, others.max(axis=1))
        shift = jnp.where(new_top == -jnp.inf, 0, new_top)  # nothing but the label so far (V = 1)
        scale = jnp.exp(top - shift)
        p = jnp.exp(others - shift[:, None])
        total = total * scale + p.sum(axis=1)
        if want_d_x:
            weighted = weighted * scale[:, None] + head.rows_of(p if slope is None else p * slope, tile)
        return new_top, total, label_logit, weighted

    zero = vary_like(jnp.zeros((rows,), _F32), x)
    weighted = vary_like(jnp.zeros((rows, hidden), _F32), x) if want_d_x else None
    top, total, label_logit, weighted = head.over_tiles(body, (zero - jnp.inf, zero, zero, weighted))

    confident = label_logit >= top
    nll = jnp.where(confident, jnp.log1p(total * jnp.exp(top - label_logit)),
                    (top - label_logit) + jnp.log(total + jnp.exp(label_logit - top)))
    nll = jnp.where(label_logit == jnp.inf, jnp.nan, nll)  # an infinite logit must not look like certainty
    peak = jnp.maximum(top, label_logit)
    others = jnp.exp(top - peak)
    mass = total * others + jnp.exp(label_logit - peak)
    nll, peak, log_mass = (jnp.where(tokens.valid, jnp.where(tokens.bad, jnp.nan, a), 0)
                           for a in (nll, peak, jnp.log(mass)))
    if not want_d_x:
        return nll, peak, log_mass, None

    label_slope = 1 if options.softcap is None else 1 - (label_logit / options.softcap) ** 2
    label_weight = -(total * others / mass) * label_slope
    d_x = weighted * (others / mass)[:, None] + label_weight[:, None] * head.label_rows(tokens.target)
    return nll, peak, log_mass, jnp.where(tokens.valid[:, None], tokens.upstream[:, None] * d_x, 0).astype(tokens.x.dtype)


def _gradients(options: Options, wants: Wants, batch: _Tokens, w: jax.Array, nll: jax.Array,
               peak: jax.Array, log_mass: jax.Array) -> tuple[jax.Array | None, jax.Array]:
    """dx [tiles, T, D] f32 (or None) and dw."""
    head = _Head(options, w)
    tiles, rows, hidden = batch.x.shape
    label_weight = jnp.expm1(-nll)  # p_y - 1, without the subtraction

    def vocab_tile(first: Any, tile: jax.Array, carry: Any) -> Any:
        d_x, d_w = carry

        def token_tile(i: jax.Array, carry: Any) -> Any:
            d_x, d_tile = carry
            tokens = jax.tree.map(lambda a: a[i], batch)
            x = jnp.where(tokens.valid[:, None], tokens.x, 0)
            z, slope = head.logits(x, tile)
            p = jnp.exp((z - peak[i][:, None]) - log_mass[i][:, None])
            dz = jnp.where(_is_label(tokens.target, first, z), label_weight[i][:, None], p)
            dz = dz * tokens.upstream[:, None] * (1 if slope is None else slope)
            d_tile += _product(dz, x, 0, 0) if head.vocab_axis == 0 else _product(x, dz, 0, 0)
            return (d_x.at[i].add(head.rows_of(dz, tile)) if wants.d_x else None), d_tile

        d_x, d_tile = lax.fori_loop(0, tiles, token_tile, (d_x, vary_like(jnp.zeros(tile.shape, _F32), tile)))
        d_w = lax.dynamic_update_slice_in_dim(d_w, d_tile.astype(d_w.dtype), first, head.vocab_axis)
        return d_x, d_w

    d_x = vary_like(jnp.zeros((tiles, rows, hidden), _F32), w) if wants.d_x else None
    return head.over_tiles(vocab_tile, (d_x, vary_like(jnp.zeros_like(w), w)))
