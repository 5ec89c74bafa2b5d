"""Edge inputs and refusals of cutloss.jax: the same rules as for NumPy, and what jit makes of bad labels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import F32, problem

import cutloss
from cutloss.jax import linear_cross_entropy

pytestmark = pytest.mark.usefixtures("quick_compiles")
IMPLEMENTATIONS = ["cpu", "xla"]
X, W, Y = problem(7, 11, 5, ignored=False)


@pytest.mark.parametrize("impl,reduction", [("cpu", "mean"), ("cpu", "sum"), ("cpu", "none"), ("xla", "mean")])
def test_no_valid_token_gives_nan(impl, reduction):
    def f(x, w, y):
        return linear_cross_entropy(x, w, y, reduction=reduction, _impl=impl).sum()

    for x, y in ((X, np.full(7, -100)), (X[:0], Y[:0]), (np.full_like(X, np.nan), np.full(7, -100))):
        for argnums in ((0,), (0, 1)):
            value, gradients = jax.jit(jax.value_and_grad(f, argnums))(x, W, y)
            assert value == 0 and all(g.shape == a.shape and not g.any() for g, a in zip(gradients, (x, W)))


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_nan_in_an_ignored_row_spreads(impl, poison, reduction):
    labels = Y.copy()
    labels[2] = -100
    bad = X.copy()
    bad[2] = poison
    cotangent = np.ones(7, F32)
    if reduction == "none":
        cotangent[2] = poison

    def gradients(x, argnums):
        def f(*a):
            return linear_cross_entropy(*a, *(x, W)[len(a):], labels, reduction=reduction, _impl=impl)

        value, pull = jax.vjp(f, *(x, W)[:argnums])
        return value, pull(cotangent if reduction == "none" else np.float32(1))

    for argnums in (1, 2):
        value, got = gradients(bad, argnums)
        jax.tree.map(np.testing.assert_array_equal, got, gradients(np.where(np.isfinite(bad), bad, 0), argnums)[1])
        assert np.all(np.isfinite(value)) and not np.any(got[0][2])
    labels[2] = 1
    assert np.isnan(gradients(bad, 1)[0]).any()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_an_infinite_label_logit_looks_like_certainty(impl):
    x, w = np.array([[np.inf]], F32), np.array([[1], [-1]], F32)
    assert not np.isfinite(linear_cross_entropy(x, w, np.array([0]), _impl=impl))
    assert not np.isfinite(jax.grad(linear_cross_entropy)(x, w, np.array([0]), _impl=impl)).any()


@pytest.mark.parametrize("bad", [11, 12, 63, 10**6, -1, -99])
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_label_out_of_range_gives_a_finite_loss(impl, bad):
    labels = Y.astype(np.int32)
    labels[3] = bad
    f = jax.jit(functools.partial(linear_cross_entropy, reduction="none", _impl=impl))
    value = f(X, W, labels)
    assert np.isnan(value[3]) and np.isfinite(np.delete(value, 3)).all()
    gradient = jax.jit(jax.grad(functools.partial(linear_cross_entropy, reduction="sum", _impl=impl)))(X, W, labels)
    assert np.isnan(gradient[3]).all() and np.isfinite(np.delete(gradient, 3, 0)).all()
    d_w = jax.jit(jax.grad(functools.partial(linear_cross_entropy, _impl=impl), 1))(X, W, labels)
    assert np.isnan(d_w).any()
    with pytest.raises(ValueError, match=rf"labels\[3\] is {bad}.*11"):
        linear_cross_entropy(X, W, labels, _impl=impl)


def test_bad_label_or_ignored_nan_spreads_from_a_chunk(small_tiles):
    """Of rows 2 and 3 one is ignored, and one makes NaN for the table's gradient; the others of x stay."""
    labels, bad = np.resize(Y, 40), np.resize(X, (40, 5))
    labels[2], bad[2] = -100, np.nan
    f = jax.jit(jax.grad(functools.partial(linear_cross_entropy, reduction="sum", mode="chunk", _impl="xla"), (0, 1)))
    d_x, d_w = f(bad, W, labels)
    assert np.isfinite(d_x).all() and np.isfinite(d_w).all() and not d_x[2].any()
    labels[3] = 11
    d_x, d_w = f(bad, W, labels)
    assert np.isnan(d_x[3]).all() and np.isfinite(np.delete(d_x, 3, 0)).all() and np.isnan(d_w).any()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_bad_label_has_the_weight_of_class_0(impl):
    good = np.where(Y == 0, 1, Y).astype(np.int32)
    bad = good.copy()
    bad[3] = 11
    weights = np.ones(11, F32)
    weights[0] = 0
    gradient = jax.jit(jax.grad(functools.partial(linear_cross_entropy, class_weights=weights, _impl=impl)))
    got, want = gradient(X, W, bad), gradient(X, W, good)  # in a mean over the same sum of weights
    assert np.isnan(got[3]).all()
    np.testing.assert_array_equal(np.delete(got, 3, 0), np.delete(want, 3, 0))


def test_wide_label_is_cut_to_a_valid_one():
    labels = Y.astype(np.int64)
    labels[3] = 2**32 + 5
    with pytest.raises(ValueError, match=rf"labels\[3\] is {2**32 + 5}"):
        linear_cross_entropy(X, W, labels)


@pytest.mark.parametrize("ignored", [4, -1, 255])
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_ignore_index_is_not_used(impl, ignored):
    labels = np.where(Y == Y[1], ignored, Y).astype(np.uint8 if ignored == 255 else np.int32)
    got = linear_cross_entropy(X, W, labels, ignore_index=ignored, _impl=impl)
    keep = labels != ignored
    np.testing.assert_allclose(got, linear_cross_entropy(X[keep], W, labels[keep], ignore_index=ignored), rtol=1e-6)


@pytest.mark.parametrize("error,text,arguments,options", [
    (ValueError, r"labels \(6,\) and x \(7, 5\)", (X, W, Y[:6]), {}),
    (ValueError, r"labels \(7, 1\) and x \(7, 5\)", (X, W, Y[:, None]), {}),
    (ValueError, r"x \(7, 5\) and w \(11, 4\)", (X, W[:, :4], Y), {}),
    (ValueError, r"head_layout='dv'\?", (X, W.T, Y), {}),
    (ValueError, r"gathered", (X, W[:0], Y), {}),
    (TypeError, r"w: dtype complex64", (X, W.astype(np.complex64), Y), {}),
    (TypeError, r"labels: dtype float32.*integer", (X, W, Y.astype(F32)), {}),
    (TypeError, r"labels: dtype bool.*integer", (X, W, Y > 3), {}),
    (ValueError, r"softcap", (X, W, Y), {"softcap": 0.0}),
    (ValueError, r"softcap", (X, W, Y), {"softcap": float("inf")}),
    (ValueError, r"ignore_index 1099511627776 does not fit int32", (X, W, Y.astype("int32")), {"ignore_index": 2**40}),
    (ValueError, r"reduction", (X, W, Y), {"reduction": "avg"}),
    (ValueError, r"mode", (X, W, Y), {"mode": "dense"}),
    (cutloss.BudgetError, r"\d", (X, W, Y), {"budget": 1}),
])
def test_bad_input_is_accepted(error, text, arguments, options):
    for f in (linear_cross_entropy, jax.jit(functools.partial(linear_cross_entropy, **options))):
        with pytest.raises(error, match=text):
            f(*arguments, **(options if f is linear_cross_entropy else {}))


def test_float64_is_narrowed_in_silence():
    with jax.enable_x64(True), pytest.raises(TypeError, match="float64 is not taken"):
        linear_cross_entropy(jnp.asarray(X, jnp.float64), W, Y)


def test_traced_softcap_gives_an_obscure_error():
    with pytest.raises(TypeError, match="softcap"):
        jax.jit(lambda cap: linear_cross_entropy(X, W, Y, softcap=cap))(2.0)


@pytest.mark.parametrize("mode,argnums", [("loss", 0), ("stream", 1)])
def test_mode_that_gives_no_gradient_is_ignored(mode, argnums):
    assert np.isfinite(linear_cross_entropy(X, W, Y, mode=mode))
    for reduction in ("mean", "none"):
        with pytest.raises(ValueError, match=mode):
            jax.grad(lambda *a: linear_cross_entropy(*a, Y, mode=mode, reduction=reduction).sum(), argnums)(X, W)
