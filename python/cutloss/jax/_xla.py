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

from . import _metrics, _objective, _tiles
from ._manual import vary_like
from ._options import Extra, Options, Values, Wants
from ._place import ALONE, Place

_F32 = jnp.float32


class _Tokens(NamedTuple):
    """Token-wise arrays, [tiles, T, ...]."""

    x: jax.Array
    rows: _objective.Rows

    @property
    def target(self) -> jax.Array:
        return self.rows.target

    @property
    def valid(self) -> jax.Array:
        return self.rows.valid


class _State(NamedTuple):
    """The softmax of tokens over the ids seen so far, and the label's logit apart from it."""

    top: jax.Array  # f32, the largest logit that is not the label's
    total: jax.Array  # f32, sum of exp(z - top), without the label's
    label_logit: jax.Array  # f32, 0 until the label is seen
    weighted: jax.Array | None  # f32 [..., D], sum of exp(z - top) dz/dx, without the label's
    soft_logits: jax.Array | None  # f32 [..., K], 0 until seen
    smooth: jax.Array | None  # f32, sum of the logits by class weight
    smooth_rows: jax.Array | None  # f32 [..., D], sum of dz/dx by class weight
    metrics: dict[str, jax.Array]


class _Found(NamedTuple):
    """What the first pass finds out about each token."""

    loss: jax.Array
    nll: jax.Array
    peak: jax.Array
    log_mass: jax.Array
    label_logit: jax.Array
    metrics: dict[str, jax.Array]
    d_x: jax.Array | None


class _Softmax(NamedTuple):
    """A token's softmax and the coefficients of its gradient, f32."""

    peak: jax.Array
    log_mass: jax.Array
    coefficients: _objective.Coefficients
    best_id: jax.Array | None  # with filter_eps


def evaluate(options: Options, wants: Wants, x: jax.Array, w: jax.Array, labels: jax.Array | None,
             cotangent: jax.Array, saved: tuple[jax.Array, jax.Array, jax.Array] | None = None, place: Place = ALONE,
             extra: Extra = Extra()) -> Values:
    """cotangent: f32, [1], or [N] for reduction "none". saved: (nll, peak, log_mass) of an earlier call, when known:
    then only gradients are wanted.

    At a place on a mesh, x, w, labels and saved are the device's parts, and so are the results; the labels are ids of
    the whole vocabulary.
    """
    tokens, hidden = x.shape
    id_axis = 0 if options.head_layout == "vd" else 1
    vocab = w.shape[id_axis] * place.vocab_parts
    if tokens == 0:
        return _no_tokens(options, wants, x, w, vocab, extra)
    rows, reduced = _objective.prepare(options, labels, cotangent, extra, tokens, vocab, place)
    tile = _tiles.choose(tokens, hidden, place.chip or _tiles.default_chip())
    tiles = -(-tokens // tile.tokens)
    height = -(-tokens // (8 * tiles)) * 8  # tiles of one size, a multiple of 8 lanes, as near to equal as that allows
    batch = jax.tree.map(lambda a: _tile(a, tiles, height), _Tokens(x, rows))
    total = _objective.class_total(extra, vocab)
    filtered = options.filter_eps is not None and any(wants)
    ids = _chunked(options.chunk_size, tile.ids) if filtered else min(tile.ids, max(options.chunk_size, LEAST_IDS))
    head = _Head(options if filtered else options._replace(filter_eps=None), w, place, max(8, ids // place.parts),
                 extra=extra if filtered else extra._replace(vocab_order=None), total=total)
    if filtered:
        head = head._replace(tile_ids=ids)
    if place.whole:
        head = head.keeping()

    by_stream = wants.d_x and not wants.head and not filtered
    found = None
    if saved is None or by_stream or filtered:
        found = _stream(head, by_stream, batch)
        nll, peak, log_mass, d_x = found.nll, found.peak, found.log_mass, found.d_x
    else:
        nll, peak, log_mass = (_tile(a, tiles, height) for a in saved)
        d_x = None
    d_w = d_bias = None
    if any(wants) and not by_stream:
        best = found.metrics["argmax"] if filtered else None
        d_x, d_w, d_bias = _gradients(head, wants, batch, nll, peak, log_mass, best)

    def flat(a: jax.Array) -> jax.Array:
        return a.reshape(tiles * height, *a.shape[2:])[:tokens]

    loss, metrics = nll, {}
    if found is not None:
        metrics = {name: flat(a) for name, a in found.metrics.items()}
        if "rank" in options.metrics:
            metrics["rank"] = flat(_rank(head, batch, found.label_logit))
        if "mean_logits" in options.metrics:
            metrics["mean_logits"] = _mean_logits(head, batch)
        wanted = options.metrics | ({"top_k_ids", "top_k_logprobs"} if options.top_k else set())
        metrics = {name: a for name, a in metrics.items() if name in wanted}
        loss = found.loss
    if options.reduction != "none":
        # Tile sums first: one f32 sum over 2**20 tokens would lose three digits.
        loss = _objective.divide(place.over_tokens(loss.sum(1).sum(0)), reduced.denominator)
    else:
        loss = flat(loss)
    return Values(loss, flat(nll), flat(peak), flat(log_mass), flat(d_x).astype(x.dtype) if wants.d_x else None, d_w,
                  d_bias, metrics)


# Below this the ceiling that chunk_size is would cost more than the memory it saves: 512 bytes a token.
LEAST_IDS = 128


def _chunked(chunk: int, most: int) -> int:
    """Ids of a tile made of whole chunks."""
    return chunk * max(1, most // chunk)


def _no_tokens(options: Options, wants: Wants, x: jax.Array, w: jax.Array, vocab: int, extra: Extra) -> Values:
    empty, ids = jnp.zeros((0,), _F32), jnp.zeros((0,), jnp.int32)
    metrics = {"entropy": empty, "argmax": ids, "correct": ids != 0, "rank": ids, "mean_logits": jnp.zeros((vocab,), _F32)}
    metrics = {name: a for name, a in metrics.items() if name in options.metrics}
    if options.top_k:
        metrics |= {"top_k_ids": jnp.zeros((0, options.top_k), jnp.int32),
                    "top_k_logprobs": jnp.zeros((0, options.top_k), _F32)}
    return Values(empty if options.reduction == "none" else _F32(0), empty, empty, empty,
                  jnp.zeros_like(x) if wants.d_x else None, jnp.zeros_like(w) if wants.d_w else None,
                  jnp.zeros_like(extra.bias) if wants.d_bias else None, metrics)


def _tile(a: jax.Array, tiles: int, height: int) -> jax.Array:
    """Padded with zeros: rows that are not valid."""
    extra = tiles * height - a.shape[0]
    if extra:
        a = jnp.concatenate([a, jnp.zeros((extra, *a.shape[1:]), a.dtype)])
    return a.reshape(tiles, height, *a.shape[1:])


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
    extra: Extra = Extra()  # bias, class weights and order, of all ids
    total: Any = None  # sum of the class weights

    @property
    def id_axis(self) -> int:
        return 0 if self.options.head_layout == "vd" else 1

    @property
    def hidden_axis(self) -> int:
        return 1 - self.id_axis

    @property
    def rows(self) -> int:
        return self.w.shape[self.id_axis]

    @property
    def vocab(self) -> int:
        return self.rows * self.place.vocab_parts

    def class_weights(self, ids: jax.Array) -> jax.Array:
        weights = self.extra.class_weights
        return jnp.ones(ids.shape, _F32) if weights is None else weights[ids]

    def keeping(self) -> _Head:
        """Gathers the table once for all loops to come: by tiles, since XLA would lay out a whole one twice."""
        shape = [0, 0]
        shape[self.id_axis] = self.rows * self.place.parts
        shape[self.hidden_axis] = self.place.hidden(self.w.shape[self.hidden_axis])

        def keep(first: Any, _: jax.Array, tile: jax.Array, kept: jax.Array) -> jax.Array:
            return lax.dynamic_update_slice_in_dim(kept, tile, first * self.place.parts, self.id_axis)

        return self._replace(kept=self.over_tiles(keep, jnp.zeros(shape, self.w.dtype)))

    def logits(self, x: jax.Array, tile: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """z [T, ids] and its derivative by the raw logit, None for 1."""
        raw = _product(x, tile, 1, self.hidden_axis)
        if self.options.logit_scale != 1:
            raw *= self.options.logit_scale
        if self.extra.bias is not None:
            raw += self.extra.bias[ids].astype(_F32)
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
        """carry = body(first, ids, tile, carry) over tiles in order. first: of the tile's rows in this device's part."""
        size = self.size
        whole = self.rows // size
        starts = self.place.starts(self.rows)

        def step(first: Any, size: int, carry: Any) -> Any:
            ids = (starts[:, None] + first + lax.iota(jnp.int32, size)).reshape(-1)
            if self.extra.vocab_order is not None:
                ids = self.extra.vocab_order[ids]
                return body(first, ids, jnp.take(self.w, ids, axis=self.id_axis), carry)
            return body(first, ids, self._part(first, size), carry)

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


def _start(head: _Head, want_d_x: bool, tokens: _Tokens) -> _State:
    zero = vary_like(jnp.zeros(tokens.target.shape, _F32), tokens.x)
    weighted = vary_like(jnp.zeros(tokens.x.shape, _F32), tokens.x) if want_d_x else None
    rows, options = tokens.rows, head.options
    soft = None if rows.soft_ids is None else vary_like(jnp.zeros(rows.soft_ids.shape, _F32), tokens.x)
    bent = bool(options.label_smoothing and options.softcap is not None and want_d_x)
    return _State(zero - jnp.inf, zero, zero, weighted, soft, zero if options.label_smoothing else None,
                  jnp.zeros_like(weighted) if bent else None, _metrics.start(options, zero))


def _absorb(head: _Head, tokens: _Tokens, ids: jax.Array, tile: jax.Array, state: _State) -> _State:
    """Takes the logits of one vocabulary tile into the softmax."""
    x = jnp.where(tokens.valid[:, None], tokens.x, 0)  # whatever is in an ignored row stays there
    z, slope = head.logits(x, tile, ids)
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
    soft_logits, smooth, smooth_rows = state.soft_logits, state.smooth, state.smooth_rows
    if soft_logits is not None:
        soft_logits = soft_logits + _each_target(tokens.rows.soft_ids, ids, z)
    if smooth is not None:
        weights = head.class_weights(ids)
        smooth = smooth + jnp.where(weights == 0, 0, weights * z).sum(axis=1)
        if smooth_rows is not None:
            smooth_rows = smooth_rows + head.rows_of(slope * weights, tile)
    metrics = _metrics.absorb(head.options, state.metrics, ids, z, p, shift, _finite(state.top), scale, state.total)
    return _State(top, state.total * scale + p.sum(axis=1), label_logit, weighted, soft_logits, smooth, smooth_rows,
                  metrics)


def _each_target(targets: jax.Array, ids: jax.Array, z: jax.Array) -> jax.Array:
    """The logits of targets [T, K], 0 for those outside the tile."""
    def one(k: jax.Array, found: jax.Array) -> jax.Array:
        return found.at[:, k].set(jnp.where(_is_label(targets[:, k], ids), z, 0).sum(axis=1))

    return lax.fori_loop(0, targets.shape[1], one, jnp.zeros_like(targets, _F32) + 0 * z[:, :1])


def _finite(top: jax.Array) -> jax.Array:
    return jnp.where(top == -jnp.inf, 0, top)  # nothing but the label so far (V = 1)


def _combine(place: Place, state: _State) -> _State:
    """The softmax over all of the vocabulary's parts; `weighted` stays a part of its sum."""
    if not place.vocab_axes:
        return state
    top = place.largest(state.top)
    scale = jnp.exp(state.top - _finite(top))
    weighted = None if state.weighted is None else state.weighted * scale[:, None]
    return state._replace(top=top, total=place.over_vocab(state.total * scale),
                          label_logit=place.over_vocab(state.label_logit), weighted=weighted)


def _finish(head: _Head, tokens: _Tokens, state: _State, label_rows: jax.Array | None) -> _Found:
    """label_rows: [T, D], or None without dx.

    The label's entry was left out of sum and accumulator. With s the sum of exp(z - m) over the others, nll is
    log1p(s exp(m - z_y)) and p_y - 1 = -s / (s + exp(z_y - m)): both keep their digits when p_y is almost 1, where
    z_y - lse and p_y - 1 taken as differences have none left.
    """
    state = _combine(head.place, state)
    top, total, label_logit, options, rows = state.top, state.total, state.label_logit, head.options, tokens.rows
    label_logit = jnp.where(rows.bad, -jnp.inf, label_logit)  # the softmax is known all the same
    confident = label_logit >= top
    nll = jnp.where(confident, jnp.log1p(total * jnp.exp(top - label_logit)),
                    (top - label_logit) + jnp.log(total + jnp.exp(label_logit - top)))
    nll = jnp.where(label_logit == jnp.inf, jnp.nan, nll)  # an infinite logit must not look like certainty
    peak = jnp.maximum(top, label_logit)
    nll = jnp.where(peak == -jnp.inf, jnp.inf, nll)
    base = _finite(peak)
    others = jnp.exp(top - base)
    mass = total * others + jnp.exp(label_logit - base)
    log_mass = jnp.where(peak == -jnp.inf, 0, jnp.log(mass))
    lse = peak + log_mass
    metrics = _metrics.finish(options, state.metrics, rows, top, label_logit, total, peak, log_mass)
    loss = _objective.losses(options, rows, nll, lse, state.soft_logits, state.smooth, head.total, head.vocab)
    nll = jnp.where(rows.bad, jnp.nan, nll)
    out = (jnp.where(rows.valid, a, 0) for a in (nll, peak, log_mass, label_logit))
    if state.weighted is None:
        return _Found(loss, *out, metrics, None)

    mass = jnp.where(mass == 0, 1, mass)
    c = _objective.coefficients(options, rows, total * others / mass, lse, head.total, head.vocab)
    # Coefficients outside the sum over the vocabulary's parts: each token's are the same on all of them.
    d_x = (c.softmax * (others / mass))[:, None] * state.weighted
    d_x += (c.label * _slope(options, label_logit))[:, None] * label_rows.astype(_F32)
    d_x = _other_targets(head, tokens, state, d_x)
    if c.smooth is not None:
        even = _constant(head) if state.smooth_rows is None else state.smooth_rows
        d_x -= c.smooth[:, None] * even
    d_x = head.place.over_vocab(d_x) * options.logit_scale
    return _Found(loss, *out, metrics, jnp.where(rows.valid[:, None], d_x, 0).astype(tokens.x.dtype))


def _slope(options: Options, z: jax.Array) -> Any:
    return 1 if options.softcap is None else 1 - (z / options.softcap) ** 2


def _other_targets(head: _Head, tokens: _Tokens, state: _State, d_x: jax.Array) -> jax.Array:
    rows = tokens.rows
    if rows.soft_ids is None:
        return d_x
    weights = rows.upstream[:, None] * rows.soft_weight * _slope(head.options, state.soft_logits)

    def one(k: jax.Array, d_x: jax.Array) -> jax.Array:
        return d_x - weights[:, k, None] * head.label_rows(rows.soft_ids[:, k]).astype(_F32)

    return lax.fori_loop(0, weights.shape[1], one, d_x)


def _constant(head: _Head) -> jax.Array:
    """Sum of the table's rows by class weight, f32 [1, D]."""
    def add(_: Any, ids: jax.Array, tile: jax.Array, even: jax.Array) -> jax.Array:
        return even + head.rows_of(head.class_weights(ids)[None], tile)

    return head.over_tiles(add, vary_like(jnp.zeros((1, head.w.shape[head.hidden_axis]), _F32), head.w))


def _rank(head: _Head, batch: _Tokens, label_logit: jax.Array) -> jax.Array:
    """Number of logits above the label's: one more pass, since most tiles come before the label's."""
    def count(tokens_and_logit: Any) -> jax.Array:
        tokens, logit = tokens_and_logit

        def add(_: Any, ids: jax.Array, tile: jax.Array, larger: jax.Array) -> jax.Array:
            z, _ = head.logits(jnp.where(tokens.valid[:, None], tokens.x, 0), tile, ids)
            above = (z > logit[:, None]) & ~_is_label(tokens.target, ids)
            return larger + above.sum(axis=1, dtype=jnp.int32)

        return _metrics.rank(tokens.rows, logit, head.over_tiles(add, jnp.zeros_like(tokens.target)))

    return lax.map(count, (batch, label_logit))


def _mean_logits(head: _Head, batch: _Tokens) -> jax.Array:
    """f32 [V]. Without softcap the logits of the mean row."""
    every = jax.tree.map(lambda a: lax.collapse(a, 0, 2), batch)
    count = jnp.maximum(every.valid.sum(), 1)
    mean = (jnp.where(batch.valid[..., None], batch.x, 0).astype(_F32).sum(1).sum(0) / count)[None]

    def tile_means(first: Any, ids: jax.Array, tile: jax.Array, means: jax.Array) -> jax.Array:
        if head.options.softcap is None:
            z = head.logits(mean, tile, ids)[0][0]
        else:
            def one(i: jax.Array, total: jax.Array) -> jax.Array:
                tokens = _at(i, batch)
                z, _ = head.logits(jnp.where(tokens.valid[:, None], tokens.x, 0), tile, ids)
                return total + jnp.where(tokens.valid[:, None], z, 0).sum(0)

            z = lax.fori_loop(0, len(batch.x), one, jnp.zeros(ids.shape, _F32)) / count
        return lax.dynamic_update_slice_in_dim(means, z, first, 0)

    means = head.over_tiles(tile_means, jnp.zeros((head.vocab,), _F32))
    return jnp.where(every.valid.any(), means, 0)


# ---------------------------------------------------------------------------------------------------------- the loops


def _stream(head: _Head, want_d_x: bool, batch: _Tokens) -> _Found:
    """Arrays [tiles, T, ...]."""
    def absorb(tokens: _Tokens) -> _State:
        return head.over_tiles(lambda _, ids, tile, state: _absorb(head, tokens, ids, tile, state),
                               _start(head, want_d_x, tokens))

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

        states, labels = head.over_tiles(vocab_tile, (_start(head, want_d_x, batch), labels))
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
        when, order = lax.sort_key_val(head.place.seen_at(target, head.rows, head.size), lax.iota(jnp.int32, len(target)))
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


def _gradients(head: _Head, wants: Wants, batch: _Tokens, nll: jax.Array, peak: jax.Array, log_mass: jax.Array,
               best_id: jax.Array | None) -> tuple[jax.Array | None, ...]:
    """dx [tiles, T, D] f32, dw and dbias; None for what is not wanted."""
    # 1 - p_y, without the subtraction
    c = _objective.coefficients(head.options, batch.rows, -jnp.expm1(-nll), peak + log_mass, head.total, head.vocab)
    softmax = _Softmax(peak, log_mass, c, best_id)
    scale = head.options.logit_scale
    kahan = len(batch.x) > MANY_TILES

    def vocab_tile(first: Any, ids: jax.Array, tile: jax.Array, carry: Any) -> Any:
        def token_tile(i: jax.Array, carry: Any) -> Any:
            d_x, sums = carry
            tokens, known = _at(i, (batch, softmax))

            def add(d_x: jax.Array | None, sums: Any) -> Any:
                dz = _logit_gradients(head, tokens, known, ids, tile)
                if wants.d_x:
                    d_x = d_x + head.rows_of(dz, tile)
                parts = (_table_gradient(head, tokens, dz) if wants.d_w else None, dz.sum(0) if wants.d_bias else None)
                return d_x, tuple(s if s is None else _add(s, part) for s, part in zip(sums, parts))

            one, sums = lax.cond(jnp.any(tokens.valid), add, lambda *same: same, _at(i, d_x), sums)
            return jax.tree.map(lambda a, one: a.at[i].set(one), d_x, one), sums

        def zeros(wanted: bool, shape: tuple[int, ...]) -> Any:
            zero = vary_like(jnp.zeros(shape, _F32), batch.x)
            return _Sum(zero, jnp.zeros_like(zero) if kahan else None) if wanted else None

        d_x, d_w, d_bias = carry
        sums = (zeros(wants.d_w, tile.shape), zeros(wants.d_bias, ids.shape))
        d_x, (tile_sum, bias_sum) = lax.fori_loop(0, len(batch.x), token_tile, (d_x, sums))
        if wants.d_w:
            d_tile = head.place.scatter(tile_sum.value * scale, head.id_axis).astype(d_w.dtype)
            d_w = _place_tile(head, d_w, d_tile, first, ids, head.id_axis)
        if wants.d_bias:
            d_bias = _place_tile(head, d_bias, bias_sum.value.astype(d_bias.dtype), first, ids, 0)
        return d_x, d_w, d_bias

    d_x = vary_like(jnp.zeros(batch.x.shape, _F32), head.w) if wants.d_x else None
    d_w = vary_like(jnp.zeros_like(head.w), head.w) if wants.d_w else None
    d_bias = vary_like(jnp.zeros_like(head.extra.bias), head.w) if wants.d_bias else None
    d_x, d_w, d_bias = head.over_tiles(vocab_tile, (d_x, d_w, d_bias))
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


def _place_tile(head: _Head, whole: jax.Array, tile: jax.Array, first: Any, ids: jax.Array, axis: int) -> jax.Array:
    if head.extra.vocab_order is None:
        return lax.dynamic_update_slice_in_dim(whole, tile, first, axis)
    return whole.at[ids].set(tile) if axis == 0 else whole.at[:, ids].set(tile)


def _logit_gradients(head: _Head, tokens: _Tokens, known: _Softmax, ids: jax.Array, tile: jax.Array) -> jax.Array:
    """By the tile's raw logits, [T, ids]."""
    rows, options, c = tokens.rows, head.options, known.coefficients
    x = jnp.where(tokens.valid[:, None], tokens.x, 0)
    z, slope = head.logits(x, tile, ids)
    is_label = _is_label(tokens.target, ids)
    p = jnp.exp((z - _finite(known.peak)[:, None]) - known.log_mass[:, None])
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
            return dz - jnp.where(_is_label(rows.soft_ids[:, k], ids), weights[:, k, None], 0)

        dz = lax.fori_loop(0, weights.shape[1], one, dz)
    dz = dz if slope is None else dz * slope
    return jnp.where(tokens.valid[:, None], dz, 0)


def _active(head: _Head, known: _Softmax, ids: jax.Array, z: jax.Array) -> jax.Array:
    """[T, ids]: whether the chunk that an id is in holds a logit no more than filter_eps below the row's largest. The
    chunk of that one is taken by its id: formed again, the logit may differ in its last bit."""
    chunk = min(head.options.chunk_size, z.shape[1])
    parts = -(-z.shape[1] // chunk)

    def chunks(a: jax.Array, fill: Any) -> jax.Array:
        return jnp.pad(a, ((0, 0), (0, parts * chunk - a.shape[1])), constant_values=fill).reshape(len(a), parts, chunk)

    near = chunks(z, -jnp.inf).max(2) >= known.peak[:, None] - head.options.filter_eps
    holds = chunks(_is_label(known.best_id, ids), False).any(2) & (head.options.filter_eps >= 0)
    return jnp.repeat(near | holds, chunk, axis=1)[:, : z.shape[1]]


def _table_gradient(head: _Head, tokens: _Tokens, dz: jax.Array) -> jax.Array:
    x = jnp.where(tokens.valid[:, None], tokens.x, 0)
    return _product(dz, x, 0, 0) if head.id_axis == 0 else _product(x, dz, 0, 0)


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
