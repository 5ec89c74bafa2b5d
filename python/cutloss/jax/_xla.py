"""The loss and its gradients in plain XLA, for platforms that the C++ kernels do not run on.

Two loops over tiles of tokens x ids, whose logits are the only ones that exist at a time (`_tiles.py` has their size):

  stream    loss, lse and dx: per token tile a running maximum, sum and accumulator over the vocabulary; 1u, 2u with dx
  gradients dw and dx from a known softmax: per vocabulary tile over all token tiles; 3u, or 2u without dx

The last, smaller vocabulary tile is a slice of its own static size: neither padding, which would copy the table, nor a
dynamic slice, whose start XLA moves back when it runs over the end. Token tiles are padded and masked; one without a
token that counts is skipped.

On a mesh these are the programs of one device, and a `Place` says what it must exchange. A table in parts is gathered a
tile at a time, so `stream` then turns its loops inside out: each tile is gathered once, and all of the device's tokens
use it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from . import _tiles
from ._manual import vary_like
from ._options import Options, Values, Wants
from ._place import ALONE, Place

_F32 = jnp.float32


class _Tokens(NamedTuple):
    """Token-wise arrays, [tiles, T, ...]."""

    x: jax.Array
    target: jax.Array  # the label, or -1 where there is none to find
    valid: jax.Array  # not ignored
    bad: jax.Array  # valid, but no id of the vocabulary
    upstream: jax.Array  # f32, gradient of the summed loss by this token's nll; 0 where ignored, NaN where bad


class _State(NamedTuple):
    """The softmax of tokens over the ids seen so far, and the label's logit apart from it."""

    top: jax.Array  # f32, the largest logit that is not the label's
    total: jax.Array  # f32, sum of exp(z - top), without the label's
    label_logit: jax.Array  # f32, 0 until the label is seen
    weighted: jax.Array | None  # f32 [..., D], sum of exp(z - top) dz/dx, without the label's


class _Softmax(NamedTuple):
    """What the first pass found out about each token, f32."""

    label_weight: jax.Array  # p_label - 1
    peak: jax.Array
    log_mass: jax.Array


def evaluate(options: Options, wants: Wants, x: jax.Array, w: jax.Array, labels: jax.Array, cotangent: jax.Array,
             saved: tuple[jax.Array, jax.Array, jax.Array] | None = None, place: Place = ALONE) -> Values:
    """cotangent: f32, [1], or [N] for reduction "none". saved: (nll, peak, log_mass) of an earlier call, when known.

    At a place on a mesh, x, w, labels and saved are the device's parts, and so are the results; the labels are ids of
    the whole vocabulary.
    """
    tokens, hidden = x.shape
    id_axis = 0 if options.head_layout == "vd" else 1
    vocab = w.shape[id_axis] * place.vocab_parts
    valid = labels != options.ignore_index
    bad = valid & ((labels < 0) | (labels >= vocab))
    count = _F32(1)
    if options.reduction == "mean":
        count = jnp.maximum(place.over_tokens(jnp.sum(valid)), 1).astype(_F32)
    upstream = jnp.where(valid, jnp.where(bad, jnp.nan, cotangent / count), 0)
    target = jnp.where(valid & ~bad, labels, -1).astype(jnp.int32)

    if tokens == 0:
        empty = jnp.zeros((0,), _F32)
        return Values(empty if options.reduction == "none" else _F32(0), empty, empty,
                      jnp.zeros_like(x) if wants.d_x else None, jnp.zeros_like(w) if wants.d_w else None)
    size = _tiles.choose(tokens, hidden, place.chip or _tiles.default_chip())
    tiles = -(-tokens // size.tokens)
    rows = -(-tokens // (8 * tiles)) * 8  # tiles of one size, a multiple of 8 lanes, as near to equal as that allows
    batch = _Tokens(*(_tile(a, tiles, rows, fill) for a, fill in
                      ((x, 0), (target, -1), (valid, False), (bad, False), (upstream, 0))))
    head = _Head(options, w, place, max(8, size.ids // place.parts))
    if place.whole:
        head = head.keeping()

    stream_d_x = wants.d_x and not wants.d_w
    if saved is None or stream_d_x:
        nll, peak, log_mass, d_x = _stream(head, stream_d_x, batch)
    else:
        nll, peak, log_mass = (_tile(a, tiles, rows, 0) for a in saved)
        d_x = None
    d_w = None
    if wants.d_w:
        d_x, d_w = _gradients(head, wants, batch, nll, peak, log_mass)

    def flat(a: jax.Array) -> jax.Array:
        return a.reshape(tiles * rows, *a.shape[2:])[:tokens]

    # Tile sums first: one f32 sum over 2**20 tokens would lose three digits.
    loss = flat(nll) if options.reduction == "none" else place.over_tokens(nll.sum(1).sum(0)) / count
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
    """The table in either layout, or this device's part of it."""

    options: Options
    w: jax.Array
    place: Place
    tile_ids: int  # of this device's ids in a tile; of gathered ones there are `place.parts` times as many
    kept: jax.Array | None = None  # the gathered table, its tiles one after another

    @property
    def id_axis(self) -> int:
        return 0 if self.options.head_layout == "vd" else 1

    @property
    def hidden_axis(self) -> int:
        return 1 - self.id_axis

    @property
    def rows(self) -> int:
        return self.w.shape[self.id_axis]

    def keeping(self) -> _Head:
        """Gathers the table once for all loops to come: by tiles, since XLA would lay out a whole one twice."""
        shape = [0, 0]
        shape[self.id_axis] = self.rows * self.place.parts
        shape[self.hidden_axis] = self.place.hidden(self.w.shape[self.hidden_axis])

        def keep(first: Any, _: jax.Array, tile: jax.Array, kept: jax.Array) -> jax.Array:
            return lax.dynamic_update_slice_in_dim(kept, tile, first * self.place.parts, self.id_axis)

        return self._replace(kept=self.over_tiles(keep, jnp.zeros(shape, self.w.dtype)))

    def logits(self, x: jax.Array, tile: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """z [T, ids] and dz/d(x w), None for 1."""
        raw = _product(x, tile, 1, self.hidden_axis)
        cap = self.options.softcap
        if cap is None:
            return raw, None
        bent = jnp.tanh(raw / cap)
        return cap * bent, 1 - bent * bent

    def rows_of(self, weights: jax.Array, tile: jax.Array) -> jax.Array:
        """weights [T, ids] @ table -> [T, D]"""
        return _product(weights, tile, 1, self.id_axis)

    def label_rows(self, target: jax.Array) -> jax.Array:
        """[T] -> [T, D], 0 for a label that is not among this device's ids. For a table that is not gathered."""
        return self.take(self.w, target - self.place.start(self.rows))

    def take(self, tile: jax.Array, index: jax.Array) -> jax.Array:
        """The tile's rows, 0 for an index outside."""
        size = tile.shape[self.id_axis]
        rows = jnp.take(tile, jnp.clip(index, 0, size - 1), axis=self.id_axis)
        rows = rows if self.id_axis == 0 else rows.T
        return jnp.where(((index >= 0) & (index < size))[:, None], rows, 0)

    @property
    def size(self) -> int:
        return min(self.tile_ids, self.rows)

    def over_tiles(self, body: Callable[[Any, jax.Array, jax.Array, Any], Any], carry: Any) -> Any:
        """carry = body(first, ids, tile, carry) over tiles in order. first: of the tile's rows in the device's part."""
        size = self.size
        whole = self.rows // size
        starts = self.place.starts(self.rows)

        def step(first: Any, size: int, carry: Any) -> Any:
            ids = starts[:, None] + first + lax.iota(jnp.int32, size)
            return body(first, ids.reshape(-1), self._part(first, size), carry)

        carry = lax.fori_loop(0, whole, lambda k, carry: step(k * size, size, carry), carry)
        if whole * size < self.rows:
            carry = step(whole * size, self.rows - whole * size, carry)
        return carry

    def _part(self, first: Any, size: int) -> jax.Array:
        def cut(a: jax.Array, first: Any, size: int) -> jax.Array:
            if isinstance(first, int):
                return lax.slice_in_dim(a, first, first + size, axis=self.id_axis)
            return lax.dynamic_slice_in_dim(a, first, size, self.id_axis)

        if self.kept is None:
            return self.place.gather(cut(self.w, first, size), self.id_axis)
        return cut(self.kept, first * self.place.parts, size * self.place.parts)


def _is_label(target: jax.Array, ids: jax.Array) -> jax.Array:
    return target[:, None] == ids[None, :]


# ------------------------------------------------------------------------------------------- a token tile's softmax


def _start(want_d_x: bool, tokens: _Tokens) -> _State:
    zero = vary_like(jnp.zeros(tokens.target.shape, _F32), tokens.x)
    weighted = vary_like(jnp.zeros(tokens.x.shape, _F32), tokens.x) if want_d_x else None
    return _State(zero - jnp.inf, zero, zero, weighted)


def _absorb(head: _Head, tokens: _Tokens, ids: jax.Array, tile: jax.Array, state: _State) -> _State:
    """Takes the logits of one vocabulary tile into the softmax."""
    x = jnp.where(tokens.valid[:, None], tokens.x, 0)  # whatever is in an ignored row stays there
    z, slope = head.logits(x, tile)
    is_label = _is_label(tokens.target, ids)
    others = jnp.where(is_label, -jnp.inf, z)
    top = jnp.maximum(state.top, others.max(axis=1))
    shift = _finite(top)
    scale = jnp.exp(state.top - shift)
    p = jnp.exp(others - shift[:, None])
    weighted = state.weighted
    if weighted is not None:
        weighted = weighted * scale[:, None] + head.rows_of(p if slope is None else p * slope, tile)
    label_logit = state.label_logit + jnp.sum(jnp.where(is_label, z, 0), axis=1)
    return _State(top, state.total * scale + p.sum(axis=1), label_logit, weighted)


def _finite(top: jax.Array) -> jax.Array:
    return jnp.where(top == -jnp.inf, 0, top)  # nothing but the label so far (V = 1)


def _combine(place: Place, state: _State) -> _State:
    """The softmax over all of the vocabulary's parts; `weighted` stays a part of its sum."""
    if not place.vocab_axes:
        return state
    top = place.largest(state.top)
    scale = jnp.exp(state.top - _finite(top))
    weighted = None if state.weighted is None else state.weighted * scale[:, None]
    return _State(top, place.over_vocab(state.total * scale), place.over_vocab(state.label_logit), weighted)


def _finish(head: _Head, tokens: _Tokens, state: _State, label_rows: jax.Array | None) -> tuple[jax.Array, ...]:
    """nll, peak, log_mass [T] and dx [T, D] (or None). label_rows: [T, D], or None without dx.

    The label's entry was left out of sum and accumulator. With s the sum of exp(z - m) over the others, nll is
    log1p(s exp(m - z_y)) and p_y - 1 = -s / (s + exp(z_y - m)): both keep their digits when p_y is almost 1, where
    z_y - lse and p_y - 1 taken as differences have none left.
    """
    top, total, label_logit, weighted = _combine(head.place, state)
    confident = label_logit >= top
    nll = jnp.where(confident, jnp.log1p(total * jnp.exp(top - label_logit)),
                    (top - label_logit) + jnp.log(total + jnp.exp(label_logit - top)))
    nll = jnp.where(label_logit == jnp.inf, jnp.nan, nll)  # an infinite logit must not look like certainty
    peak = jnp.maximum(top, label_logit)
    others = jnp.exp(top - peak)
    mass = total * others + jnp.exp(label_logit - peak)
    nll, peak, log_mass = (jnp.where(tokens.valid, jnp.where(tokens.bad, jnp.nan, a), 0)
                           for a in (nll, peak, jnp.log(mass)))
    if weighted is None:
        return nll, peak, log_mass, None

    cap = head.options.softcap
    label_slope = 1 if cap is None else 1 - (label_logit / cap) ** 2
    label_weight = -(total * others / mass) * label_slope
    d_x = weighted * (others / mass)[:, None] + label_weight[:, None] * label_rows.astype(_F32)
    d_x = tokens.upstream[:, None] * head.place.over_vocab(d_x)
    return nll, peak, log_mass, jnp.where(tokens.valid[:, None], d_x, 0).astype(tokens.x.dtype)


# ---------------------------------------------------------------------------------------------------------- the loops


def _stream(head: _Head, want_d_x: bool, batch: _Tokens) -> tuple[jax.Array, ...]:
    """nll, peak, log_mass [tiles, T] and dx [tiles, T, D] (or None)."""
    def absorb(tokens: _Tokens) -> _State:
        return head.over_tiles(lambda _, ids, tile, state: _absorb(head, tokens, ids, tile, state),
                               _start(want_d_x, tokens))

    def label_rows(tokens: _Tokens) -> jax.Array | None:
        return head.label_rows(tokens.target) if want_d_x else None

    if not head.place.gathers and not head.place.vocab_axes:
        return _each(batch, lambda tokens: _finish(head, tokens, absorb(tokens), label_rows(tokens)))

    tiles, rows = batch.target.shape
    every = jax.tree.map(lambda a: lax.collapse(a, 0, 2), batch)
    if head.place.gathers:
        labels = _Labels.of(head, every.target) if want_d_x else None

        def vocab_tile(first: Any, ids: jax.Array, tile: jax.Array, carry: Any) -> Any:
            states, labels = carry
            states = _update(batch, states, lambda tokens, state: _absorb(head, tokens, ids, tile, state))
            return states, labels and labels.see(head, first, tile)

        states, labels = head.over_tiles(vocab_tile, (_start(want_d_x, batch), labels))
        found = labels and labels.in_order()
    else:
        states, found = _each(batch, absorb), label_rows(every)
    states = jax.tree.map(lambda a: lax.collapse(a, 0, 2), states)
    # All tokens at once: what is exchanged is exchanged once.
    return jax.tree.map(lambda a: a.reshape(tiles, rows, *a.shape[1:]), _finish(head, every, states, found))


class _Labels(NamedTuple):
    """The tokens' label rows, picked from gathered tiles as they come by. Sorted by when their tile comes, so that
    each tile has a run of them, and n labels cost about n rows, not n for every tile. (Asking the table's owners for
    their columns makes XLA copy their whole part, where it keeps the ids minor: for D / k that is no multiple of 128.)
    """

    when: jax.Array  # [n], ascending
    order: jax.Array  # [n], the tokens in that order
    rows: jax.Array  # [n, D], those seen so far, in that order

    CHUNK = 128

    @classmethod
    def of(cls, head: _Head, target: jax.Array) -> _Labels:
        when = head.place.seen_at(target, head.rows, head.size)
        when, order = lax.sort_key_val(when, lax.iota(jnp.int32, len(target)))
        hidden = head.place.hidden(head.w.shape[head.hidden_axis])
        return cls(when, order, jnp.zeros((len(target), hidden), head.w.dtype))

    def see(self, head: _Head, first: Any, tile: jax.Array) -> _Labels:
        index = self.when - first * head.place.parts
        size = min(self.CHUNK, len(index))

        def chunk(carry: Any) -> Any:
            at, rows = carry
            start = jnp.minimum(at, len(index) - size)  # what is before `at` is found once more
            part = lax.dynamic_slice_in_dim(index, start, size)
            here = ((part >= 0) & (part < tile.shape[head.id_axis]))[:, None]
            old = lax.dynamic_slice_in_dim(rows, start, size)
            rows = lax.dynamic_update_slice_in_dim(rows, jnp.where(here, head.take(tile, part), old), start, 0)
            return at + size, rows

        begin, end = jnp.sum(index < 0), jnp.sum(index < tile.shape[head.id_axis])
        return self._replace(rows=lax.while_loop(lambda carry: carry[0] < end, chunk, (begin, self.rows))[1])

    def in_order(self) -> jax.Array:
        return self.rows[jnp.argsort(self.order)]


def _gradients(head: _Head, wants: Wants, batch: _Tokens, nll: jax.Array, peak: jax.Array,
               log_mass: jax.Array) -> tuple[jax.Array | None, jax.Array]:
    """dx [tiles, T, D] f32 (or None) and dw."""
    softmax = _Softmax(jnp.expm1(-nll), peak, log_mass)  # p_y - 1, without the subtraction

    def vocab_tile(first: Any, ids: jax.Array, tile: jax.Array, carry: Any) -> Any:
        def token_tile(i: jax.Array, carry: Any) -> Any:
            d_x, d_tile = carry
            tokens, known = _at(i, (batch, softmax))

            def add(d_x: jax.Array | None, d_tile: jax.Array) -> Any:
                by_token, by_id = _tile_gradients(head, tokens, known, ids, tile)
                return (None if d_x is None else d_x + head.rows_of(by_token, tile)), d_tile + by_id

            one, d_tile = lax.cond(jnp.any(tokens.valid), add, lambda *same: same, _at(i, d_x), d_tile)
            return jax.tree.map(lambda a, one: a.at[i].set(one), d_x, one), d_tile

        d_x, d_w = carry
        d_tile = vary_like(jnp.zeros(tile.shape, _F32), batch.x)
        d_x, d_tile = lax.fori_loop(0, len(batch.x), token_tile, (d_x, d_tile))
        d_tile = head.place.scatter(d_tile, head.id_axis).astype(d_w.dtype)
        return d_x, lax.dynamic_update_slice_in_dim(d_w, d_tile, first, head.id_axis)

    d_x = vary_like(jnp.zeros(batch.x.shape, _F32), head.w) if wants.d_x else None
    d_x, d_w = head.over_tiles(vocab_tile, (d_x, vary_like(jnp.zeros_like(head.w), head.w)))
    return (head.place.over_vocab(d_x) if wants.d_x else None), d_w


def _tile_gradients(head: _Head, tokens: _Tokens, known: _Softmax, ids: jax.Array,
                    tile: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The gradient of the tile's logits, [T, ids], and what it adds to the gradient of the table's tile."""
    x = jnp.where(tokens.valid[:, None], tokens.x, 0)
    z, slope = head.logits(x, tile)
    p = jnp.exp((z - known.peak[:, None]) - known.log_mass[:, None])
    dz = jnp.where(_is_label(tokens.target, ids), known.label_weight[:, None], p)
    dz = dz * tokens.upstream[:, None] * (1 if slope is None else slope)
    return dz, (_product(dz, x, 0, 0) if head.id_axis == 0 else _product(x, dz, 0, 0))


# ----------------------------------------------------------------------------------------- token tiles, one by one


def _at(i: jax.Array, tree: Any) -> Any:
    return jax.tree.map(lambda a: a[i], tree)


def _each(batch: _Tokens, f: Callable[[_Tokens], Any]) -> Any:
    """f of every token tile; zeros, at no cost, for one whose tokens are all ignored."""
    def zeros(tokens: _Tokens) -> Any:
        return jax.tree.map(lambda a: vary_like(jnp.zeros(a.shape, a.dtype), tokens.x), jax.eval_shape(f, tokens))

    return lax.map(lambda tokens: lax.cond(jnp.any(tokens.valid), f, zeros, tokens), batch)


def _update(batch: _Tokens, states: _State, f: Callable[[_Tokens, _State], _State]) -> _State:
    """f of every token tile and its state, in place; a tile whose tokens are all ignored keeps its state."""
    def tile(i: jax.Array, states: _State) -> _State:
        tokens, state = _at(i, (batch, states))
        state = lax.cond(jnp.any(tokens.valid), f, lambda _, same: same, tokens, state)
        return jax.tree.map(lambda a, one: a.at[i].set(one), states, state)

    return lax.fori_loop(0, len(batch.x), tile, states)
