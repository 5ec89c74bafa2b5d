import pytest

jax = pytest.importorskip("jax")


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of the XLA lowering so small that a small problem has several, and a ragged last one."""
    from cutloss.jax import _tiles

    jax.clear_caches()  # compiled functions do not know that the constants changed
    monkeypatch.setattr(_tiles, "choose", lambda *_: _tiles.Tile(tokens=16, ids=32))
    yield
    jax.clear_caches()


@pytest.fixture
def quick_compiles():
    """XLA's own optimisations off: compiling takes most of these tests' time, four times as long with them."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
