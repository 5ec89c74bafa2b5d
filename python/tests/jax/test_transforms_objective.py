"""JAX's transformations of the loss with every option that goes together: the same as without them, or refused in words."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from objective import dense, near
from oracle import BF16, F32, problem

from cutloss.jax import linear_cross_entropy

pytestmark = pytest.mark.usefixtures("quick_compiles")
IMPLEMENTATIONS = ["cpu", "xla"]
N, V, D = 12, 21, 5
X, W, Y = problem(N, V, D)
RNG = np.random.default_rng(2)
BIAS, WEIGHTS, CLASSES = (RNG.random(n).astype(F32) for n in (V, N, V))
SOFT = RNG.integers(0, V, (N, 3)), (RNG.random((N, 3)) / 3).astype(F32)
OPTIONS = {"class_weights": CLASSES, "label_smoothing": 0.1, "z_loss": 0.02, "softcap": 3.0, "logit_scale": 0.7}


def f(x, w, bias, labels=Y, weights=WEIGHTS, impl="xla", reduction="sum", **options):
    loss, found = linear_cross_entropy(x, w, labels, bias=bias, token_weights=weights, reduction=reduction,
                                       metrics=("lse", "entropy"), _impl=impl, **(options or OPTIONS))
    return loss.sum() + 0.1 * found["lse"].sum(), found["entropy"]


def equal(a, b):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=4e-6, atol=4e-6), a, b)


@functools.cache
def plain(impl):
    """Compiled once: value, entropy and all gradients."""
    return jax.jit(jax.value_and_grad(functools.partial(f, impl=impl), (0, 1, 2), has_aux=True))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_remat_or_scan_changes_the_gradient_of_an_option(impl):
    want = plain(impl)(X, W, BIAS)
    g = jax.checkpoint(functools.partial(f, impl=impl))
    equal(jax.jit(jax.value_and_grad(g, (0, 1, 2), has_aux=True))(X, W, BIAS), want)

    def chunks(x, w, bias):
        def body(total, chunk):
            part, entropy = f(chunk[0], w, bias, chunk[1], chunk[2], impl)
            return total + part, entropy

        total, entropy = jax.lax.scan(body, jnp.float32(0), (x.reshape(3, 4, D), Y.reshape(3, 4), WEIGHTS.reshape(3, 4)))
        return total, entropy.reshape(-1)

    equal(jax.jit(jax.value_and_grad(chunks, (0, 1, 2), has_aux=True))(X, W, BIAS), want)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_vmap_mixes_up_the_options_of_its_batch(impl):
    xs, ys = np.stack([X, 2 * X]), np.stack([Y, np.roll(Y, 1)])
    weights, biases = np.stack([WEIGHTS, WEIGHTS[::-1]]), np.stack([BIAS, -BIAS])

    def one(x, bias, labels, weights):
        return jax.grad(functools.partial(f, impl=impl), (0, 1, 2), has_aux=True)(x, W, bias, labels, weights)

    got = jax.jit(jax.vmap(one))(xs, biases, ys, weights)
    single = jax.jit(one)
    want = [single(*a) for a in zip(xs, biases, ys, weights)]
    equal(got, jax.tree.map(lambda *a: np.stack(a), *want))


EVERY_METRIC = ("lse", "nll", "entropy", "argmax", "correct", "rank", "top_k=3", "mean_logits", "valid_count")


@pytest.mark.parametrize("soft", [False, True], ids=["labels", "soft"])
@pytest.mark.parametrize("impl", ["cpu", pytest.param("xla", marks=pytest.mark.long)])
def test_vmap_mixes_up_targets_or_metrics_of_its_batch(impl, soft):
    targets = SOFT if soft else Y
    batch = jax.tree.map(lambda a: np.stack([a, a[::-1]]), (X, targets))

    def one(x, targets):
        given = {"soft_targets": targets} if soft else {"labels": targets}
        return jax.value_and_grad(lambda x, w: linear_cross_entropy(
            x, w, bias=BIAS, metrics=EVERY_METRIC, _impl=impl, **given), (0, 1), has_aux=True)(x, W)

    single = jax.jit(one)
    want = [single(*jax.tree.map(lambda a: a[k], batch)) for k in (0, 1)]
    equal(jax.jit(jax.vmap(one))(*batch), jax.tree.map(lambda *a: np.stack(a), *want))


@pytest.mark.parametrize("options", [
    {"filter": "certified", "tolerance": 1e-2}, {"filter": "unbiased", "epsilon": 1e-2}, {"filter": "tile", "epsilon": 1e-2},
    pytest.param({"filter_eps": 1.0, "chunk_size": 8}, marks=pytest.mark.long)], ids=lambda o: str(next(iter(o.values()))))
def test_vmap_filters_its_batch_as_one(options):
    xs, seeds = np.stack([X, 2 * X]), np.array([3, 4], np.uint32)

    def one(x, seed):
        more = {"seed": seed} if options.get("filter") == "unbiased" else {}
        return jax.value_and_grad(lambda x, w: linear_cross_entropy(x, w, Y, **options, **more), (0, 1))(x, W)

    single = jax.jit(one)
    want = [single(x, seed) for x, seed in zip(xs, seeds)]
    equal(jax.jit(jax.vmap(one))(xs, seeds), jax.tree.map(lambda *a: np.stack(a), *want))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_second_use_of_a_pullback_or_a_donated_buffer_changes_the_gradient(impl):
    (_, entropy), want = plain(impl)(X, W, BIAS)
    _, pull, found = jax.vjp(functools.partial(f, impl=impl), X, W, BIAS, has_aux=True)
    equal(pull(F32.type(1)), want)
    equal(pull(F32.type(-2)), jax.tree.map(lambda a: -2 * a, want))
    equal(pull(F32.type(1)), want)
    equal(found, entropy)

    def step(x, w, bias):
        gradients, _ = jax.grad(functools.partial(f, impl=impl), (0, 1, 2), has_aux=True)(x, w, bias)
        return jax.tree.map(lambda a, g: a - 0.5 * g, (x, w, bias), gradients)

    donated = jax.jit(step, donate_argnums=(0, 1, 2))(*map(jnp.array, (X, W, BIAS)))
    equal(donated, jax.tree.map(lambda a, g: a - 0.5 * g, (X, W, BIAS), want))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_x64_widens_or_breaks_an_option(impl):
    want = plain(impl)(X, W, BIAS)
    with jax.enable_x64(True):
        wide = {"class_weights": CLASSES.astype(np.float64)}  # weights of any kind are taken as f32
        got = jax.jit(jax.value_and_grad(functools.partial(f, impl=impl, **(OPTIONS | wide)), (0, 1, 2), has_aux=True))(
            X, W, BIAS, labels=Y.astype(np.int64), weights=WEIGHTS.astype(np.float64))
        assert all(a.dtype == F32 for a in jax.tree.leaves(got))
        equal(got, want)


@pytest.mark.parametrize("dtypes", [(BF16, F32, np.float16), (np.float16, BF16, F32), (F32, np.float16, BF16)],
                         ids=lambda dtypes: "-".join(np.dtype(d).name for d in dtypes))
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_mixed_dtypes_are_summed_in_the_narrow_one(impl, dtypes):
    arrays = [np.asarray(a).astype(d) for a, d in zip((X, W, BIAS), dtypes)]
    (value, _), got = plain(impl)(*arrays)
    want = dense(*arrays[:2], Y, bias=arrays[2], token_weights=WEIGHTS, reduction="sum", lse_cotangent=np.full(N, 0.1),
                 **OPTIONS)
    total = want["loss"] + 0.1 * want["lse"].sum()
    near("loss", value, total, want["tol"]["loss"] + 0.1 * want["tol"]["lse"].sum())
    for a, gradient, name in zip(arrays, got, ("d_e", "d_c", "d_bias")):
        assert gradient.dtype == a.dtype
        # With the lse in the loss gradients are formed in the backward pass, and rounded once.
        near(name, gradient, want[name], want["tol"][name])


@pytest.mark.parametrize("impl,soft,reduction", [
    ("cpu", False, "mean"), ("cpu", True, "none"), ("xla", False, "none"),
    *(pytest.param("xla", *some, marks=pytest.mark.long) for some in ((False, "mean"), (True, "mean"), (True, "none")))])
def test_gradient_is_not_that_of_the_loss(impl, soft, reduction):
    """Central differences with steps of 0.03: of a loss of about 10, rounding is 10 * 2^-23 / 0.03 = 4e-5 of a gradient
    of about 1, the third derivative 0.03^2 / 24 = 4e-5 of itself."""
    options = {"soft_targets": SOFT, "z_loss": 0.02, "softcap": 3.0} if soft else OPTIONS
    g = functools.partial(f, labels=None if soft else Y, impl=impl, reduction=reduction, **options)
    with jax.enable_x64(reduction == "none"):
        check_grads(jax.jit(lambda *a: g(*a)[0]), (X, W, BIAS), order=1, modes=["rev"], eps=0.03, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_captured_weights_are_frozen_into_the_program(impl):
    """A compiled evaluation sees adapters after a step, without being traced again."""
    traced = []

    @jax.jit
    def evaluate(adapter):
        traced.append(1)
        return linear_cross_entropy(X + X @ adapter, W, Y, _impl=impl)

    @jax.jit
    def step(adapter):
        return adapter - 0.1 * jax.grad(evaluate)(adapter)

    adapter = jnp.zeros((D, D), F32)
    before = evaluate(adapter)
    adapter = step(adapter)
    calls = len(traced)
    after = evaluate(adapter)
    assert len(traced) == calls and after < before
    z = np.asarray((X + X @ adapter) @ W.T)[Y >= 0]
    np.testing.assert_allclose(after, (jax.nn.logsumexp(z, 1) - z[np.arange(len(z)), Y[Y >= 0]]).mean(), rtol=1e-5)


def test_strided_arrays_are_read_as_if_contiguous():
    """From NumPy, and from JAX by DLPack: views with steps, negative ones, transposed and sliced."""
    big_x, big_w, many = np.repeat(X, 2, 0), np.repeat(W, 2, 1), np.repeat(Y, 3)
    want = jax.value_and_grad(linear_cross_entropy, (0, 1))(X, W, Y, _impl="cpu")
    wide = np.concatenate([X, X], 1)
    table = np.asfortranarray(W)
    for x, w, labels in ((big_x[::2], W, Y), (wide[:, :D], W, Y), (X[::-1][::-1], W, Y), (X, big_w[:, ::2], Y),
                         (X, table, Y), (X, W, many[::3]), (X.T.copy().T, W.T.copy().T, Y)):
        got = jax.value_and_grad(linear_cross_entropy, (0, 1))(x, w, labels, _impl="cpu")
        jax.tree.map(np.testing.assert_array_equal, got, want)
    shared = jnp.from_dlpack(np.ascontiguousarray(X)), jnp.from_dlpack(np.ascontiguousarray(W))
    jax.tree.map(np.testing.assert_array_equal, jax.value_and_grad(linear_cross_entropy, (0, 1))(*shared, Y, _impl="cpu"), want)
    try:
        columns = jnp.from_dlpack(table)
    except Exception:
        return  # strides that this JAX does not hold
    jax.tree.map(np.testing.assert_array_equal, jax.value_and_grad(linear_cross_entropy, (0, 1))(X, columns, Y, _impl="cpu"), want)
