"""Vocabularies of real models at their full size, with real tiles: ragged last tiles, one of a single id."""

import jax
import numpy as np
import pytest
from oracle import F32, dense, problem

from cutloss.jax import linear_cross_entropy

N, D = 40, 8


@pytest.mark.parametrize("vocab", [262145, *(pytest.param(v, marks=pytest.mark.long) for v in (50257, 151936, 128256))])
@pytest.mark.parametrize("impl", ["cpu", "xla"])
def test_last_ids_are_lost(impl, vocab):
    x, w, labels = problem(N, vocab, D, ignored=False)
    labels[:6] = 0, vocab - 1, 4095, 4096, vocab - 2, vocab - vocab % 4096
    labels[7] = -100
    w[-1] *= 3  # what the last id adds is seen
    want = dense(x, w, labels)
    # Roundings of at most 4096 terms in a tile, one for each of at most 65 tiles and D of a logit, at random: sqrt of their
    # number times half a unit in the last place, eightfold.
    tolerance = 8 * np.sqrt(4096 + 65 + D) * 2.0**-24
    for argnums in ((0,), (0, 1)):
        value, gradients = jax.jit(jax.value_and_grad(linear_cross_entropy, argnums), static_argnames="_impl")(
            x, w, labels, _impl=impl)
        np.testing.assert_allclose(value, want.loss, rtol=1e-6)
        for got, wanted in zip(gradients, (want.d_e, want.d_c)):
            assert got.dtype == F32 and np.linalg.norm(got - wanted) <= tolerance * np.linalg.norm(wanted)
            assert np.linalg.norm(got[-1] - wanted[-1]) <= tolerance * (np.linalg.norm(wanted[-1]) + 1e-3)
