"""dx, dw and dbias from a known softmax: per vocabulary tile over all token tiles, whose logits are formed again or were
kept."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from . import _objective
from ._head import Head, Tokens, at, at_label, finite, product
from ._manual import vary_like
from ._options import Wants
from ._stream import kept_tile

_F32 = jnp.float32


class Softmax(NamedTuple):
    """A token's softmax and the coefficients of its gradient, f32."""

    peak: jax.Array
    log_mass: jax.Array
    coefficients: _objective.Coefficients
    best_id: jax.Array | None  # with filter_eps


def gradients(head: Head, wants: Wants, batch: Tokens, nll: jax.Array, peak: jax.Array, log_mass: jax.Array,
              best_id: jax.Array | None, logits: jax.Array | None = None, sums: Any = None) -> tuple[Any, ...]:
    """dx [tiles, T, D] f32, dw and dbias; None for what is not wanted.

    logits: those that `stream` kept. sums: dw and dbias of the chunks of tokens before, to which this one's are added.
    """
    # 1 - p_y, without the subtraction
    c = _objective.coefficients(head.options, batch.rows, -jnp.expm1(-nll), peak + log_mass, head.total, head.vocab)
    softmax = Softmax(peak, log_mass, c, best_id)
    scale = head.options.logit_scale
    kahan = len(batch.x) > MANY_TILES

    def logits_of(tokens: Tokens, i: jax.Array, first: Any, ids: jax.Array, tile: Any) -> Any:
        if logits is None:
            return head.logits(tokens.counted, tile, ids)
        z = kept_tile(logits, first // head.size, i, len(ids))
        return z, head.slope(z)

    def vocab_tile(first: Any, ids: jax.Array, tile: jax.Array | None, carry: Any) -> Any:
        def token_tile(i: jax.Array, carry: Any) -> Any:
            d_x, sums = carry
            tokens, known = at(i, (batch, softmax))

            def add(d_x: jax.Array | None, sums: Any) -> Any:
                dz = _logit_gradients(head, tokens, known, ids, *logits_of(tokens, i, first, ids, tile))
                if wants.d_x:
                    d_x = d_x + head.rows_of(dz, tile)
                parts = (_table_gradient(head, tokens, dz) if wants.d_w else None, dz.sum(0) if wants.d_bias else None)
                return d_x, tuple(s if s is None else _add(s, part) for s, part in zip(sums, parts))

            one, sums = lax.cond(jnp.any(tokens.valid), add, lambda *same: same, at(i, d_x), sums)
            return jax.tree.map(lambda a, one: a.at[i].set(one), d_x, one), sums

        def zeros(wanted: bool, shape: tuple[int, ...]) -> Any:
            zero = vary_like(jnp.zeros(shape, _F32), batch.x)
            return _Sum(zero, jnp.zeros_like(zero) if kahan else None) if wanted else None

        d_x, d_w, d_bias = carry
        sums = (zeros(wants.d_w, head.tile_shape(len(ids))), zeros(wants.d_bias, ids.shape))
        d_x, (tile_sum, bias_sum) = lax.fori_loop(0, len(batch.x), token_tile, (d_x, sums))
        if wants.d_w:
            d_w = _place_tile(head, d_w, tile_sum.value * scale, first, ids)
        if wants.d_bias:
            d_bias = _place_ids(head, d_bias, bias_sum.value, first, ids)
        return d_x, d_w, d_bias

    d_x = vary_like(jnp.zeros(batch.x.shape, _F32), head.w) if wants.d_x else None
    d_w, d_bias = _nothing(head, wants) if sums is None else sums
    d_x, d_w, d_bias = head.over_tiles(vocab_tile, (d_x, d_w, d_bias), read=wants.d_x or logits is None)
    if wants.d_x:  # a row of zeros times a table with a NaN is NaN
        d_x = jnp.where(batch.valid[..., None], head.place.over_vocab(d_x) * scale, 0)
    return (d_x, d_w, d_bias) if sums is not None else (d_x, d_w, _own_ids(head, d_bias))


def _nothing(head: Head, wants: Wants) -> tuple[jax.Array | None, jax.Array | None]:
    d_w = vary_like(jnp.zeros_like(head.w), head.w) if wants.d_w else None
    return d_w, vary_like(jnp.zeros((head.place.parts, head.rows), _F32), head.w) if wants.d_bias else None


def _own_ids(head: Head, d_bias: jax.Array | None) -> jax.Array | None:
    return None if d_bias is None else head.place.scatter_ids(d_bias).astype(head.extra.bias.dtype)


def sums_of_chunks(head: Head, wants: Wants, chunks: int) -> tuple[_Sum | None, _Sum | None]:
    """For dw and dbias of one chunk of tokens after the other, where each device has its own ids."""
    def zeros(wanted: bool, shape: tuple[int, ...]) -> _Sum | None:
        zero = vary_like(jnp.zeros(shape, _F32), head.w)
        return _Sum(zero, jnp.zeros_like(zero) if chunks > MANY_TILES else None) if wanted else None

    return zeros(wants.d_w, head.w.shape), zeros(wants.d_bias, (1, head.rows))


def of_sums(head: Head, d_w: _Sum | None, d_bias: _Sum | None) -> tuple[jax.Array | None, jax.Array | None]:
    return d_w and d_w.value.astype(head.w.dtype), d_bias and _own_ids(head, d_bias.value)


# A plain f32 sum over more tiles of tokens may lose MANY_TILES * 2**-24, 4e-6, of the terms' magnitude.
MANY_TILES = 64


@jax.tree_util.register_pytree_node_class
class _Sum:
    """A sum with, where `lost` is there, what rounding took from it (Kahan)."""

    def __init__(self, value: jax.Array, lost: jax.Array | None):
        self.value, self.lost = value, lost

    def tree_flatten(self) -> tuple[Any, None]:
        return (self.value, self.lost), None

    @classmethod
    def tree_unflatten(cls, _: None, parts: Any) -> _Sum:
        return cls(*parts)


def _add(total: _Sum, part: jax.Array) -> _Sum:
    if total.lost is None:
        return _Sum(total.value + part, None)
    part = part - total.lost
    value = total.value + part
    return _Sum(value, (value - total.value) - part)


def _place_tile(head: Head, whole: Any, part: jax.Array, first: Any, ids: jax.Array) -> Any:
    """part: f32, of this device's tokens."""
    def cut(a: jax.Array) -> jax.Array:
        if head.extra.vocab_order is None:
            return lax.dynamic_slice_in_dim(a, first, len(ids), head.id_axis)
        return jnp.take(a, ids, axis=head.id_axis)

    def put(whole: jax.Array, tile: jax.Array) -> jax.Array:
        if head.extra.vocab_order is None:
            return lax.dynamic_update_slice_in_dim(whole, tile, first, head.id_axis)
        return whole.at[ids].set(tile) if head.id_axis == 0 else whole.at[:, ids].set(tile)

    if isinstance(whole, _Sum):
        return jax.tree.map(put, whole, _add(jax.tree.map(cut, whole), part))
    return put(whole, head.place.scatter(part, head.id_axis).astype(whole.dtype))


def _place_ids(head: Head, whole: Any, part: jax.Array, first: Any, ids: jax.Array) -> Any:
    """whole: [parts, rows], so that devices exchange sums once and not for every tile."""
    def cut(a: jax.Array) -> jax.Array:
        if head.extra.vocab_order is None:
            return lax.dynamic_slice_in_dim(a, first, len(ids), 1)
        return a[:, ids]

    def put(whole: jax.Array, sums: jax.Array) -> jax.Array:
        if head.extra.vocab_order is None:
            return lax.dynamic_update_slice_in_dim(whole, sums.reshape(len(whole), -1), first, 1)
        return whole.at[0, ids].set(sums.reshape(-1))

    if isinstance(whole, _Sum):
        return jax.tree.map(put, whole, _add(jax.tree.map(cut, whole), part[None]))
    return put(whole, part)


def _logit_gradients(head: Head, tokens: Tokens, known: Softmax, ids: jax.Array, z: jax.Array,
                     slope: jax.Array | None) -> jax.Array:
    """By the tile's raw logits, [T, ids]. slope: of z by them, None for 1."""
    rows, options, c = tokens.rows, head.options, known.coefficients
    is_label = at_label(tokens.target, ids)
    p = jnp.exp((z - finite(known.peak)[:, None]) - known.log_mass[:, None])
    softmax, label = c.softmax[:, None] * p, c.label[:, None]
    if options.filter_eps is not None:
        active = _active(head, known, ids, z)
        softmax = jnp.where(active, softmax, 0)
        label = jnp.where(active, label, -(rows.upstream * rows.weight)[:, None])
    dz = jnp.where(is_label, label, softmax)
    if c.smooth is not None:
        dz -= c.smooth[:, None] * head.class_weights(ids)
    if rows.soft_ids is not None:
        weights = jnp.where(known.peak == -jnp.inf, 0, rows.upstream)[:, None] * rows.soft_weight

        def one(k: jax.Array, dz: jax.Array) -> jax.Array:
            return dz - jnp.where(at_label(rows.soft_ids[:, k], ids), weights[:, k, None], 0)

        dz = lax.fori_loop(0, weights.shape[1], one, dz)
    dz = dz if slope is None else dz * slope
    return jnp.where(tokens.valid[:, None], dz, 0)


def _active(head: Head, known: Softmax, ids: jax.Array, z: jax.Array) -> jax.Array:
    """[T, ids]: whether the chunk that an id is in holds a logit no more than filter_eps below the row's largest. The
    chunk of that one is taken by its id: formed again, the logit may differ in its last bit."""
    chunk = min(head.options.chunk_size, z.shape[1])
    parts = -(-z.shape[1] // chunk)

    def chunks(a: jax.Array, fill: Any) -> jax.Array:
        return jnp.pad(a, ((0, 0), (0, parts * chunk - a.shape[1])), constant_values=fill).reshape(len(a), parts, chunk)

    near = ~(chunks(z, -jnp.inf).max(2) < known.peak[:, None] - head.options.filter_eps)  # NaN is no reason to drop one
    holds = chunks(at_label(known.best_id, ids), False).any(2) & (head.options.filter_eps >= 0)
    return jnp.repeat(near | holds, chunk, axis=1)[:, : z.shape[1]]


def _table_gradient(head: Head, tokens: Tokens, dz: jax.Array) -> jax.Array:
    x = tokens.counted
    return product(dz, x, 0, 0) if head.id_axis == 0 else product(x, dz, 0, 0)
