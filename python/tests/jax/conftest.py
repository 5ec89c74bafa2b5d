import pytest

jax = pytest.importorskip("jax")


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of the XLA lowering so small that a small problem has several, and a ragged last one; two in a chunk."""
    from cutloss.jax import _plan, _tiles

    jax.clear_caches()  # compiled functions do not know that the constants changed
    monkeypatch.setattr(_tiles, "choose", lambda *_: _tiles.Tile(tokens=16, ids=32))
    monkeypatch.setattr(_plan, "CHUNK", 32)
    monkeypatch.setattr(_plan, "LEAST_CHUNK", 8)
    yield
    jax.clear_caches()


# The kernels, and the ways of the XLA lowering to the gradients of a trainable head.
WAYS = {"cpu": {"_impl": "cpu"}, "xla": {"_impl": "xla"}, "chunk": {"_impl": "xla", "mode": "chunk"}}


@pytest.fixture(params=WAYS)
def way(request):
    """Options of a call."""
    return WAYS[request.param]


@pytest.fixture
def quick_compiles():
    """XLA's own optimisations off: compiling takes most of these tests' time, four times as long with them."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
