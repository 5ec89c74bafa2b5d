"""The first pass over the table: the loss, lse and metrics of every token, and the gradient of x where it can come out of
the same pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from . import _softmax
from ._head import Head, Labels, Tokens, at
from ._manual import vary_like
from ._softmax import Found, State


def stream(head: Head, want_d_x: bool, batch: Tokens, logits: jax.Array | None = None) -> tuple[Found, jax.Array | None]:
    """Arrays [tiles, T, ...]. logits: where to keep them, `room_for` of the batch, and None to keep none."""
    options = head.options
    smooth = want_d_x and options.label_smoothing and options.softcap is None
    even = _softmax.constant(head) if smooth else None

    def absorb(tokens: Tokens) -> State:
        return head.over_tiles(lambda _, ids, tile, state: _softmax.absorb(head, tokens, ids, tile, state),
                               _softmax.start(head, want_d_x, tokens))

    def label_rows(tokens: Tokens) -> jax.Array | None:
        return head.label_rows(tokens.target) if want_d_x else None

    if logits is None and not head.place.gathers and not head.place.vocab_axes:
        return each(batch, lambda tokens: _softmax.finish(head, tokens, absorb(tokens), label_rows(tokens), even)), None

    tiles, rows = batch.target.shape
    every = jax.tree.map(lambda a: lax.collapse(a, 0, 2), batch)
    if logits is not None or head.place.gathers:
        labels = Labels.of(head, every.target) if want_d_x and head.place.gathers else None

        def vocab_tile(first: Any, ids: jax.Array, tile: jax.Array, carry: Any) -> Any:
            states, labels, logits = carry
            if logits is None:
                states = update(batch, states, lambda tokens, state: _softmax.absorb(head, tokens, ids, tile, state))
            else:
                states, logits = _update_keeping(head, batch, states, logits, first // head.size, ids, tile)
            return states, labels and labels.see(head, first, tile), logits

        start = _softmax.start(head, want_d_x, batch)
        states, labels, logits = head.over_tiles(vocab_tile, (start, labels, logits))
        found = labels.in_order() if labels else label_rows(every)
    else:
        states, found = each(batch, absorb), label_rows(every)
    states = jax.tree.map(lambda a: lax.collapse(a, 0, 2), states)
    # All tokens at once: what is exchanged is exchanged once.
    done = _softmax.finish(head, every, states, found, even)
    return jax.tree.map(lambda a: a.reshape(tiles, rows, *a.shape[1:]), done), logits


# ----------------------------------------------------------------------------------------- token tiles, one by one


def each(batch: Tokens, f: Callable[[Tokens], Any]) -> Any:
    """f of every token tile; zeros, at no cost, for one whose tokens are all ignored."""
    def zeros(tokens: Tokens) -> Any:
        return jax.tree.map(lambda a: vary_like(jnp.zeros(a.shape, a.dtype), tokens.x), jax.eval_shape(f, tokens))

    return lax.map(lambda tokens: lax.cond(jnp.any(tokens.valid), f, zeros, tokens), batch)


def update(batch: Tokens, states: Any, f: Callable[[Tokens, Any], Any]) -> Any:
    """f of every token tile and its state, in place; a tile whose tokens are all ignored keeps its state."""
    def tile(i: jax.Array, states: Any) -> Any:
        tokens, state = at(i, (batch, states))
        state = lax.cond(jnp.any(tokens.valid), f, lambda _, same: same, tokens, state)
        return jax.tree.map(lambda a, one: a.at[i].set(one), states, state)

    return lax.fori_loop(0, len(batch.x), tile, states)


# ------------------------------------------------------------------------------------------------- logits that are kept


def room_for(head: Head, batch: Tokens) -> jax.Array:
    """f32 [vocabulary tiles, token tiles, T, ids]: with the tiles in front, writing one moves whole rows of memory. In
    bfloat16 a logit of 30 would be off by 0.06, and its softmax by 6 %."""
    tiles, rows = batch.target.shape[-2:]
    shape = (-(-head.rows // head.size), tiles, rows, head.size * head.place.parts)
    return vary_like(jnp.zeros(shape, jnp.float32), batch.x)


def kept_tile(logits: jax.Array, k: Any, i: Any, ids: int) -> jax.Array:
    """[T, ids] of vocabulary tile k, the last of which may be narrower, and token tile i."""
    return lax.dynamic_slice(logits, (k, i, 0, 0), (1, 1, logits.shape[2], ids))[0, 0]


def _update_keeping(head: Head, batch: Tokens, states: State, logits: jax.Array, k: Any, ids: jax.Array,
                    tile: jax.Array) -> tuple[State, jax.Array]:
    def token_tile(i: jax.Array, carry: Any) -> Any:
        states, logits = carry

        def take(tokens: Tokens, state: State) -> Any:
            z, slope = head.logits(tokens.counted, tile, ids)
            return _softmax.absorb_logits(head, tokens, ids, tile, z, slope, state), z

        def skip(tokens: Tokens, state: State) -> Any:
            return state, vary_like(jnp.zeros((tokens.x.shape[0], len(ids)), jnp.float32), tokens.x)

        tokens, state = at(i, (batch, states))
        # Only the tile goes through the condition, so that the whole array is written in place.
        state, z = lax.cond(jnp.any(tokens.valid), take, skip, tokens, state)
        states = jax.tree.map(lambda a, one: a.at[i].set(one), states, state)
        return states, lax.dynamic_update_slice(logits, z[None, None], (k, i, 0, 0))

    return lax.fori_loop(0, len(batch.x), token_tile, (states, logits))
