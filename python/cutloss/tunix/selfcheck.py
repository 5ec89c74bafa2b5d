"""Compares the model's own dense loss with ours on a few tokens, once, before training starts.

An adapter that forgets a softcap or a scale gives a plausible loss and wrong gradients for a whole run. Eight tokens
of dense logits cost V * 32 bytes in f32 (8 MiB for Gemma 3) and tell. The check runs as a program of its own: nothing
of it is in the compiled train step.
"""

from __future__ import annotations

import math

from . import adapters
from .loss import as_scalar, cut_loss_fn, one_call
from .tap import tap

TOKENS = 8


class SelfCheckError(RuntimeError):
    """The loss cutloss computes is not the model's own; the message has both numbers and the tolerance."""


def check(model, reference_loss) -> None:
    """Raises SelfCheckError unless cut_loss_fn and `reference_loss` agree on `model`, UnsupportedModelError if it must.

    Args:
        model: a model with concrete weights.
        reference_loss: Tunix's default loss function.
    """
    import jax
    from flax import nnx

    adapter = adapters.find(model)
    head = adapters.read_head(model, adapter)
    vocab, width = head.weight.shape if head.layout == "vd" else head.weight.shape[::-1]
    graph, state = nnx.split(model)
    batch = _batch(vocab)

    def losses(state):
        return _losses(nnx.merge(graph, state), adapter, reference_loss, batch)

    result = {name: float(value) for name, value in jax.jit(losses)(state).items()}
    logits_dtype = result_dtype(head)
    allowed = tolerance(width, vocab, logits_dtype, result["hidden_norm"], result["row_norm"], result["largest_logit"])
    dense, ours = result["dense"], result["ours"]
    if not abs(dense - ours) <= allowed:  # also true for NaN
        raise SelfCheckError(
            f"on {TOKENS} tokens {type(model).__name__}'s own loss is {dense:.6f}, cutloss gives {ours:.6f}; they may "
            f"differ by {allowed:.1e}. The adapter for this model is wrong (softcap, scale, head?) or its weights are "
            "not finite. Train with Tunix's own loss: call cutloss.tunix.uninstall() before building the trainer."
        )


def result_dtype(head: adapters.Head):
    """Returns the dtype the model's dense logits have."""
    return head.compute_dtype if head.compute_dtype is not None else head.weight.dtype


def tolerance(width: int, vocab: int, logits_dtype, hidden_norm: float, row_norm: float, largest_logit: float) -> float:
    """Returns by how much two right losses of the same hidden states may differ.

    - A logit is a dot product of `width` terms: its rounding error is within 4 sqrt(D) u |h| |c| but for one case in
      thousands (Higham and Mary's probabilistic bound; u = 2^-24). Both losses have it, in the label's logit and in
      the log-sum-exp: four times.
    - The sum of V positive terms, at least 8 of them side by side in SIMD lanes, is off by at most V u / 8 relative,
      which is absolute after the log: two times.
    - A dense path in bf16 or f16 rounds each logit once more, by u16 |z|: in the label's logit and in the log-sum-exp.
    - The loss itself, at most 2 |z| + log V, is rounded a few times.
    """
    import jax.numpy as jnp

    unit = 2.0**-24
    products = 4 * 4 * math.sqrt(width) * unit * hidden_norm * row_norm
    sums = 2 * vocab * unit / 8
    narrow = float(jnp.finfo(logits_dtype).eps) / 2 if jnp.finfo(logits_dtype).bits < 32 else 0.0
    scale = 2 * largest_logit + math.log(vocab)
    return products + sums + 2 * narrow * largest_logit + 8 * unit * scale


def _losses(model, adapter, reference_loss, batch):
    import jax.numpy as jnp

    ours = as_scalar(cut_loss_fn(model, **batch))
    with tap(*adapter.entry(model)) as record:
        logits, cache = model(batch["input_tokens"], batch["positions"], None, batch["attention_mask"])
        hidden, _ = one_call(record, model, adapter)
    # Tunix's loss takes log_softmax in the dtype of the logits: 1 % off in bf16, too coarse to check anything against.
    # Given f32 copies of the same logits it is exact to f32, and only their own rounding is left.
    logits = logits.astype(jnp.float32)
    dense = as_scalar(reference_loss(lambda *args, **kwargs: (logits, cache), **batch))
    head = adapters.read_head(model, adapter)
    over_width = 1 if head.layout == "vd" else 0
    return {
        "ours": ours,
        "dense": dense,
        "hidden_norm": jnp.max(jnp.linalg.norm(hidden.astype(jnp.float32), axis=-1)),
        "row_norm": jnp.max(jnp.linalg.norm(head.weight.astype(jnp.float32), axis=over_width)),
        "largest_logit": jnp.max(jnp.abs(logits)),
    }


def _batch(vocab: int) -> dict:
    """A batch of TOKENS ids spread over the vocabulary, one row for each device of the current mesh.

    Tunix shards activations over the mesh's first axes; a batch of one row cannot be split over several devices.
    """
    import numpy as np
    from jax.interpreters import pxla

    rows = max(1, pxla.thread_resources.env.physical_mesh.size)
    tokens = (np.arange(TOKENS) * (vocab // TOKENS) + vocab // (2 * TOKENS)) % vocab
    causal = np.tril(np.ones((TOKENS, TOKENS), bool))
    return {
        "input_tokens": np.tile(tokens.astype(np.int32), (rows, 1)),
        "input_mask": np.ones((rows, TOKENS), np.float32),
        "positions": np.tile(np.arange(TOKENS, dtype=np.int32), (rows, 1)),
        "attention_mask": np.tile(causal, (rows, 1, 1)),
    }
