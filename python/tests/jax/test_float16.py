"""Gradients in float16, whose smallest normal number is 6e-5: a loss scale must come before they are rounded."""

import jax
import numpy as np
import pytest
from objective import dense, near
from oracle import F32

from cutloss.jax import linear_cross_entropy

pytestmark = pytest.mark.usefixtures("quick_compiles")
F16 = np.dtype(np.float16)
N, V, D = 512, 64, 8
SCALE = F32.type(2**15)


def problem(dtypes, table=2.0**-10):
    """Gradients of a mean near 2e-6, of which float16 keeps 5 binary digits; after the scale, all of its 11."""
    rng = np.random.default_rng(0)
    x, w, bias = rng.standard_normal((N, D)) / 2**13, rng.standard_normal((V, D)) * table, rng.standard_normal(V)
    bias[:8] = -9  # ids that hardly any token takes for likely
    return *(a.astype(dtype) for a, dtype in zip((x, w, bias), dtypes)), rng.integers(8, V, N)


def case(name, argnums, dtypes, reduction="mean", mode="auto", long=True):
    return pytest.param(argnums, dtypes, reduction, mode, id=name, marks=[pytest.mark.long] if long else [])


@pytest.mark.parametrize("argnums,dtypes,reduction,mode", [
    case("x", (0,), (F16, F32, F32), long=False), case("none", (0,), (F16, F16, F32), "none"),
    case("all", (0, 1, 2), (F16, F16, F16), long=False), case("mixed", (0, 1), (F16, F32, F32)),
    case("bias", (1, 2), (F32, F32, F16)), case("chunk", (0, 1), (F16, F32, F32), mode="chunk")])
@pytest.mark.parametrize("impl", ["cpu", "xla"])
def test_small_gradients_are_lost_before_they_are_scaled(impl, argnums, dtypes, reduction, mode):
    x, w, bias, labels = problem(dtypes) if reduction == "mean" else problem(dtypes, table=2.0**-18)

    def scaled(*some):
        given = [x, w, bias]
        for i, value in zip(argnums, some):
            given[i] = value
        loss = linear_cross_entropy(*given[:2], labels, bias=given[2], reduction=reduction, mode=mode, _impl=impl)
        return SCALE * loss.sum()

    gradients = jax.jit(jax.grad(scaled, tuple(range(len(argnums)))))(*((x, w, bias)[i] for i in argnums))
    want = dense(x, w, labels, bias=bias, cotangent=SCALE, reduction=reduction)
    for i, got in zip(argnums, gradients):
        name = ("d_e", "d_c", "d_bias")[i]
        assert got.dtype == dtypes[i]
        near(name, got, want[name], want["tol"][name])


@pytest.mark.parametrize("impl", ["cpu", pytest.param("xla", marks=pytest.mark.long)])
def test_no_tokens_or_an_unscaled_gradient_have_another_dtype(impl):
    x, w, bias, labels = problem((F16, F16, F16))
    for some in (x[:8], x[:0]):
        step = jax.grad(lambda x, w: linear_cross_entropy(x, w, labels[: len(x)], _impl=impl), (0, 1))
        gradients = jax.jit(step)(some, w)
        assert [g.dtype for g in gradients] == [F16, F16] and [g.shape for g in gradients] == [some.shape, w.shape]
    want = dense(x, w, labels)
    near("d_e", jax.grad(linear_cross_entropy)(x, w, labels, _impl=impl), want["d_e"], want["tol"]["d_e"])


def test_a_filters_report_is_promised_and_never_written():
    x, w, _, labels = problem((F16, F16, F16))
    options = {"filter": "certified", "tolerance": 1e-2, "metrics": "filter_report"}
    _, found = jax.grad(lambda x: linear_cross_entropy(x, w, labels, **options), has_aux=True)(x)
    assert found["filter_report"]["rows"] > 0
    with pytest.raises(ValueError, match="filter_report with a float16 gradient and a head"):
        jax.grad(lambda w: linear_cross_entropy(x, w, labels, **options), has_aux=True)(w)
