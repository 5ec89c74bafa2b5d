"""A trainable head at 3u: a chunk of tokens forms its logits once and keeps them until their gradients are formed."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

from . import _gradients
from ._head import Head, Tokens
from ._options import Wants
from ._plan import Plan
from ._softmax import Found
from ._stream import room_for, stream


def by_chunks(head: Head, wants: Wants, plan: Plan, batch: Tokens) -> tuple[Found, Any, Any, Any]:
    """What the first pass finds, dx, dw and dbias. Arrays [chunks * tiles, T, ...]."""
    def chunk(logits: jax.Array, sums: Any, batch: Tokens) -> Any:
        found, logits = stream(head, plan.d_x_first, batch, logits)
        rest = wants._replace(d_x=wants.d_x and not plan.d_x_first)
        best = found.metrics["argmax"] if head.options.filter_eps is not None else None
        d_x, *sums = _gradients.gradients(head, rest, batch, found.nll, found.peak, found.log_mass, best, logits, sums)
        if wants.d_x:
            d_x = (found.d_x if plan.d_x_first else d_x).astype(head.options.d_x_dtype(batch.x))
        return logits, sums, (found._replace(d_x=None), d_x)

    if plan.chunks == 1:
        _, (d_w, d_bias), (found, d_x) = chunk(room_for(head, batch), None, batch)
        return found, d_x, d_w, d_bias

    def step(carry: Any, batch: Tokens) -> Any:
        logits, sums, out = chunk(*carry, batch)
        return (logits, tuple(sums)), out

    batches = jax.tree.map(lambda a: a.reshape(plan.chunks, -1, *a.shape[1:]), batch)
    sums = _gradients.sums_of_chunks(head, wants, plan.chunks)
    (_, sums), out = lax.scan(step, (room_for(head, batches), sums), batches)
    found, d_x = jax.tree.map(lambda a: lax.collapse(a, 0, 2), out)
    return found, d_x, *_gradients.of_sums(head, *sums)
