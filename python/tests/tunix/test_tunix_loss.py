"""The loss and its gradients against Tunix's own default loss, on a tiny Gemma 3 in f32."""

import numpy as np
import pytest
import tiny_gemma3 as tiny

from cutloss.tunix import adapters, loss_fn
from cutloss.tunix.loss import as_scalar, as_tunix_loss, weighted_nll

UNIT = 2.0**-24
cut_loss_fn = loss_fn()


def dense_loss_fn():
    from tunix.sft import peft_trainer

    return peft_trainer._default_loss_fn


def assert_same_training_signal(model, data):
    dense_loss, dense_grads = tiny.value_and_lora_grads(dense_loss_fn(), model, data)
    loss, grads = tiny.value_and_lora_grads(cut_loss_fn, model, data)
    # A logit is a dot product of WIDTH terms of |h| = sqrt(WIDTH) and |c| about sqrt(WIDTH) (embeddings of deviation
    # 1): its error is of the order WIDTH^1.5 u. The sums over the vocabulary add sqrt(VOCAB) u. 8 for the two sides
    # and what they are summed into.
    error = 8 * (tiny.WIDTH**1.5 + tiny.VOCAB**0.5) * UNIT
    assert abs(loss - dense_loss) <= error * max(1.0, abs(dense_loss))
    assert grads.keys() == dense_grads.keys() and len(grads) > 0
    for name, dense in dense_grads.items():
        # dz = p - onehot, so an error in z is the same relative error in p. Two layers deep in f32 the backward pass
        # multiplies it by what it does to any perturbation: another factor of 8 on the norm, not on each element.
        assert np.linalg.norm(grads[name] - dense) <= 8 * error * np.linalg.norm(dense), name


def test_lora_gradients_equal_the_dense_ones():
    assert_same_training_signal(tiny.lora_model(), tiny.batch())


@pytest.mark.parametrize("remat", ["BLOCK", "DECODER"])
def test_tap_survives_rematerialisation(remat):
    assert_same_training_signal(tiny.lora_model(remat=remat), tiny.batch())


def test_fractional_weights_are_weights_not_booleans():
    mask = np.random.default_rng(3).choice([0.0, 0.25, 1.0, 2.5], (2, 12)).astype(np.float32)
    assert_same_training_signal(tiny.lora_model(), tiny.batch(mask=mask))


def test_weight_of_the_first_token_is_not_counted():
    """It is no target; counting it would change the denominator."""
    mask = np.zeros((2, 12), np.float32)
    mask[:, 0], mask[:, 5] = 7, 1
    assert_same_training_signal(tiny.lora_model(), tiny.batch(mask=mask))


def test_no_target_at_all_is_zero_not_nan():
    loss, grads = tiny.value_and_lora_grads(
        cut_loss_fn, tiny.lora_model(), tiny.batch(mask=np.zeros((2, 12), bool))
    )
    assert loss == 0.0
    assert all((grad == 0).all() for grad in grads.values())


def test_sequence_of_one_token_is_zero_not_an_error():
    loss, _ = tiny.value_and_lora_grads(cut_loss_fn, tiny.lora_model(), tiny.batch(length=1))
    assert loss == 0.0


def test_nan_at_a_masked_position_reaches_nothing():
    import jax
    import jax.numpy as jnp

    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((1, 6, 8)).astype(np.float32)
    mask = np.array([[1, 1, 0, 1, 1, 1]], np.float32)
    table = jnp.asarray(rng.standard_normal((50, 8)), jnp.float32)
    head = adapters.Head(layer=None, method="decode", weight=table, layout="vd")
    tokens = rng.integers(0, 50, (1, 6))

    def total(x):
        return weighted_nll(x, head, tokens, mask)[0]

    # Position t predicts token t + 1: position 1 predicts the masked token 2, the last position predicts nothing.
    poisoned = hidden.copy()
    poisoned[0, [1, 5]] = np.nan
    clean_loss, clean_grad = jax.value_and_grad(total)(hidden)
    loss, grad = jax.value_and_grad(total)(poisoned)
    assert loss == clean_loss
    np.testing.assert_array_equal(grad, clean_grad)
    assert (np.asarray(grad)[0, [1, 5]] == 0).all()


def test_target_of_a_position_is_the_next_token_of_its_own_row():
    """Shifted twice, or over the rows' border, a model that is right about the next token would seem to be wrong."""
    import jax.numpy as jnp

    tokens = np.array([[0, 1, 2, 3, 4, 5], [7, 8, 9, 0, 1, 2]])
    knows_the_next = 50 * np.eye(10, dtype=np.float32)[(tokens + 1) % 10]
    head = adapters.Head(layer=None, method="decode", weight=jnp.eye(10, dtype=jnp.float32), layout="vd")
    total, count = weighted_nll(knows_the_next, head, tokens, np.ones_like(tokens, bool))
    assert count == 10 and 0 <= total < 1e-6


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_unsigned_token_ids_have_no_ignored_label(dtype):
    """-100 of an unsigned type is an id beyond every vocabulary, whose loss is NaN. (Of uint8 Tunix's own targets wrap.)"""
    data = tiny.batch()
    data["input_tokens"] = data["input_tokens"].astype(dtype)
    assert_same_training_signal(tiny.lora_model(), data)


def test_denominator_has_the_epsilon_of_tunix():
    """Of weights as small as it, half the mean: without it the loss of a batch that hardly counts is another."""
    import jax.numpy as jnp

    tokens, mask = np.array([[1, 2, 0, 3]]), np.array([[0, 1e-8, 0, 0]], np.float32)
    rng = np.random.default_rng(0)
    hidden, table = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((1, 4, 8), (5, 8)))
    head = adapters.Head(layer=None, method="decode", weight=table, layout="vd")
    ours = as_scalar(as_tunix_loss(*weighted_nll(hidden, head, tokens, mask)))
    dense = dense_loss_fn()(lambda *_: (hidden @ table.T, None), tokens, mask, None, None)
    np.testing.assert_allclose(ours, as_scalar(dense), rtol=1e-6)
    whole = weighted_nll(hidden, head, tokens, mask > 0)[0]
    np.testing.assert_allclose(ours, whole / 2, rtol=1e-6)


def test_newer_tunix_gets_the_sum_and_the_denominator_apart(monkeypatch):
    """Its gradient accumulation divides sums by the sum of denominators; a mean would weigh microbatches wrongly."""
    import dataclasses

    from tunix.sft import utils

    metric = dataclasses.make_dataclass("WeightedMetric", ["unreduced_sum", "denominator", "eps"])
    output = dataclasses.make_dataclass("LossOutput", ["primary_loss", "aux_metrics"])
    model, data = tiny.model(), tiny.batch()
    mean = cut_loss_fn(model, **data)
    monkeypatch.setattr(utils, "WeightedMetric", metric, raising=False)
    monkeypatch.setattr(utils, "LossOutput", output, raising=False)
    loss = cut_loss_fn(model, **data).primary_loss
    assert loss.denominator == data["input_mask"][:, 1:].sum() and loss.eps == 1e-8
    np.testing.assert_allclose(loss.unreduced_sum / loss.denominator, mean, rtol=4 * UNIT)
