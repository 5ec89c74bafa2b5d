"""Where cutloss.jax differs from jax-cce 0.1.0, as its docstring says. (jax-cce's own tests are part of `make test-long`.)"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import F32, problem

from cutloss.jax import linear_cross_entropy

pytestmark = pytest.mark.usefixtures("quick_compiles")
X, W, Y = problem(7, 300, 5, ignored=False)


@pytest.mark.parametrize("text,options", [
    ("shift is -1; it must be in [0, 7], the length of a sequence", {"shift": -1}),  # shift must be non-negative, got -1
    ("shift is 8; it must be in [0, 7], the length of a sequence", {"shift": 8}),  # NaN
    ("chunk_size must be positive, got 0", {"chunk_size": 0}),  # the same
    ("filter_eps is nan", {"filter_eps": float("nan")}),  # no softmax at all in the gradient
    ("vocab_sort_indices[1] is 0, as [0] is: it must be a permutation", {"vocab_sort_indices": np.zeros(300, int)}),  # some loss
    ("labels[2] is -1, outside", {"labels": np.where(np.arange(7) == 2, -1, Y)}),  # the loss of the last id
])
def test_what_jax_cce_lets_pass_is_no_error_or_of_another_type(text, options):
    given = {"labels": Y} | options
    with pytest.raises(ValueError) as caught:
        linear_cross_entropy(X, W, **given)
    assert str(caught.value).startswith(text)


def test_a_dtype_is_cast_in_silence():
    """jax-cce casts to float32, and gives a float64 x a gradient that looks like float64."""
    for x in (np.ones((7, 5), int), np.ones((7, 5), bool)):
        with pytest.raises(TypeError, match="x: dtype .* is not taken.*cast with x.astype"):
            linear_cross_entropy(x, W, Y)
    with jax.enable_x64(True):
        wide = jnp.asarray(X, jnp.float64)
        for some in ((wide, W), (X, jnp.asarray(W, jnp.float64))):
            with pytest.raises(TypeError, match="float64 is not taken"):
                linear_cross_entropy(*some, Y)
        value, gradient = jax.value_and_grad(lambda x: linear_cross_entropy(x.astype(jnp.float32), W, Y))(wide)
        assert value.dtype == F32 and gradient.dtype == np.float64  # what the advice leads to
    # Without x64 JAX itself makes float32 of NumPy's float64.
    assert linear_cross_entropy(X.astype(np.float64), W.astype(np.float64), Y) == linear_cross_entropy(X, W, Y)


def test_a_mean_of_nothing_is_nan_or_ignored_rows_count():
    assert linear_cross_entropy(X[:0], W, Y[:0]) == 0
    assert linear_cross_entropy(X, W, Y, shift=7) == 0
    some = np.where(np.arange(7) < 3, -100, Y)
    np.testing.assert_allclose(linear_cross_entropy(X, W, some), linear_cross_entropy(X[3:], W, Y[3:]), rtol=1e-6)


@pytest.mark.long
def test_a_small_chunk_costs_a_pass_for_each_id():
    def program(**options):
        f = jax.grad(functools.partial(linear_cross_entropy, _impl="xla", **options), (0, 1))
        return jax.jit(f).lower(X, W, Y).as_text()

    assert program(chunk_size=1) == program(chunk_size=128) != program(chunk_size=256)
    assert program(chunk_size=1, filter_eps=1.0) != program(chunk_size=128, filter_eps=1.0)
