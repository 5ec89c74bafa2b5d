"""The loss and its gradients in plain XLA, for platforms that the C++ kernels do not run on.

Two loops over tiles of tokens x ids, whose logits are the only ones that exist at a time (`_tiles.py` has their size):

  stream    loss, lse and dx: per token tile a running maximum, sum and accumulator over the vocabulary; 1u, 2u with dx
  gradients dw and dx from a known softmax: per vocabulary tile over all token tiles; 3u, or 2u without dx

The metrics rank and, with softcap, mean_logits each take one more pass over the table, 1u.

The last, smaller vocabulary tile is a slice of its own static size: neither padding, which would copy the table, nor a
dynamic slice, whose start XLA moves back when it runs over the end. Token tiles are padded and masked; one without a
token that counts is skipped.

On a mesh these are the programs of one device, and a `Place` says what it must exchange. A table in parts is gathered a
tile at a time, so `stream` then turns its loops inside out: each tile is gathered once, and all of the device's tokens
use it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from . import _metrics, _objective, _softmax, _tiles
from ._gradients import gradients
from ._head import Head, Labels, Tokens, at, at_label
from ._manual import vary_like
from ._options import FILTER_REPORT, Extra, Options, Values, Wants
from ._place import ALONE, Place
from ._softmax import Found, State

_F32 = jnp.float32


def evaluate(options: Options, wants: Wants, x: jax.Array, w: jax.Array, labels: jax.Array | None,
             cotangent: jax.Array, saved: tuple[jax.Array, jax.Array, jax.Array] | None = None, place: Place = ALONE,
             extra: Extra = Extra()) -> Values:
    """cotangent: f32, [1], or [N] for reduction "none". saved: (nll, peak, log_mass) of an earlier call, when known:
    then only gradients are wanted.

    At a place on a mesh, arguments by token and the table are the device's parts, and so are results, by token or by
    id; ids count the whole vocabulary, and so do bias and class weights.
    """
    tokens, hidden = x.shape
    id_axis = 0 if options.head_layout == "vd" else 1
    vocab = w.shape[id_axis] * place.vocab_parts
    if tokens == 0:
        return _no_tokens(options, wants, x, w, place, extra)
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

    by_stream = _by_stream(wants, place, extra) and not filtered
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
            metrics["rank"] = flat(_rank(head, batch, found))
        if "mean_logits" in options.metrics:
            metrics["mean_logits"] = _mean_logits(head, batch)
        metrics["filter_report"] = jnp.zeros(len(FILTER_REPORT), _F32)  # the kernels' filters do not run here
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


def _by_stream(wants: Wants, place: Place, extra: Extra) -> bool:
    """Whether the gradient of x comes out of the first pass. That needs the targets' rows of the table at its end: of
    gathered tiles one a token is kept as they come by, and not the K of soft targets."""
    return wants.d_x and not wants.head and not (place.gathers and extra.soft_ids is not None)


def passes(options: Options, wants: Wants, place: Place, extra: Extra, known: bool) -> int:
    """How often `evaluate` goes through the table on a mesh. known: `saved` is given."""
    stream = _by_stream(wants, place, extra)
    more = 0 if known else len({"rank", "mean_logits"} & options.metrics)
    return (stream or not known) + (any(wants) and not stream) + more


# Below this the ceiling that chunk_size is would cost more than the memory it saves: 512 bytes a token.
LEAST_IDS = 128


def _chunked(chunk: int, most: int) -> int:
    """Ids of a tile made of whole chunks."""
    return chunk * max(1, most // chunk)


def _no_tokens(options: Options, wants: Wants, x: jax.Array, w: jax.Array, place: Place, extra: Extra) -> Values:
    vocab = w.shape[0 if options.head_layout == "vd" else 1]
    empty, ids = jnp.zeros((0,), _F32), jnp.zeros((0,), jnp.int32)
    metrics = {"entropy": empty, "argmax": ids, "correct": ids != 0, "rank": ids, "mean_logits": jnp.zeros((vocab,), _F32),
               "filter_report": jnp.zeros(len(FILTER_REPORT), _F32)}
    metrics = {name: a for name, a in metrics.items() if name in options.metrics}
    if options.top_k:
        metrics |= {"top_k_ids": jnp.zeros((0, options.top_k), jnp.int32),
                    "top_k_logprobs": jnp.zeros((0, options.top_k), _F32)}
    return Values(empty if options.reduction == "none" else _F32(0), empty, empty, empty,
                  jnp.zeros_like(x) if wants.d_x else None, jnp.zeros_like(w) if wants.d_w else None,
                  jnp.zeros((vocab,), extra.bias.dtype) if wants.d_bias else None, metrics)


def _tile(a: jax.Array, tiles: int, height: int) -> jax.Array:
    """Padded with zeros: rows that are not valid."""
    extra = tiles * height - a.shape[0]
    if extra:
        a = jnp.concatenate([a, jnp.zeros((extra, *a.shape[1:]), a.dtype)])
    return a.reshape(tiles, height, *a.shape[1:])


# ---------------------------------------------------------------------------------------------------------- the loops


def _stream(head: Head, want_d_x: bool, batch: Tokens) -> Found:
    """Arrays [tiles, T, ...]."""
    options = head.options
    smooth = want_d_x and options.label_smoothing and options.softcap is None
    even = _softmax.constant(head) if smooth else None

    def absorb(tokens: Tokens) -> State:
        return head.over_tiles(lambda _, ids, tile, state: _softmax.absorb(head, tokens, ids, tile, state),
                               _softmax.start(head, want_d_x, tokens))

    def label_rows(tokens: Tokens) -> jax.Array | None:
        return head.label_rows(tokens.target) if want_d_x else None

    if not head.place.gathers and not head.place.vocab_axes:
        return _each(batch, lambda tokens: _softmax.finish(head, tokens, absorb(tokens), label_rows(tokens), even))

    tiles, rows = batch.target.shape
    every = jax.tree.map(lambda a: lax.collapse(a, 0, 2), batch)
    if head.place.gathers:
        labels = Labels.of(head, every.target) if want_d_x else None

        def vocab_tile(first: Any, ids: jax.Array, tile: jax.Array, carry: Any) -> Any:
            states, labels = carry
            states = _update(batch, states, lambda tokens, state: _softmax.absorb(head, tokens, ids, tile, state))
            return states, labels and labels.see(head, first, tile)

        states, labels = head.over_tiles(vocab_tile, (_softmax.start(head, want_d_x, batch), labels))
        found = labels and labels.in_order()
    else:
        states, found = _each(batch, absorb), label_rows(every)
    states = jax.tree.map(lambda a: lax.collapse(a, 0, 2), states)
    # All tokens at once: what is exchanged is exchanged once.
    return jax.tree.map(lambda a: a.reshape(tiles, rows, *a.shape[1:]), _softmax.finish(head, every, states, found, even))


# --------------------------------------------------------------------------------- metrics that take a pass of their own


def _rank(head: Head, batch: Tokens, found: Found) -> jax.Array:
    """Number of logits above the label's: one more pass, since most tiles come before the label's."""
    def count(tokens: Tokens, ids: jax.Array, tile: jax.Array, state: Any) -> Any:
        logit, larger = state
        z, _ = head.logits(tokens.counted, tile, ids)
        above = (z > logit[:, None]) & ~at_label(tokens.target, ids)
        return logit, larger + above.sum(axis=1, dtype=jnp.int32)

    def vocab_tile(_: Any, ids: jax.Array, tile: jax.Array, states: Any) -> Any:
        return _update(batch, states, lambda tokens, state: count(tokens, ids, tile, state))

    _, larger = head.over_tiles(vocab_tile, (found.label_logit, jnp.zeros_like(batch.target)))
    return _metrics.rank(batch.rows, found.peak + found.log_mass, head.place.over_vocab(larger))


def _mean_logits(head: Head, batch: Tokens) -> jax.Array:
    """f32 [V], or this device's part of it. Without softcap the logits of the mean row."""
    place = head.place
    valid = place.over_tokens(batch.valid.sum())
    count = jnp.maximum(valid, 1)
    mean = (place.over_tokens(batch.counted.astype(_F32).sum(1).sum(0)) / count)[None]

    def tile_means(first: Any, ids: jax.Array, tile: jax.Array, means: jax.Array) -> jax.Array:
        if head.options.softcap is None:
            z = head.logits(mean, tile, ids)[0][0]
        else:
            def one(i: jax.Array, total: jax.Array) -> jax.Array:
                tokens = at(i, batch)
                z, _ = head.logits(tokens.counted, tile, ids)
                return total + jnp.where(tokens.valid[:, None], z, 0).sum(0)

            z = lax.fori_loop(0, len(batch.x), one, vary_like(jnp.zeros(ids.shape, _F32), head.w)) / count
        return lax.dynamic_update_slice_in_dim(means, z.reshape(place.parts, -1), first, 1)

    means = head.over_tiles(tile_means, vary_like(jnp.zeros((place.parts, head.rows), _F32), head.w))
    means = place.own_ids(means) if head.options.softcap is None else place.scatter_ids(means)
    return jnp.where(valid > 0, means, 0)


# ----------------------------------------------------------------------------------------- token tiles, one by one


def _each(batch: Tokens, f: Callable[[Tokens], Any]) -> Any:
    """f of every token tile; zeros, at no cost, for one whose tokens are all ignored."""
    def zeros(tokens: Tokens) -> Any:
        return jax.tree.map(lambda a: vary_like(jnp.zeros(a.shape, a.dtype), tokens.x), jax.eval_shape(f, tokens))

    return lax.map(lambda tokens: lax.cond(jnp.any(tokens.valid), f, zeros, tokens), batch)


def _update(batch: Tokens, states: State, f: Callable[[Tokens, State], State]) -> State:
    """f of every token tile and its state, in place; a tile whose tokens are all ignored keeps its state."""
    def tile(i: jax.Array, states: State) -> State:
        tokens, state = at(i, (batch, states))
        state = lax.cond(jnp.any(tokens.valid), f, lambda _, same: same, tokens, state)
        return jax.tree.map(lambda a, one: a.at[i].set(one), states, state)

    return lax.fori_loop(0, len(batch.x), tile, states)
