import os

# Before JAX starts: the tests must not take, or wait for, an accelerator.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import pytest


@pytest.fixture(autouse=True)
def tunix_as_it_was():
    """Fails a test that leaves Tunix patched: every later test would then compare cutloss with itself."""
    import cutloss.tunix as ct

    yield
    leaked = ct.is_installed()
    ct.uninstall()
    assert not leaked, "the test left the patch installed"


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    """Compiling is most of these tests' time; unoptimised code takes about half of it and is no less right."""
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
