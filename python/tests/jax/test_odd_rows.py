"""Rows without any finite logit, with NaN, or left out, in both lowerings: values and gradients are those of the policies."""

import jax
import numpy as np
import pytest
from jax.experimental import checkify
from numpy.testing import assert_array_equal

import cutloss
from cutloss.jax import linear_cross_entropy

RNG = np.random.default_rng(0)
X = RNG.normal(size=(3, 2)).astype(np.float32)
W = RNG.normal(size=(5, 2)).astype(np.float32)
DEAD = np.full(5, -np.inf, np.float32)
BOTH = pytest.mark.parametrize("impl", ["xla", "cpu"])


def gradients(labels, impl, argnums=(0, 1), w=W, **options):
    def loss(x, w, labels):
        return linear_cross_entropy(x, w, labels, _impl=impl, **options).sum()

    return [np.asarray(g) for g in jax.jit(jax.grad(loss, argnums))(X, w, labels)]


@BOTH
def test_tokens_of_a_skipped_tile_get_id_0(impl):
    _, found = linear_cross_entropy(X, W, np.full(3, -100), metrics=("argmax", "correct", "top_k=2", "rank"), _impl=impl)
    assert_array_equal(found["argmax"], [-1] * 3)
    assert_array_equal(found["rank"], [-1] * 3)
    assert_array_equal(found["top_k_ids"], [[-1, -1]] * 3)
    assert not np.any(found["correct"])


@BOTH
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("argnums", [(0,), (0, 1)])
def test_soft_targets_of_a_row_without_logits_have_a_gradient(impl, reduction, argnums):
    soft = (np.array([[0, 1]] * 3), np.array([[0.6, 0.2]] * 3, np.float32))
    for gradient in gradients(None, impl, argnums, soft_targets=soft, bias=DEAD, reduction=reduction):
        assert_array_equal(gradient, 0)


@BOTH
def test_entropy_of_a_nan_row_is_0(impl):
    x = X.copy()
    x[0, 0] = np.nan
    entropy = linear_cross_entropy(x, W, np.array([1, 2, 3]), metrics="entropy", _impl=impl)[1]["entropy"]
    assert_array_equal(np.isnan(entropy), [True, False, False])


@BOTH
def test_a_row_without_logits_has_a_largest_one(impl):
    metrics = ("argmax", "correct", "top_k=2")
    found = linear_cross_entropy(X, W, np.array([0, 2, 3]), bias=DEAD, metrics=metrics, _impl=impl)[1]
    assert_array_equal(found["argmax"], -1)
    assert not np.any(found["correct"])
    assert_array_equal(found["top_k_logprobs"], -np.inf)


@BOTH
@pytest.mark.parametrize("argnums", [(0,), (0, 1)])
def test_a_bad_label_of_a_row_without_logits_is_silent(impl, argnums):
    found = gradients(np.array([5, 2, 3]), impl, argnums, bias=DEAD, reduction="none")
    assert_array_equal(np.isnan(found[0]), [[True, True], [False, False], [False, False]])
    for of_table in found[1:]:
        assert np.isnan(of_table).all()


@BOTH
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_an_ignored_row_gets_nan_from_the_table(impl, reduction):
    w = W.copy()
    w[4, 1] = np.nan
    d_x, _ = gradients(np.array([-100, 2, 3]), impl, w=w, reduction=reduction)
    assert_array_equal(d_x[0], 0)


@BOTH
def test_top_k_takes_minus_0_for_less(impl):
    found = linear_cross_entropy(X, W, np.array([1, 2, 3]), logit_scale=0.0, metrics="top_k=3", _impl=impl)[1]
    assert_array_equal(found["top_k_ids"], [[0, 1, 2]] * 3)


# ---- labels that are not looked at, or only seem to be bad ------------------------------------------------------------

SHIFTED = np.array([[9, 2, 3], [4, 8, -100]])  # of 9 ids; the first of each sequence labels nothing
TOKENS = RNG.normal(size=(2, 3, 2)).astype(np.float32)
TABLE = RNG.normal(size=(9, 2)).astype(np.float32)


@BOTH
def test_a_label_that_the_shift_leaves_out_is_refused(impl):
    expected = cutloss.linear_cross_entropy(TOKENS, TABLE, SHIFTED, shift=1, wrt=()).loss
    assert linear_cross_entropy(TOKENS, TABLE, SHIFTED, shift=1, _impl=impl) == pytest.approx(expected, rel=1e-6)

    def loss(labels):
        return linear_cross_entropy(TOKENS, TABLE, labels, shift=1, check_labels=True, _impl=impl)

    checked = jax.jit(checkify.checkify(loss))
    error, found = checked(SHIFTED)
    error.throw()
    assert found == pytest.approx(expected, rel=1e-6)
    with pytest.raises(ValueError, match=r"labels\[0, 1\] is 9"):
        checked(np.roll(SHIFTED, 1, axis=1))[0].throw()
    with pytest.raises(ValueError, match=r"labels\[0, 1\] is 9"):
        linear_cross_entropy(TOKENS, TABLE, np.roll(SHIFTED, 1, axis=1), shift=1, _impl=impl)


@BOTH
def test_unsigned_labels_at_the_largest_ignore_index_count(impl):
    labels = np.array([1, 2, 2**31 - 1], np.uint32)
    with_it = linear_cross_entropy(X, W, labels, ignore_index=2**31 - 1, _impl=impl)
    assert with_it == linear_cross_entropy(X, W, np.array([1, 2, -100]), _impl=impl)


def test_a_mask_of_labels_is_dropped():
    with pytest.raises(TypeError, match="labels: masked arrays are not taken"):
        linear_cross_entropy(X, W, np.ma.array([1, 2, 3], mask=[1, 0, 0]))
