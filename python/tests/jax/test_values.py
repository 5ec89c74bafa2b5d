"""Losses known beforehand, over one device and two, eager and compiled."""

import jax
import numpy as np
import processes
import pytest
from oracle import F32, lattice

from cutloss.jax import linear_cross_entropy

IMPLEMENTATIONS = ["cpu", "xla"]


@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_rows_of_ignored_labels_are_left_unwritten(impl, reduction):
    """Memory that was NaN before shows in what a compiled program does not write."""
    x, w, labels = lattice(256, 4096, 32)
    labels[::4] = -100

    def f(x, w, y):
        return linear_cross_entropy(x, w, y, reduction=reduction, _impl=impl)

    eager, jitted = f(x, w, labels), jax.jit(f)
    gradient = jax.jit(jax.grad(lambda *a: f(*a).sum(), (0, 1)))
    for _ in range(3):
        jax.block_until_ready([jax.numpy.full(size, np.nan) for size in (256, 256 * 32, 4096 * 32)])
        compiled = jitted(x, w, labels)
        np.testing.assert_allclose(compiled, eager, rtol=1e-6)
        if reduction == "none":
            assert not np.asarray(compiled)[::4].any()
        d_x, d_w = gradient(x, w, labels)
        assert not np.asarray(d_x)[::4].any() and np.isfinite(d_w).all()


@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_compiled_loss_keeps_an_old_argument_as_a_constant(impl):
    x, w, labels = lattice(7, 11, 5)
    traces = []

    @jax.jit
    def f(x, w, labels):
        traces.append(1)
        return linear_cross_entropy(x, w, labels, _impl=impl)

    for scale in (1, 2, 3):
        want = linear_cross_entropy(scale * x, w / scale, labels[::-1].copy(), _impl=impl)
        np.testing.assert_allclose(f(scale * x, w / scale, labels[::-1].copy()), want, rtol=1e-6)
        np.testing.assert_allclose(f(scale * x, w, labels), linear_cross_entropy(scale * x, w, labels), rtol=1e-6)
    assert len(traces) == 1


# Eight tokens, one on the first device and seven on the second, and a vocabulary of two halves.
PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from cutloss.jax import linear_cross_entropy

def table(rows, columns, seed):
    i, j = np.arange(rows)[:, None], np.arange(columns)[None, :]
    return ((((i + 1) * (j + 3) * 7919 + i * 104729 + j * 1299709 + seed * 15485863) % 2003) / 1001 - 1).astype(np.float32)

jax.config.update("jax_disable_most_optimizations", True)
mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
x, w, labels = 3 * table(8, 5, 6), table(10, 5, 5), np.array([3, 1, 4, 1, 5, 9, 2, 6])
apart_x, apart_y = np.full((14, 5), np.nan, np.float32), np.full(14, -100)
rows = np.r_[0, 7:14]
apart_x[rows], apart_y[rows] = x, labels
value, (d_x, d_w) = jax.value_and_grad(linear_cross_entropy, (0, 1))(x, w, labels)
np.testing.assert_allclose(value, 3.25854671, rtol=1e-6)
for impl in ("cpu", "xla"):
    for specs in ({"x_spec": P("d"), "w_spec": P()}, {"x_spec": P(), "w_spec": P("d")}, {"x_spec": P("d"), "w_spec": P("d")}):
        if impl == "cpu" and specs["w_spec"] != P():
            continue
        f = jax.jit(jax.value_and_grad(lambda *a: linear_cross_entropy(*a, mesh=mesh, _impl=impl, **specs), (0, 1)))
        got, (g_x, g_w) = f(apart_x, w, apart_y)
        np.testing.assert_allclose(got, 3.25854671, rtol=1e-6, err_msg=f"{impl} {specs}")  # of means: 2.29, halved: 1.63
        np.testing.assert_allclose(np.asarray(g_x)[rows], d_x, atol=1e-6)
        np.testing.assert_allclose(g_w, d_w, atol=1e-6)
        assert not np.delete(np.asarray(g_x), rows, 0).any()
    # Left to the partitioner, and in a scan over two batches.
    put = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in ((apart_x, P("d")), (w, P()), (apart_y, P("d")))]
    np.testing.assert_allclose(jax.jit(lambda *a: linear_cross_entropy(*a, _impl=impl))(*put), 3.25854671, rtol=1e-6)
    def twice(x, w, y):
        body = lambda sum, _: (sum + linear_cross_entropy(x, w, y, mesh=mesh, x_spec=P("d"), w_spec=P(), _impl=impl), None)
        return jax.lax.scan(body, jnp.float32(0), None, length=2)[0]
    np.testing.assert_allclose(jax.jit(twice)(*put), 2 * 3.25854671, rtol=1e-6)

# Targets of one half of the vocabulary only: the other half's table still has a gradient.
for half in (labels % 5, labels % 5 + 5):
    want = jax.grad(linear_cross_entropy, (0, 1))(x, w, half)
    got = jax.jit(jax.grad(lambda *a: linear_cross_entropy(*a, mesh=mesh, x_spec=P(), w_spec=P("d"), _impl="xla"), (0, 1)))(
        x, w, half)
    for a, b in zip(got, want):
        np.testing.assert_allclose(a, b, atol=1e-6)
    assert np.abs(np.asarray(got[1])[:5]).max() > 1e-3 and np.abs(np.asarray(got[1])[5:]).max() > 1e-3
"""


def test_devices_with_few_tokens_or_no_target_weigh_too_much():
    processes.run("-c", PROGRAM, devices=2)


def test_fixed_values_of_a_bias():
    e, c, _ = lattice(7, 11, 5)
    i = np.arange(11)
    bias = ((((i + 1) * 3 * 7919 + i * 104729 + 3 * 15485863) % 2003) / 1001 - 1).astype(F32)
    labels = np.array([5, 4, -100, 2, 1, -100, 10])
    for impl in IMPLEMENTATIONS:
        for cap, reduction, *want in ((None, "mean", 4.22264260, 2.04413950, 11.05120661, 1.46773728),
                                      (2.0, "mean", 3.28572188, 1.17292519, 5.72517245, 0.81191299),
                                      (2.0, "sum", 16.42860940, 5.86462597, 28.62586226, 4.05956497)):
            value, gradients = jax.value_and_grad(lambda x, w, b: linear_cross_entropy(
                x, w, labels, bias=b, softcap=cap, reduction=reduction, _impl=impl), (0, 1, 2))(e, c, bias)
            np.testing.assert_allclose(value, want[0], rtol=1e-6)
            np.testing.assert_allclose([np.abs(g).sum() for g in gradients], want[1:], rtol=1e-5)
