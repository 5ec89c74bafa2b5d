"""Loss and gradients of cutloss.jax against the dense float64 oracle, for the C++ kernels and the XLA lowering."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import BF16, F32, close, dense, lattice, problem

from cutloss.jax import linear_cross_entropy

pytestmark = pytest.mark.usefixtures("quick_compiles")
IMPLEMENTATIONS = ["cpu", "xla"]


def check(x, w, labels, way, argnums=(0, 1), cotangent=1.0, **options):
    """Values, gradients and dtypes, through jit and jax.vjp."""
    @jax.jit
    def run(x, w, labels, cotangent):
        def loss(*some):
            both = [x, w]
            for i, value in zip(argnums, some):
                both[i] = value
            return linear_cross_entropy(*both, labels, **way, **options)

        value, pull = jax.vjp(loss, *((x, w)[i] for i in argnums))
        return value, pull(jnp.broadcast_to(cotangent, value.shape))

    value, gradients = run(x, w, labels, np.asarray(cotangent, F32))
    want = dense(x, w, labels, cotangent=cotangent, roundings=2, **options)  # formed, and scaled by the cotangent
    assert value.dtype == jnp.float32
    close("loss", value, want.loss, want.tol_loss)
    for i, gradient in zip(argnums, gradients):
        name = ("d_e", "d_c")[i]
        assert gradient.dtype == (x, w)[i].dtype
        close(name, gradient, getattr(want, name), getattr(want, "tol_" + name))


TAILS = [(1, 1, 1), (16, 32, 16), (17, 31, 5), (33, 97, 33)]


@pytest.mark.parametrize("way,shape,argnums", [
    *((way, shape, argnums) for way in ("cpu", "xla") for shape in TAILS for argnums in ((0,), (1,), (0, 1))),
    ("chunk", (33, 97, 33), (1,)), ("chunk", (33, 97, 33), (0, 1)), ("chunk", (17, 31, 5), (0, 1))], indirect=["way"])
def test_tail_of_a_tile_is_dropped_or_shifted(way, shape, argnums, small_tiles):
    check(*problem(*shape), way, argnums)


def test_tail_of_a_tile_is_dropped_by_the_kernels():
    for n, v, d in ((5, 33, 17), (31, 257, 9), (95, 129, 97), (257, 96, 33), (96, 15, 129)):
        check(*problem(n, v, d), {"_impl": "cpu"})


MIXES = [("mean", (BF16, F32)), ("sum", (F32, F32)), ("none", (BF16, BF16)), ("none", (F32, BF16))]


@pytest.mark.parametrize("way,reduction,dtypes", [
    *((way, *mix) for way in ("cpu", "xla") for mix in MIXES), ("chunk", "mean", (BF16, F32)), ("chunk", "sum", (F32, BF16))],
    indirect=["way"], ids=lambda v: f"{v[0]}-{v[1]}" if isinstance(v, tuple) else v)
def test_reduction_dtype_or_layout_is_mixed_up(way, dtypes, reduction, small_tiles):
    x, w, labels = problem(37, 75, 19, e_dtype=dtypes[0], c_dtype=dtypes[1], head_layout="dv")
    cotangent = np.linspace(-2, 3, 37).astype(F32) if reduction == "none" else 2.5
    for argnums in ((0, 1),) if "mode" in way else ((0,), (0, 1)):
        check(x, w, labels, way, argnums, cotangent, reduction=reduction, softcap=2.0, head_layout="dv")


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_fixed_values(impl):
    x, w, labels = lattice(7, 11, 5)
    masked = np.array([5, 4, -100, 2, 1, -100, 10])
    f = jax.jit(jax.value_and_grad(linear_cross_entropy, (0, 1)), static_argnames=("softcap", "_impl"))
    for y, cap, loss, sum_d_x, sum_d_w in ((labels, None, 3.77654999, 2.08603829, 8.70248578),
                                           (masked, None, 3.72740049, 2.10268485, 10.01176701),
                                           (masked, 2.0, 2.99038656, 1.38972126, 5.94975858)):
        value, gradients = f(x, w, y, softcap=cap, _impl=impl)
        assert value == pytest.approx(loss, rel=1e-6)
        assert np.abs(gradients[0]).sum() == pytest.approx(sum_d_x, rel=1e-5)
        assert np.abs(gradients[1]).sum() == pytest.approx(sum_d_w, rel=1e-5)


@pytest.mark.parametrize("way,argnums", [("cpu", (0,)), ("cpu", (0, 1)), ("xla", (0,)), ("xla", (0, 1)), ("chunk", (0, 1))],
                         indirect=["way"])
def test_confident_row_loses_its_gradient(way, argnums):
    for gap in (10.0, 16.0, 30.0, 80.0):
        x, w = np.array([[gap]], F32), np.zeros((10, 1), F32)
        w[3] = 1
        value, gradients = jax.value_and_grad(linear_cross_entropy, argnums)(x, w, np.array([3]), **way)
        rest = 9 * np.exp(-gap)
        np.testing.assert_allclose(value, np.log1p(rest), rtol=4e-6)
        np.testing.assert_allclose(gradients[0][0, 0], -rest / (1 + rest), rtol=4e-6)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_label_far_below_the_others_overflows(impl):
    x, w = np.array([[200.0]], F32), np.array([[1.0], [-1.0]], F32)
    value, (d_x, d_w) = jax.value_and_grad(linear_cross_entropy, (0, 1))(x, w, np.array([1]), _impl=impl)
    assert value == 400 and d_x[0, 0] == 2
    np.testing.assert_array_equal(d_w[:, 0], [200, -200])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("argnums", [(0,), (0, 1)], ids=["x", "xw"])
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_second_backward_pass_is_scaled_twice(impl, argnums, reduction):
    x, w, labels = problem(9, 21, 5)

    def loss(*some):
        return linear_cross_entropy(*some, *(x, w)[len(some):], labels, reduction=reduction, _impl=impl)

    value, pull = jax.vjp(loss, *(x, w)[: len(argnums)])
    first = pull(jnp.ones_like(value))
    kept = [np.array(g) for g in first]
    for a, b in zip(pull(3 * jnp.ones_like(value)), kept):
        np.testing.assert_allclose(a, 3 * b, rtol=0, atol=1e-6 * np.abs(b).max())
    for a, b in zip(first, kept):
        np.testing.assert_array_equal(a, b)


def test_adapters_on_a_frozen_head_get_another_gradient_than_dense():
    """A low-rank adapter below the head: its gradient through cutloss is the one through dense logits."""
    x, w, labels = problem(29, 61, 8, ignored=False)
    rng = np.random.default_rng(1)
    adapters = {"a": rng.standard_normal((8, 2)).astype(F32), "b": rng.standard_normal((2, 8)).astype(F32)}

    def adapted(p):
        return x + x @ p["a"] @ p["b"]

    def by_logits(p):
        return -jax.nn.log_softmax(adapted(p) @ w.T)[np.arange(29), labels].mean()

    want = jax.grad(by_logits)(adapters)
    for impl in IMPLEMENTATIONS:
        got = jax.grad(lambda p: linear_cross_entropy(adapted(p), w, labels, _impl=impl))(adapters)
        for name in adapters:
            np.testing.assert_allclose(got[name], want[name], rtol=0, atol=2e-5 * np.abs(want[name]).max())


@pytest.mark.parametrize("way,reduction", [("cpu", "mean"), ("cpu", "none"), ("xla", "mean"), ("xla", "none"),
                                           ("chunk", "mean")], indirect=["way"])
def test_an_lse_rounded_to_f32_blurs_the_softmax_of_large_logits(way, reduction):
    """All logits near 2^20, exactly: only their differences count, and p computed as exp(z - lse) is off by 3 %."""
    w = np.array([[0, 1], [0, 1], [0, 1], [-1, 1]], np.float32)
    x = np.array([[1, 2.0**20]], np.float32)
    got = jax.grad(lambda w: linear_cross_entropy(x, w, np.array([0]), reduction=reduction, **way).sum())(w)[:, 0]
    p = np.exp([0.0, 0, 0, -1]) / np.exp([0.0, 0, 0, -1]).sum()
    np.testing.assert_allclose(got, p - [1, 0, 0, 0], rtol=32 * 2.0**-24)
