"""The scheme the published study used, as a baseline: chunks of tokens x ids, everything recomputed for the gradient.

Written from its description, to be compared with; not tuned, and not for training. For each chunk of tokens a loop over
the ids' chunks keeps a running logsumexp; the gradient does that again, then forms each chunk of logits once more and
multiplies it with the table: four products where two are enough. The table is cast to f32, turned and padded as a whole.
Nothing is said about meshes: XLA's partitioner decides.
"""

from __future__ import annotations

import functools
from typing import Any


def loss_fn(tiles: tuple[int, int]) -> Any:
    """Returns the loss for `PeftTrainer.with_loss_fn`, of a frozen head."""

    def recomputed_loss_fn(model, input_tokens, input_mask, positions, attention_mask, images=None):
        import jax.numpy as jnp

        from cutloss.tunix import loss

        hidden, _ = loss.tapped_call(model, (input_tokens, positions, None, attention_mask), {})
        head = loss.adapters.read_head(model)
        labels, weights = loss.targets(input_tokens, input_mask)
        table = head.weight if head.layout == "vd" else head.weight.T
        flat = hidden.reshape(-1, hidden.shape[-1])
        nll = _nll(flat, table, labels.reshape(-1), head.softcap, *tiles).reshape(labels.shape)[:, :-1]
        return loss.as_tunix_loss(jnp.sum(weights * nll), jnp.sum(weights))

    return recomputed_loss_fn


def _nll(hidden: Any, table: Any, labels: Any, softcap: float | None, token_chunk: int, vocab_chunk: int) -> Any:
    """nll of each token, [N] f32; 0 where the label is negative. Differentiable in hidden alone."""
    import jax

    @functools.partial(jax.custom_vjp)
    def nll(hidden, table, labels):
        return _forward(hidden, table, labels, softcap, token_chunk, vocab_chunk)

    def forward(hidden, table, labels):
        return nll(hidden, table, labels), (hidden, table, labels)

    def backward(saved, g):
        return _backward(*saved, g, softcap, token_chunk, vocab_chunk), None, None

    nll.defvjp(forward, backward)
    return nll(hidden, table, labels)


def _chunked(hidden, table, token_chunk, vocab_chunk):
    """([chunks, token_chunk, D] hidden, [D, padded V] f32 table, V)."""
    import jax.numpy as jnp

    tokens, vocab = hidden.shape[0], table.shape[0]
    rows = jnp.pad(hidden, ((0, -tokens % token_chunk), (0, 0))).astype(jnp.float32)
    turned = jnp.pad(table.T.astype(jnp.float32), ((0, 0), (0, -vocab % vocab_chunk)))
    return rows.reshape(-1, token_chunk, hidden.shape[1]), turned, vocab


def _logits(x, turned, at, vocab_chunk, vocab, softcap):
    """(logits of one chunk, their derivative by the uncapped ones); -inf beyond the vocabulary."""
    import jax
    import jax.numpy as jnp

    part = jax.lax.dynamic_slice_in_dim(turned, at * vocab_chunk, vocab_chunk, axis=1)
    z = x @ part
    slope = jnp.ones_like(z)
    if softcap is not None:
        bent = jnp.tanh(z / softcap)
        z, slope = softcap * bent, 1 - bent * bent
    ids = at * vocab_chunk + jnp.arange(vocab_chunk)
    return jnp.where(ids < vocab, z, -jnp.inf), slope, part, ids


def _lse(x, turned, vocab_chunk, vocab, softcap):
    import jax
    import jax.numpy as jnp

    def step(at, carry):
        top, total = carry
        z, *_ = _logits(x, turned, at, vocab_chunk, vocab, softcap)
        new = jnp.maximum(top, z.max(axis=1))
        return new, total * jnp.exp(top - new) + jnp.exp(z - new[:, None]).sum(axis=1)

    start = jnp.full(x.shape[0], -1e30, jnp.float32), jnp.zeros(x.shape[0], jnp.float32)
    top, total = jax.lax.fori_loop(0, turned.shape[1] // vocab_chunk, step, start)
    return top + jnp.log(total)


def _forward(hidden, table, labels, softcap, token_chunk, vocab_chunk):
    import jax
    import jax.numpy as jnp

    rows, turned, vocab = _chunked(hidden, table, token_chunk, vocab_chunk)
    lse = jax.lax.map(lambda x: _lse(x, turned, vocab_chunk, vocab, softcap), rows).reshape(-1)[: len(labels)]
    chosen = table[jnp.maximum(labels, 0)].astype(jnp.float32)
    z = jnp.sum(hidden.astype(jnp.float32) * chosen, axis=1)
    z = z if softcap is None else softcap * jnp.tanh(z / softcap)
    return jnp.where(labels >= 0, lse - z, 0)


def _backward(hidden, table, labels, g, softcap, token_chunk, vocab_chunk):
    import jax
    import jax.numpy as jnp

    rows, turned, vocab = _chunked(hidden, table, token_chunk, vocab_chunk)
    short = -len(labels) % token_chunk
    g = jnp.pad(jnp.where(labels >= 0, g, 0), (0, short)).reshape(-1, token_chunk)
    targets = jnp.pad(labels, (0, short), constant_values=-1).reshape(-1, token_chunk)

    def one(chunk):
        x, g, target = chunk
        lse = _lse(x, turned, vocab_chunk, vocab, softcap)

        def step(at, dx):
            z, slope, part, ids = _logits(x, turned, at, vocab_chunk, vocab, softcap)
            dz = (jnp.exp(z - lse[:, None]) - (ids == target[:, None])) * slope * g[:, None]
            return dx + dz @ part.T

        return jax.lax.fori_loop(0, turned.shape[1] // vocab_chunk, step, jnp.zeros_like(x))

    dx = jax.lax.map(one, (rows, g, targets)).reshape(-1, hidden.shape[1])
    return dx[: len(labels)].astype(hidden.dtype)
