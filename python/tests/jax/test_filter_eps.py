"""filter_eps, the gap in logits, over several vocabulary tiles and a ragged tail, with the options of the objective, and
the order of the vocabulary, for it and for the filters of the kernels."""

import functools

import jax
import numpy as np
import pytest
from oracle import BF16, F32, problem

import cutloss
from cutloss.jax import linear_cross_entropy

pytestmark = pytest.mark.usefixtures("quick_compiles")
N, V, D = 37, 107, 9  # with small_tiles: 3 tiles of tokens, and of ids 3 and a part
RNG = np.random.default_rng(3)
ORDER, BIAS = RNG.permutation(V), RNG.standard_normal(V).astype(F32)
WEIGHTS, CLASSES = RNG.random(N).astype(F32), RNG.random(V).astype(F32)
WEIGHTS[5] = 0
COTANGENTS = np.linspace(-2, 3, N).astype(F32)
ALL = {"bias": BIAS, "softcap": 3.0, "token_weights": WEIGHTS, "class_weights": CLASSES, "label_smoothing": 0.15,
       "shift": 2}


def dense(x, w, labels, order, chunk, gap, cotangent, *, bias=0, softcap=None, token_weights=1, class_weights=None,
          label_smoothing=0.0, shift=0, reduction="mean"):
    """dx, dw and dbias in float64, out of the stored logits: of each row's softmax only the chunks of the order that hold
    a logit no more than `gap` below the row's largest."""
    x, w, bias = (np.asarray(a, np.float64) for a in (x, w, bias))
    rows = np.arange(N)
    y = np.where(rows + shift < N, np.roll(labels, -shift), -100)
    valid, y = y != -100, np.maximum(y, 0)
    classes = np.ones(V) if class_weights is None else class_weights.astype(np.float64)
    z = x @ w.T + bias
    slope = 1.0
    if softcap:
        bent = np.tanh(z / softcap)
        z, slope = softcap * bent, 1 - bent**2
    top = z.max(1, keepdims=True)
    p = np.exp(z - top) / np.exp(z - top).sum(1, keepdims=True)
    dropped = 0
    for first in range(0, V, chunk):
        ids = order[first : first + chunk]
        below = top[:, 0] - gap - z[:, ids].max(1)
        assert np.abs(below[below != -gap]).min(initial=1) > 1e-5, "so close that float32 may decide otherwise"
        p[np.ix_(below > 0, ids)] = 0
        dropped += (below > 0).sum()
    assert 0 < dropped <= N * -(-V // chunk) - N or gap == np.inf, "nothing to test"
    target = (1 - label_smoothing) * np.eye(V)[y] * classes[y, None] + label_smoothing / V * classes
    g = np.asarray(cotangent, np.float64) * token_weights * valid
    if reduction == "mean":
        g = g / (token_weights * valid * classes[y]).sum()
    dz = (g[:, None] * (target.sum(1)[:, None] * p - target)) * slope
    return dz @ w, dz.T @ x, dz.sum(0)


def case(name, *values, long=True):
    return pytest.param(*values, id=name, marks=[pytest.mark.long] if long else [])


X_ALONE, ALL_THREE = (0,), (0, 1, 2)


@pytest.mark.parametrize("argnums,chunk,gap,order,dtype,options", [
    case("none", ALL_THREE, 5, 1.0, ORDER, F32, {**ALL, "reduction": "none"}),  # tiles of 30 ids
    case("x", X_ALONE, 8, 2.0, None, BF16, {"bias": BIAS, "softcap": 3.0}),
    case("x-none", X_ALONE, 5, 1.0, ORDER, F32, {**ALL, "reduction": "none"}, long=False),
    case("sum", ALL_THREE, 40, 0.0, ORDER, F32, {**ALL, "reduction": "sum"}),  # a chunk larger than a tile
    case("bias-softcap", ALL_THREE, 8, 1.5, ORDER, F32, {"bias": BIAS, "softcap": 3.0}),
    case("bf16", ALL_THREE, 8, 2.0, None, BF16, {"bias": BIAS, "shift": 1}),
    case("inf", ALL_THREE, 16, float("inf"), ORDER, F32, ALL),
])
def test_another_tile_or_option_drops_other_chunks(argnums, chunk, gap, order, dtype, options, small_tiles):
    x, w, labels = problem(N, V, D, e_dtype=dtype, c_dtype=dtype)
    by_token = options.get("reduction") == "none"
    cotangent = COTANGENTS if by_token else F32.type(1.7)
    static = {name: value for name, value in options.items() if name != "bias"}

    def f(x, w, bias):
        loss = linear_cross_entropy(x, w, labels, bias=bias, chunk_size=chunk, filter_eps=gap, vocab_sort_indices=order,
                                    **static)
        return (loss * cotangent).sum()

    want = dense(x, w, labels, np.arange(V) if order is None else order, chunk, gap, cotangent, **options)
    for i, gradient in zip(argnums, jax.jit(jax.grad(f, argnums))(x, w, options["bias"])):
        # Sums of at most N + V + D terms; a bf16 gradient is rounded, and once more when 1.7 has multiplied it.
        narrow = 2 * 2.0**-8 * np.abs(want[i]) if gradient.dtype == BF16 else 0
        off = np.abs(np.asarray(gradient, np.float64) - want[i])
        assert (off <= 4 * (N + V + D) * 2.0**-24 * np.abs(want[i]).max() + narrow).all(), (i, off.max())


@pytest.mark.parametrize("filter,options", [("certified", {"tolerance": 1e-2}), ("tile", {"epsilon": 1e-3}),
                                            ("unbiased", {"epsilon": 1e-3, "seed": 3})])
def test_order_of_the_kernels_filters_is_lost(filter, options):
    x, w, labels = problem(33, 3000, 9)
    w[1500:] /= 8  # tiles of ids differ
    order = np.random.default_rng(4).permutation(3000)
    plain, want = (cutloss.linear_cross_entropy(x, w, labels, filter=filter, vocab_order=some, **options)
                   for some in (None, order))
    assert np.any(plain.d_e != want.d_e) and np.any(plain.d_c != want.d_c)
    f = functools.partial(linear_cross_entropy, filter=filter, vocab_sort_indices=order, **options)
    for g in (f, jax.jit(f)):
        value, gradients = jax.value_and_grad(g, (0, 1))(x, w, labels)
        np.testing.assert_array_equal(value, want.loss)
        for a, b in zip(gradients, (want.d_e, want.d_c)):
            np.testing.assert_array_equal(a, b)
