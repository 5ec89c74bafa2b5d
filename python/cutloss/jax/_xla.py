"""The loss and its gradients in plain XLA, for platforms that the C++ kernels do not run on.

Loops over tiles of tokens x ids, of which `_plan.py` has the size and the way they are used:

  stream     `_stream.py`: loss, lse and dx. Per token tile a running maximum, sum and accumulator over the vocabulary; 1u,
             2u with dx
  recompute  the same without dx, then `_gradients.py`: dw and dx from the known softmax, per vocabulary tile over all
             token tiles, whose logits are formed again; 4u, or 3u without dx or dw
  chunk      `_chunk.py`: the two for one chunk of tokens after the other, whose logits are kept in between; 3u, or 2u

The metrics rank and, with softcap, mean_logits each take one more pass over the table, 1u.

The last, smaller vocabulary tile is a slice of its own static size: neither padding, which would copy the table, nor a
dynamic slice, whose start XLA moves back when it runs over the end. Token tiles are padded and masked; one without a
token that counts is skipped.

On a mesh these are the programs of one device, and a `Place` says what it must exchange. A table in parts is gathered a
tile at a time, so `stream` then turns its loops inside out: each tile is gathered once, and all of the device's tokens
use it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from . import _metrics, _objective, _plan
from ._chunk import by_chunks
from ._gradients import gradients
from ._head import Head, Tokens, at, at_label
from ._manual import vary_like
from ._options import FILTER_REPORT, Extra, Options, Values, Wants
from ._place import ALONE, Place
from ._softmax import Found
from ._stream import stream, update

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
    plan = _plan.make(options, wants, _plan.problem(options, x, w, place, extra, saved is not None))
    tiles = -(-tokens // (plan.chunks * plan.tile.tokens)) * plan.chunks
    height = -(-tokens // (8 * tiles)) * 8  # tiles of one size, a multiple of 8 lanes, as near to equal as that allows
    batch = jax.tree.map(lambda a: _tile(a, tiles, height), Tokens(x, rows))
    total = _objective.class_total(extra, vocab)
    filtered = options.filter_eps is not None and any(wants)
    head = Head(options if filtered else options._replace(filter_eps=None), w, place, plan.tile.ids // place.parts,
                extra=extra if filtered else extra._replace(vocab_order=None), total=total)
    if plan.whole:
        head = head.keeping()

    found = d_w = d_bias = None
    if plan.mode == "chunk":
        found, d_x, d_w, d_bias = by_chunks(head, wants, plan, batch)
    elif saved is None or plan.mode == "stream" or filtered:
        found, _ = stream(head, plan.d_x_first, batch)
        d_x = found.d_x
    nll, peak, log_mass = ((found.nll, found.peak, found.log_mass) if found is not None
                           else (_tile(a, tiles, height) for a in saved))
    if plan.mode == "recompute":
        best = found.metrics["argmax"] if filtered else None
        d_x, d_w, d_bias = gradients(head, wants, batch, nll, peak, log_mass, best)

    def flat(a: jax.Array) -> jax.Array:
        return a.reshape(tiles * height, *a.shape[2:])[:tokens]

    loss, metrics = nll, {}
    if found is not None:
        # A tile that was skipped is all zeros, which is an id.
        valid = flat(batch.valid)
        metrics = {name: _metrics.only_valid(valid, flat(a), name) for name, a in found.metrics.items()}
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
    return Values(loss, flat(nll), flat(peak), flat(log_mass), flat(d_x).astype(options.d_x_dtype(x)) if wants.d_x else None,
                  d_w, d_bias, metrics)


def check_plan(options: Options, wants: Wants, x: Any, w: Any, extra: Extra) -> None:
    """Raises the BudgetError that `evaluate` of the gradients would, of a softmax that is known then."""
    if x.shape[0]:
        _plan.make(options, wants, _plan.problem(options, x, w, ALONE, extra, known=True))


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
                  jnp.zeros_like(x, options.d_x_dtype(x)) if wants.d_x else None, jnp.zeros_like(w) if wants.d_w else None,
                  jnp.zeros((vocab,), extra.bias.dtype) if wants.d_bias else None, metrics)


def _tile(a: jax.Array, tiles: int, height: int) -> jax.Array:
    """Padded with zeros: rows that are not valid."""
    extra = tiles * height - a.shape[0]
    if extra:
        a = jnp.concatenate([a, jnp.zeros((extra, *a.shape[1:]), a.dtype)])
    return a.reshape(tiles, height, *a.shape[1:])


# --------------------------------------------------------------------------------- metrics that take a pass of their own


def _rank(head: Head, batch: Tokens, found: Found) -> jax.Array:
    """Number of logits above the label's: one more pass, since most tiles come before the label's."""
    def count(tokens: Tokens, ids: jax.Array, tile: jax.Array, state: Any) -> Any:
        logit, larger = state
        z, _ = head.logits(tokens.counted, tile, ids)
        above = (z > logit[:, None]) & ~at_label(tokens.target, ids)
        return logit, larger + above.sum(axis=1, dtype=jnp.int32)

    def vocab_tile(_: Any, ids: jax.Array, tile: jax.Array, states: Any) -> Any:
        return update(batch, states, lambda tokens, state: count(tokens, ids, tile, state))

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
