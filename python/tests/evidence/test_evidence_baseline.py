"""The published scheme as a baseline: it must be the same loss, or the comparison means nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cutloss.evidence import baseline


def dense(hidden, table, labels, softcap):
    z = hidden @ table.T
    z = z if softcap is None else softcap * jnp.tanh(z / softcap)
    return jnp.where(labels >= 0, jax.nn.logsumexp(z, 1) - z[jnp.arange(len(labels)), jnp.maximum(labels, 0)], 0)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("tokens,vocab", [(8, 64), (11, 83)])
def test_scheme_is_the_dense_loss(tokens, vocab, softcap):
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.standard_normal((tokens, 16)), jnp.float32)
    table = jnp.asarray(rng.standard_normal((vocab, 16)), jnp.float32)
    labels = jnp.asarray(rng.integers(0, vocab, tokens)).at[2].set(-100)
    weights = jnp.asarray(rng.random(tokens), jnp.float32)

    def of(nll):
        return jax.value_and_grad(lambda h: jnp.sum(weights * nll(h)))(hidden)

    got, gradient = of(lambda h: baseline._nll(h, table, labels, softcap, 4, 32))
    want, wanted = of(lambda h: dense(h, table, labels, softcap))
    # Sums of at most 83 + 16 terms of f32, a few of them after each other.
    close = 4 * (vocab + 16) * 2.0**-24
    assert abs(got - want) <= close * abs(want)
    assert np.linalg.norm(gradient - wanted) <= close * np.linalg.norm(wanted)
    assert not np.any(np.asarray(gradient)[2])
