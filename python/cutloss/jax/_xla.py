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

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from . import _metrics, _objective, _tiles
from ._gradients import gradients
from ._head import Head, Labels, Tokens, at, at_label, finite
from ._manual import vary_like
from ._options import Extra, Options, Values, Wants
from ._place import ALONE, Place

_F32 = jnp.float32


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
    tile = tile._replace(tokens=options.tiles[0] or tile.tokens, ids=options.tiles[1] or tile.ids)
    tiles = -(-tokens // tile.tokens)
    height = -(-tokens // (8 * tiles)) * 8  # tiles of one size, a multiple of 8 lanes, as near to equal as that allows
    batch = jax.tree.map(lambda a: _tile(a, tiles, height), Tokens(x, rows))
    total = _objective.class_total(extra, vocab)
    filtered = options.filter_eps is not None and any(wants)
    ids = _chunked(options.chunk_size, tile.ids) if filtered else min(tile.ids, max(options.chunk_size, LEAST_IDS))
    head = Head(options if filtered else options._replace(filter_eps=None), w, place, max(8, ids // place.parts),
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
        d_x, d_w, d_bias = gradients(head, wants, batch, nll, peak, log_mass, best)

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


# ------------------------------------------------------------------------------------------- a token tile's softmax


def _start(head: Head, want_d_x: bool, tokens: Tokens) -> _State:
    zero = vary_like(jnp.zeros(tokens.target.shape, _F32), tokens.x)
    weighted = vary_like(jnp.zeros(tokens.x.shape, _F32), tokens.x) if want_d_x else None
    rows, options = tokens.rows, head.options
    soft = None if rows.soft_ids is None else vary_like(jnp.zeros(rows.soft_ids.shape, _F32), tokens.x)
    bent = bool(options.label_smoothing and options.softcap is not None and want_d_x)
    return _State(zero - jnp.inf, zero, zero, weighted, soft, zero if options.label_smoothing else None,
                  jnp.zeros_like(weighted) if bent else None, _metrics.start(options, zero))


def _absorb(head: Head, tokens: Tokens, ids: jax.Array, tile: jax.Array, state: _State) -> _State:
    """Takes the logits of one vocabulary tile into the softmax."""
    x = tokens.counted
    z, slope = head.logits(x, tile, ids)
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
    return _State(top, state.total * scale + p.sum(axis=1), label_logit, weighted, soft_logits, smooth, smooth_rows,
                  metrics)


def _each_target(targets: jax.Array, ids: jax.Array, z: jax.Array) -> jax.Array:
    """The logits of targets [T, K], 0 for those outside the tile."""
    def one(k: jax.Array, found: jax.Array) -> jax.Array:
        return found.at[:, k].set(jnp.where(at_label(targets[:, k], ids), z, 0).sum(axis=1))

    return lax.fori_loop(0, targets.shape[1], one, jnp.zeros_like(targets, _F32) + 0 * z[:, :1])


def _combine(place: Place, state: _State) -> _State:
    """The softmax over all of the vocabulary's parts; `weighted` stays a part of its sum."""
    if not place.vocab_axes:
        return state
    top = place.largest(state.top)
    scale = jnp.exp(state.top - finite(top))
    weighted = None if state.weighted is None else state.weighted * scale[:, None]
    return state._replace(top=top, total=place.over_vocab(state.total * scale),
                          label_logit=place.over_vocab(state.label_logit), weighted=weighted)


def _finish(head: Head, tokens: Tokens, state: _State, label_rows: jax.Array | None) -> _Found:
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
    base = finite(peak)
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


def _other_targets(head: Head, tokens: Tokens, state: _State, d_x: jax.Array) -> jax.Array:
    rows = tokens.rows
    if rows.soft_ids is None:
        return d_x
    weights = rows.upstream[:, None] * rows.soft_weight * _slope(head.options, state.soft_logits)

    def one(k: jax.Array, d_x: jax.Array) -> jax.Array:
        return d_x - weights[:, k, None] * head.label_rows(rows.soft_ids[:, k]).astype(_F32)

    return lax.fori_loop(0, weights.shape[1], one, d_x)


def _constant(head: Head) -> jax.Array:
    """Sum of the table's rows by class weight, f32 [1, D]."""
    def add(_: Any, ids: jax.Array, tile: jax.Array, even: jax.Array) -> jax.Array:
        return even + head.rows_of(head.class_weights(ids)[None], tile)

    return head.over_tiles(add, vary_like(jnp.zeros((1, head.w.shape[head.hidden_axis]), _F32), head.w))


def _rank(head: Head, batch: Tokens, label_logit: jax.Array) -> jax.Array:
    """Number of logits above the label's: one more pass, since most tiles come before the label's."""
    def count(tokens_and_logit: Any) -> jax.Array:
        tokens, logit = tokens_and_logit

        def add(_: Any, ids: jax.Array, tile: jax.Array, larger: jax.Array) -> jax.Array:
            z, _ = head.logits(tokens.counted, tile, ids)
            above = (z > logit[:, None]) & ~at_label(tokens.target, ids)
            return larger + above.sum(axis=1, dtype=jnp.int32)

        return _metrics.rank(tokens.rows, logit, head.over_tiles(add, jnp.zeros_like(tokens.target)))

    return lax.map(count, (batch, label_logit))


def _mean_logits(head: Head, batch: Tokens) -> jax.Array:
    """f32 [V]. Without softcap the logits of the mean row."""
    every = jax.tree.map(lambda a: lax.collapse(a, 0, 2), batch)
    count = jnp.maximum(every.valid.sum(), 1)
    mean = (batch.counted.astype(_F32).sum(1).sum(0) / count)[None]

    def tile_means(first: Any, ids: jax.Array, tile: jax.Array, means: jax.Array) -> jax.Array:
        if head.options.softcap is None:
            z = head.logits(mean, tile, ids)[0][0]
        else:
            def one(i: jax.Array, total: jax.Array) -> jax.Array:
                tokens = at(i, batch)
                z, _ = head.logits(tokens.counted, tile, ids)
                return total + jnp.where(tokens.valid[:, None], z, 0).sum(0)

            z = lax.fori_loop(0, len(batch.x), one, jnp.zeros(ids.shape, _F32)) / count
        return lax.dynamic_update_slice_in_dim(means, z, first, 0)

    means = head.over_tiles(tile_means, jnp.zeros((head.vocab,), _F32))
    return jnp.where(every.valid.any(), means, 0)


# ---------------------------------------------------------------------------------------------------------- the loops


def _stream(head: Head, want_d_x: bool, batch: Tokens) -> _Found:
    """Arrays [tiles, T, ...]."""
    def absorb(tokens: Tokens) -> _State:
        return head.over_tiles(lambda _, ids, tile, state: _absorb(head, tokens, ids, tile, state),
                               _start(head, want_d_x, tokens))

    def label_rows(tokens: Tokens) -> jax.Array | None:
        return head.label_rows(tokens.target) if want_d_x else None

    if not head.place.gathers and not head.place.vocab_axes:
        return _each(batch, lambda tokens: _finish(head, tokens, absorb(tokens), label_rows(tokens)))

    tiles, rows = batch.target.shape
    every = jax.tree.map(lambda a: lax.collapse(a, 0, 2), batch)
    if head.place.gathers:
        labels = Labels.of(head, every.target) if want_d_x else None

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


# ----------------------------------------------------------------------------------------- token tiles, one by one


def _each(batch: Tokens, f: Callable[[Tokens], Any]) -> Any:
    """f of every token tile; zeros, at no cost, for one whose tokens are all ignored."""
    def zeros(tokens: Tokens) -> Any:
        return jax.tree.map(lambda a: vary_like(jnp.zeros(a.shape, a.dtype), tokens.x), jax.eval_shape(f, tokens))

    return lax.map(lambda tokens: lax.cond(jnp.any(tokens.valid), f, zeros, tokens), batch)


def _update(batch: Tokens, states: _State, f: Callable[[Tokens, _State], _State]) -> _State:
    """f of every token tile and its state, in place; a tile whose tokens are all ignored keeps its state."""
    def tile(i: jax.Array, states: _State) -> _State:
        tokens, state = at(i, (batch, states))
        state = lax.cond(jnp.any(tokens.valid), f, lambda _, same: same, tokens, state)
        return jax.tree.map(lambda a, one: a.at[i].set(one), states, state)

    return lax.fori_loop(0, len(batch.x), tile, states)
