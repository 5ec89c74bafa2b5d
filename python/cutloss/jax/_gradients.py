"""dx, dw and dbias from a known softmax: per vocabulary tile over all token tiles."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from . import _objective
from ._head import Head, Tokens, at, at_label, finite, product
from ._manual import vary_like
from ._options import Wants

_F32 = jnp.float32


class Softmax(NamedTuple):
    """A token's softmax and the coefficients of its gradient, f32."""

    peak: jax.Array
    log_mass: jax.Array
    coefficients: _objective.Coefficients
    best_id: jax.Array | None  # with filter_eps


def gradients(head: Head, wants: Wants, batch: Tokens, nll: jax.Array, peak: jax.Array, log_mass: jax.Array,
               best_id: jax.Array | None) -> tuple[jax.Array | None, ...]:
    """dx [tiles, T, D] f32, dw and dbias; None for what is not wanted."""
    # 1 - p_y, without the subtraction
    c = _objective.coefficients(head.options, batch.rows, -jnp.expm1(-nll), peak + log_mass, head.total, head.vocab)
    softmax = Softmax(peak, log_mass, c, best_id)
    scale = head.options.logit_scale
    kahan = len(batch.x) > MANY_TILES

    def vocab_tile(first: Any, ids: jax.Array, tile: jax.Array, carry: Any) -> Any:
        def token_tile(i: jax.Array, carry: Any) -> Any:
            d_x, sums = carry
            tokens, known = at(i, (batch, softmax))

            def add(d_x: jax.Array | None, sums: Any) -> Any:
                dz = _logit_gradients(head, tokens, known, ids, tile)
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
        sums = (zeros(wants.d_w, tile.shape), zeros(wants.d_bias, ids.shape))
        d_x, (tile_sum, bias_sum) = lax.fori_loop(0, len(batch.x), token_tile, (d_x, sums))
        if wants.d_w:
            d_tile = head.place.scatter(tile_sum.value * scale, head.id_axis).astype(d_w.dtype)
            d_w = _place_tile(head, d_w, d_tile, first, ids)
        if wants.d_bias:
            d_bias = _place_ids(head, d_bias, bias_sum.value, first, ids)
        return d_x, d_w, d_bias

    d_x = vary_like(jnp.zeros(batch.x.shape, _F32), head.w) if wants.d_x else None
    d_w = vary_like(jnp.zeros_like(head.w), head.w) if wants.d_w else None
    d_bias = vary_like(jnp.zeros((head.place.parts, head.rows), _F32), head.w) if wants.d_bias else None
    d_x, d_w, d_bias = head.over_tiles(vocab_tile, (d_x, d_w, d_bias))
    d_bias = head.place.scatter_ids(d_bias).astype(head.extra.bias.dtype) if wants.d_bias else None
    return (head.place.over_vocab(d_x) * scale if wants.d_x else None), d_w, d_bias


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


def _place_tile(head: Head, whole: jax.Array, tile: jax.Array, first: Any, ids: jax.Array) -> jax.Array:
    if head.extra.vocab_order is None:
        return lax.dynamic_update_slice_in_dim(whole, tile, first, head.id_axis)
    return whole.at[ids].set(tile) if head.id_axis == 0 else whole.at[:, ids].set(tile)


def _place_ids(head: Head, whole: jax.Array, sums: jax.Array, first: Any, ids: jax.Array) -> jax.Array:
    """whole: [parts, rows], so that devices exchange sums once and not for every tile."""
    if head.extra.vocab_order is None:
        return lax.dynamic_update_slice_in_dim(whole, sums.reshape(len(whole), -1), first, 1)
    return whole.at[0, ids].set(sums)


def _logit_gradients(head: Head, tokens: Tokens, known: Softmax, ids: jax.Array, tile: jax.Array) -> jax.Array:
    """By the tile's raw logits, [T, ids]."""
    rows, options, c = tokens.rows, head.options, known.coefficients
    x = tokens.counted
    z, slope = head.logits(x, tile, ids)
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
        weights = rows.upstream[:, None] * rows.soft_weight

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
