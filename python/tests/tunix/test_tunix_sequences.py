"""Sequences that are cut, or packed into one row: the targets are the same ones, and so is the loss."""

import numpy as np
import pytest
import tiny

import cutloss.tunix as ct
from cutloss.tunix import adapters
from cutloss.tunix.loss import weighted_nll


def test_cut_sequence_keeps_the_target_at_the_cut():
    """8 ids have 7 targets; shifted within each half, they would have 6. Halves get labels shifted before the cut."""
    import jax.numpy as jnp

    from cutloss.jax import linear_cross_entropy

    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((1, 8, 16)).astype(np.float32)
    table = jnp.asarray(rng.standard_normal((50, 16)), jnp.float32)
    tokens = rng.integers(0, 50, (1, 8))
    head = adapters.Head(layer=None, method="decode", weight=table, layout="vd")
    total, count = weighted_nll(hidden, head, tokens, np.ones((1, 8), bool))
    shifted = np.append(tokens[:, 1:], [[-100]], axis=1)
    halves = [linear_cross_entropy(hidden[:, half], table, shifted[:, half], reduction="sum")
              for half in (slice(0, 4), slice(4, 8))]  # fmt: skip
    assert count == 7
    # Two sums of 4 instead of one of 8: at most 8 roundings of the total.
    assert float(sum(halves)) == pytest.approx(float(total), rel=8 * 2.0**-24)


def alone(tokens):
    length = len(tokens)
    return {
        "input_tokens": np.array([tokens], np.int32),
        "input_mask": np.ones((1, length), bool),
        "positions": np.arange(length, dtype=np.int32)[None],
        "attention_mask": np.tril(np.ones((length, length), bool))[None],
    }


def packed(documents):
    """One row of all documents: each sees itself only, counts its positions from 0, and its first token is no target."""
    which = np.repeat(np.arange(len(documents)), [len(d) for d in documents])
    positions = np.concatenate([np.arange(len(d)) for d in documents])
    batch = alone(np.concatenate(documents))
    batch["positions"] = positions[None].astype(np.int32)
    batch["attention_mask"] &= (which[:, None] == which[None, :])[None]
    batch["input_mask"] = (positions > 0)[None]
    return batch


@pytest.mark.parametrize("family", ["gemma3", pytest.param("qwen3-untied", marks=pytest.mark.long)])
def test_packed_documents_do_not_learn_each_others_beginnings(family):
    """Documents of 5, 3, none and 1 tokens have 4 + 2 + 0 + 0 targets, packed or not."""
    from flax import nnx

    rng = np.random.default_rng(1)
    documents = [rng.integers(0, tiny.VOCAB, n) for n in (5, 3, 0, 1)]
    together, batches = packed(documents), [alone(d) for d in documents if len(d)]
    assert together["input_mask"][:, 1:].sum() == 6
    loss_fn = ct.loss_fn(strict=True)
    losses = nnx.jit(lambda model, batches: [loss_fn(model, **b) for b in batches])(tiny.model(family), [together, *batches])
    apart = sum(b["input_mask"][:, 1:].sum() * float(loss) for b, loss in zip(batches, losses[1:], strict=True))
    assert float(losses[0]) == pytest.approx(apart / 6, rel=1e-5)
