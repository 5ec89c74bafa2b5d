"""JAX's transformations of the loss: right, or refused in words."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import F32, problem

from cutloss.jax import linear_cross_entropy

pytestmark = pytest.mark.usefixtures("quick_compiles")
IMPLEMENTATIONS = ["cpu", "xla"]
X, W, Y = problem(12, 21, 5)


def equal(a, b):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-6, atol=1e-7), a, b)


@pytest.mark.parametrize("impl,argnums", [("cpu", (0,)), ("cpu", (1,)), ("cpu", (0, 1)), ("xla", (0, 1))])
def test_jit_scan_or_remat_changes_the_gradient(impl, argnums):
    def f(x, w, labels):
        return linear_cross_entropy(x, w, labels, _impl=impl)

    want = jax.value_and_grad(f, argnums)(X, W, Y)
    for g in (jax.jit(f), jax.checkpoint(f)):
        equal(jax.value_and_grad(g, argnums)(X, W, Y), want)
    equal(jax.jit(jax.value_and_grad(jax.checkpoint(f), argnums))(X, W, Y), want)

    def over_chunks(x, w, labels):
        def body(total, chunk):
            return total + linear_cross_entropy(chunk[0], w, chunk[1], reduction="sum", _impl=impl), None

        total, _ = jax.lax.scan(body, jnp.float32(0), (x.reshape(3, 4, 5), labels.reshape(3, 4)))
        return total / jnp.sum(labels != -100)

    equal(jax.jit(jax.value_and_grad(over_chunks, argnums))(X, W, Y), want)


@pytest.mark.parametrize("impl,batch,reduction", [
    ("cpu", 1, "mean"), ("cpu", 3, "mean"), ("cpu", 3, "none"), ("xla", 3, "none")])
def test_vmap_is_not_a_loop(impl, batch, reduction):
    xs, ys = np.stack([X * (1 + k) for k in range(batch)]), np.stack([np.roll(Y, k) for k in range(batch)])
    ws = np.stack([W / (1 + k) for k in range(batch)])

    @jax.jit
    def f(x, w, labels):
        return linear_cross_entropy(x, w, labels, reduction=reduction, _impl=impl)

    def summed(x, w, labels):
        return f(x, w, labels).sum()

    equal(jax.vmap(f)(xs, ws, ys), np.stack([f(*a) for a in zip(xs, ws, ys)]))
    equal(jax.vmap(f, (0, None, 0))(xs, W, ys), np.stack([f(x, W, y) for x, y in zip(xs, ys)]))
    gradient = jax.jit(jax.grad(summed, (0, 1)))
    equal(jax.vmap(gradient, (0, None, 0))(xs, W, ys),
          jax.tree.map(lambda *a: np.stack(a), *[gradient(x, W, y) for x, y in zip(xs, ys)]))
    # The gradient of a vmapped loss by what is shared is the sum over the batch.
    equal(jax.grad(lambda w: jax.vmap(summed, (0, None, 0))(xs, w, ys).sum())(W),
          sum(gradient(x, W, y)[1] for x, y in zip(xs, ys)))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_vmap_over_an_empty_batch_crashes(impl):
    f = functools.partial(linear_cross_entropy, _impl=impl)
    assert jax.vmap(f, (0, None, 0))(np.zeros((0, 12, 5), F32), W, np.zeros((0, 12), int)).shape == (0,)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_second_derivative_is_silently_wrong_or_dense(impl):
    def f(x):
        return linear_cross_entropy(x, W, Y, _impl=impl)

    with pytest.raises(TypeError, match="forward-mode|jvp"):
        jax.jvp(f, (X,), (X,))
    for second in (jax.hessian(f), jax.jit(jax.hessian(f)), jax.grad(lambda x: jax.grad(f)(x).sum()), jax.jacfwd(f)):
        with pytest.raises(TypeError, match="first derivatives|forward-mode|jvp"):
            second(X)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_integer_labels_cannot_be_an_argument_of_grad(impl):
    f = functools.partial(linear_cross_entropy, _impl=impl)
    d_x, d_labels = jax.grad(f, (0, 2), allow_int=True)(X, W, Y.astype(np.int32))
    equal(d_x, jax.grad(f)(X, W, Y))
    assert d_labels.dtype == jax.dtypes.float0 and d_labels.shape == Y.shape


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_x64_changes_dtypes_or_labels(impl):
    want = jax.value_and_grad(linear_cross_entropy, (0, 1))(X, W, Y, _impl=impl)
    with jax.enable_x64(True):
        for dtype in (np.int32, np.int64):
            got = jax.jit(jax.value_and_grad(functools.partial(linear_cross_entropy, _impl=impl), (0, 1)))(
                X, W, Y.astype(dtype))
            assert all(a.dtype == F32 for a in jax.tree.leaves(got))
            equal(got, want)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_donated_input_is_overwritten_too_early(impl):
    want = jax.grad(linear_cross_entropy)(X, W, Y, _impl=impl)

    def step(x, w, labels):
        return x - 0.5 * jax.grad(linear_cross_entropy)(x, w, labels, _impl=impl)

    equal(jax.jit(step, donate_argnums=0)(jnp.array(X), W, Y), X - 0.5 * want)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32])
def test_integer_labels_are_refused_or_wrapped(dtype):
    labels = np.abs(Y) % 21
    want = linear_cross_entropy(X, W, labels)
    assert linear_cross_entropy(X, W, labels.astype(dtype)) == want
    assert jax.jit(linear_cross_entropy)(X, W, labels.astype(dtype)) == want
    if dtype is np.uint32:
        wrapped = labels.astype(dtype)
        wrapped[0] = 2**32 - 100  # -100 when cut to 32 signed bits
        assert np.isnan(jax.jit(linear_cross_entropy)(X, W, wrapped))


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 2), (12,), (12, 1)])
def test_leading_axes_change_the_answer(shape):
    for reduction in ("mean", "none"):
        def f(x, labels):
            return linear_cross_entropy(x, W, labels, reduction=reduction)

        flat = f(X, Y)
        got = f(X.reshape(*shape, 5), Y.reshape(shape))
        assert got.shape == (shape if reduction == "none" else ())
        equal(got.reshape(flat.shape), flat)
        gradient = jax.grad(lambda x, y: f(x, y).sum())(X.reshape(*shape, 5), Y.reshape(shape))
        equal(gradient.reshape(X.shape), jax.grad(lambda x, y: f(x, y).sum())(X, Y))


def test_concurrent_calls_share_something():
    """Several losses in one program, and one program on several virtual devices' pool, from several threads."""
    from concurrent.futures import ThreadPoolExecutor

    x, w, y = problem(300, 700, 33)
    f = jax.jit(lambda x: sum(jax.grad(linear_cross_entropy)(x * k, w, y) for k in (1.0, 0.5, 2.0, -1.0)))
    want = np.asarray(f(x))
    with ThreadPoolExecutor(8) as pool:
        for got in pool.map(lambda _: np.asarray(f(x)), range(40)):
            np.testing.assert_array_equal(got, want)
