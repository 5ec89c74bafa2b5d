"""Differentiating what has no gradient is refused; metrics beside the loss are in nobody's way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import F32, problem

from cutloss.jax import linear_cross_entropy

pytestmark = pytest.mark.usefixtures("quick_compiles")
X, W, Y = problem(12, 21, 5)
EVERY = ("lse", "nll", "entropy", "argmax", "correct", "rank", "top_k=3", "mean_logits", "valid_count")


def with_metrics(x, w=W, labels=Y, **options):
    return linear_cross_entropy(x, w, labels, metrics=EVERY, _impl="cpu", **options)


@pytest.mark.parametrize("name", ["nll", "entropy", "top_k_logprobs", "mean_logits"])
def test_gradient_of_a_metric_is_silently_zero(name):
    """While the program is traced, before there is a lowering."""
    def f(x, w):
        loss, found = with_metrics(x, w)
        return loss + 0.1 * found[name].sum()

    def scanned(x, w):
        return jax.lax.scan(lambda total, x: (total + f(x, w), None), jnp.float32(0), jnp.stack([x, x]))[0]

    batched = jax.vmap(jax.grad(f), (0, None))
    for step in (jax.grad(f), jax.value_and_grad(f, (0, 1)), jax.grad(scanned, 1), lambda x, w: batched(x[None], w)):
        with pytest.raises(TypeError, match=f"metric '{name}' has no gradient.*stop_gradient") as caught:
            jax.make_jaxpr(step)(X, W)
        assert ("reduction='none'" in str(caught.value)) == (name == "nll")


def test_gradient_of_a_filters_report_is_silently_zero():
    with pytest.raises(TypeError, match="metric 'filter_report' has no gradient"):
        jax.grad(lambda x: linear_cross_entropy(
            x, W, Y, metrics="filter_report", filter="certified", tolerance=1e-3)[1]["filter_report"]["rows"])(X)


@pytest.mark.long  # test_transforms_objective.py has some of it
def test_a_metric_beside_the_loss_is_taken_for_differentiated():
    """Through jit, remat, vmap and scan, as aux, as a scan's results and added up in its carry."""
    want = jax.grad(linear_cross_entropy)(X, W, Y)
    for f in (with_metrics, jax.jit(with_metrics), jax.checkpoint(with_metrics)):
        gradient, found = jax.jit(jax.grad(f, has_aux=True))(X)
        np.testing.assert_allclose(gradient, want, rtol=0, atol=1e-6)
        assert np.all(found["entropy"][Y >= 0] > 0)

    def batch(xs):
        losses, found = jax.vmap(with_metrics)(xs)
        return losses.sum(), found

    gradient = jax.grad(batch, has_aux=True)(np.stack([X, X]))[0]
    np.testing.assert_allclose(gradient, np.stack([want, want]), rtol=0, atol=1e-6)

    def scanned(x):
        def body(carry, batch):
            loss, found = with_metrics(*batch[:1], labels=batch[1], reduction="sum")
            return (carry[0] + loss, carry[1] + found["entropy"].sum()), found

        (total, entropy), found = jax.lax.scan(body, (jnp.float32(0),) * 2, (x.reshape(3, 4, 5), Y.reshape(3, 4)))
        return total / (Y >= 0).sum(), (entropy, found)

    gradient, (entropy, found) = jax.jit(jax.grad(scanned, has_aux=True))(X)
    np.testing.assert_allclose(gradient, want, rtol=0, atol=1e-6)
    np.testing.assert_allclose(entropy, found["entropy"].sum(), rtol=1e-6)


@pytest.mark.long
def test_cotangents_that_are_zeros_are_refused():
    outputs, pull = jax.vjp(with_metrics, X)
    zeros = jax.tree.map(lambda a: jnp.zeros_like(a) if a.dtype == F32 else np.zeros(a.shape, jax.dtypes.float0), outputs)
    (gradient,) = pull((F32.type(1), zeros[1]))
    np.testing.assert_allclose(gradient, jax.grad(linear_cross_entropy)(X, W, Y), rtol=0, atol=1e-6)
