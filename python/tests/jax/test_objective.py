"""The objective beyond plain cross-entropy, its metrics and the filter in logits, for the kernels and the XLA lowering."""

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
N, V, D = 23, 61, 9
# f32 sums of at most N + V + D terms, each off by a few roundings; measured relative to the largest entry.
TOLERANCE = 4 * (N + V + D) * 2.0**-24


def dense(x, w, bias, labels, soft, weights, classes, *, scale, cap, smoothing, z_loss, shift):
    """Losses before the reduction and lse, out of the stored logits."""
    classes, labels = jnp.asarray(classes), jnp.asarray(labels)
    z = scale * x @ w.T + bias
    z = cap * jnp.tanh(z / cap) if cap else z
    lse = jax.nn.logsumexp(z, axis=1)
    inside = jnp.arange(len(x)) + shift < len(x)
    if soft is None:
        y = jnp.roll(labels, -shift)
        valid, y = inside & (y != -100), jnp.maximum(y, 0)
        loss = (1 - smoothing) * classes[y] * (lse - z[jnp.arange(len(x)), y])
        loss += smoothing / len(w) * (classes * (lse[:, None] - z)).sum(1)
    else:
        ids, q = (jnp.roll(a, -shift, 0) for a in soft)
        valid = inside
        loss = (jnp.where(ids < 0, 0, q) * (lse[:, None] - jnp.take_along_axis(z, jnp.maximum(ids, 0), 1))).sum(1)
    loss = weights * (loss + z_loss * lse**2)
    return jnp.where(valid, loss, 0), jnp.where(valid & (weights != 0), lse, 0)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("soft,cap,smoothing,reduction", [(False, None, 0.15, "sum"), (False, 3.0, 0.15, "none"),
                                                          (True, 3.0, 0.0, "sum")])
def test_options_together_give_another_gradient_than_dense(impl, soft, cap, smoothing, reduction):
    x, w, labels = problem(N, V, D)
    rng = np.random.default_rng(0)
    bias, cot, lse_cot = (rng.standard_normal(n).astype(F32) for n in (V, N, N))
    weights, classes = rng.random(N).astype(F32), np.ones(V, F32) if soft else rng.random(V).astype(F32)
    weights[4] = 0
    targets = None
    if soft:
        ids = rng.integers(0, V, (N, 3))
        ids[3, 1] = -100
        targets = (ids, rng.random((N, 3)).astype(F32) / 3)
    cot = cot if reduction == "none" else F32.type(1.7)

    def ours(x, w, bias):
        loss, found = linear_cross_entropy(
            x, w, None if soft else labels, bias=bias, soft_targets=targets, token_weights=weights,
            class_weights=None if soft else classes, label_smoothing=smoothing, z_loss=0.02, logit_scale=0.7,
            softcap=cap, shift=2, reduction=reduction, metrics="lse", _impl=impl)
        return (loss * cot).sum() + (found["lse"] * lse_cot).sum()

    def by_logits(x, w, bias):
        loss, lse = dense(x, w, bias, labels, targets, weights, classes, scale=0.7, cap=cap, smoothing=smoothing,
                          z_loss=0.02, shift=2)
        return (loss * cot).sum() + (lse * lse_cot).sum()

    for argnums in ((0,), (0, 1, 2)):
        value, got = jax.jit(jax.value_and_grad(ours, argnums))(x, w, bias)
        other, want = jax.jit(jax.value_and_grad(by_logits, argnums))(x, w, bias)
        np.testing.assert_allclose(value, other, rtol=TOLERANCE, atol=TOLERANCE)
        for a, b in zip(got, want):
            np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE * np.abs(b).max())


def test_masked_ids_make_nan(way):
    x, w = np.ones((2, 1), F32), np.zeros((4, 1), F32)
    f = jax.jit(jax.value_and_grad(lambda x, w, b, y: linear_cross_entropy(
        x, w, y, bias=b, reduction="sum", **way), (0, 1, 2)))
    bias = np.array([0, 0, -np.inf, -np.inf], F32)
    value, (d_x, d_w, d_b) = f(x, w, bias, np.array([0, 0]))
    assert value == pytest.approx(2 * 0.693147, rel=1e-6)
    assert not d_w[2:].any() and not d_b[2:].any() and np.isfinite(d_w).all() and np.isfinite(d_x).all()
    assert f(x, w, bias, np.array([2, 2]))[0] == np.inf
    value, gradients = f(x, w, np.full(4, -np.inf, F32), np.array([0, 0]))
    assert value == np.inf and not any(np.any(g) for g in gradients)


def test_metrics_differ_between_the_lowerings():
    x, w, labels = problem(N, V, D)
    names = ("lse", "nll", "entropy", "argmax", "correct", "rank", "top_k=5", "mean_logits", "valid_count")
    (_, a), (_, b) = (jax.jit(functools.partial(linear_cross_entropy, metrics=names, _impl=impl))(x, w, labels)
                      for impl in IMPLEMENTATIONS)
    z = x @ w.T
    valid = labels != -100
    np.testing.assert_array_equal(a["argmax"], np.where(valid, z.argmax(1), -1))
    np.testing.assert_array_equal(a["rank"][valid], (z > z[np.arange(N), np.maximum(labels, 0)][:, None]).sum(1)[valid])
    assert a["valid_count"] == valid.sum() and a.keys() == b.keys()
    for name in a:
        kind = np.testing.assert_array_equal if a[name].dtype != F32 else functools.partial(
            np.testing.assert_allclose, rtol=TOLERANCE, atol=8 * TOLERANCE)
        kind(a[name], b[name], err_msg=name)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_row_without_a_target_or_an_order_looks_like_one_of_id_0(impl, softcap):
    x, w, _ = problem(8, V, D, ignored=False)
    w[0] = 3 * x[2]  # id 0 is the best of the row that is all padding
    ids, q = np.arange(16).reshape(8, 2), np.full((8, 2), 0.5, F32)
    ids[2] = -100
    x[5, 0] = np.nan
    names = ("lse", "nll", "argmax", "correct", "rank", "top_k=3")

    def f(x, w):
        loss, found = linear_cross_entropy(x, w, soft_targets=(ids, q), softcap=softcap, z_loss=0.01, reduction="none",
                                           metrics=names, _impl=impl)
        return loss[np.delete(np.arange(8), 5)].sum(), found

    (loss, got), (d_x, d_w) = jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True))(x, w)
    want = cutloss.linear_cross_entropy(x, w, soft_targets=(ids, q), softcap=softcap, z_loss=0.01, reduction="sum",
                                        metrics=names[2:], token_weights=np.arange(8) != 5)
    assert got["nll"][2] == 0 and got["rank"][2] == -1 and not got["correct"][2] and got["argmax"][2] == 0
    assert np.isnan(got["lse"][5]) and not got["correct"][5]
    assert got["rank"][5] == got["argmax"][5] == -1 and (got["top_k_ids"][5] == -1).all()
    np.testing.assert_allclose(loss, want.loss, rtol=TOLERANCE)
    np.testing.assert_allclose(d_x[2], want.d_e[2], rtol=TOLERANCE, atol=TOLERANCE * np.abs(want.d_e).max())
    for name in ("argmax", "correct", "rank", "top_k_ids"):
        np.testing.assert_array_equal(np.delete(got[name], 5, 0), np.delete(want.metrics[name], 5, 0), err_msg=name)


@pytest.mark.parametrize("chunk,eps,mode", [(8, 1.0, "auto"), (16, 0.0, "auto"), (5, float("inf"), "auto"), (8, 1.0, "chunk")])
def test_filter_in_logits_drops_other_chunks(chunk, eps, mode):
    x, w, labels = problem(N, V, D, ignored=False)
    order = np.random.default_rng(1).permutation(V)
    f = functools.partial(linear_cross_entropy, chunk_size=chunk, filter_eps=eps, mode=mode)
    got = jax.jit(jax.grad(f, (0, 1)))(x, w, labels, vocab_sort_indices=order)
    z = x @ w[order].T
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    for first in range(0, V, chunk):
        part = slice(first, first + chunk)
        p[z[:, part].max(1) < z.max(1) - eps, part] = 0
    dz = np.zeros_like(p)
    dz[:, order] = p
    dz[np.arange(N), labels] -= 1
    for a, b in zip(got, (dz @ w / N, dz.T @ x / N)):
        np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE * np.abs(b).max())


@pytest.mark.parametrize("filter,options", [("certified", {"tolerance": 1e-3}), ("unbiased", {"epsilon": 1e-3, "seed": 3}),
                                            ("tile", {"epsilon": 1e-4})])
def test_report_of_a_filter_is_another_than_without_jax(filter, options):
    x, w, labels = problem(N, V, D)
    want = cutloss.linear_cross_entropy(x, w, labels, filter=filter, **options)

    def f(x, w):
        return linear_cross_entropy(x, w, labels, filter=filter, metrics="filter_report", **options)

    (value, found), gradients = jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True))(x, w)
    np.testing.assert_array_equal(value, want.loss)
    for a, b in zip(gradients, (want.d_e, want.d_c)):
        np.testing.assert_array_equal(a, b)
    report = found["filter_report"]
    assert set(report) == {name for name in dir(want.filter_report) if name[0] != "_"} and report["rows"] > 0
    for name, number in report.items():
        assert number == F32.type(getattr(want.filter_report, name)), name
    assert not any(jax.jit(f)(x, w)[1]["filter_report"].values())  # no gradient, nothing to filter
    with pytest.raises(ValueError, match="filter_report with reduction 'none'"):
        jax.vjp(lambda w: linear_cross_entropy(x, w, labels, filter=filter, metrics="filter_report", reduction="none",
                                               **options), w)
    with pytest.raises(ValueError, match="'filter_report' is what a filter did"):
        linear_cross_entropy(x, w, labels, metrics="filter_report")


@pytest.mark.parametrize("filter,options", [("certified", {"tolerance": 1e-3}), ("tile", {"epsilon": 1e-4})])
def test_filter_of_the_kernels_is_left_out_elsewhere(filter, options):
    x, w, labels = problem(N, V, D)
    f = functools.partial(linear_cross_entropy, filter=filter, _impl="xla", **options)
    np.testing.assert_allclose(f(x, w, labels), linear_cross_entropy(x, w, labels), rtol=1e-6)
    with pytest.raises(ValueError, match=f"filter '{filter}' runs in the C\\+\\+ kernels, on CPU only"):
        jax.grad(f)(x, w, labels)


def test_gradient_of_a_weight_is_silently_zero():
    x, w, labels = problem(N, V, D)
    for name, size in (("token_weights", N), ("class_weights", V)):
        with pytest.raises(TypeError, match=rf"{name} has no gradient.*stop_gradient"):
            jax.grad(lambda a: linear_cross_entropy(x, w, labels, **{name: a}))(np.ones(size, F32))
    with pytest.raises(TypeError, match="denominator has no gradient"):
        jax.grad(lambda a: linear_cross_entropy(x, w, labels, denominator=a))(F32.type(3))


@pytest.mark.parametrize("error,text,options", [
    (ValueError, "chunk_size must be positive, got 0", {"chunk_size": 0}),
    (ValueError, "shift is -1; it must be in", {"shift": -1}),
    (ValueError, "must be a permutation", {"vocab_sort_indices": np.zeros(V, int)}),
    (ValueError, "denominator is -1", {"denominator": -1.0}),
    (ValueError, 'only "mean" has one', {"denominator": 2.0, "reduction": "sum"}),
    (ValueError, "label_smoothing is 2", {"label_smoothing": 2.0}),
    (ValueError, r"bias \(3,\): one for each id", {"bias": np.zeros(3, F32)}),
    (ValueError, "two filters", {"filter": "certified", "epsilon": 1e-3, "filter_eps": 1.0}),
    (ValueError, "epsilon is given without a filter", {"epsilon": 1e-3}),
])
def test_bad_option_is_accepted(error, text, options):
    with pytest.raises(error, match=text):
        linear_cross_entropy(*problem(N, V, D), **options)
