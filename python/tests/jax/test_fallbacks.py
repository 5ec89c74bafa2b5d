"""What is done where a part of JAX that is not documented is gone, or cutloss was built without JAX's headers."""

import builtins
import functools
import types

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from oracle import problem

from cutloss.jax import _ffi, _manual, _mesh, _vjp, linear_cross_entropy

pytestmark = pytest.mark.usefixtures("quick_compiles")
X, W, Y = problem(5, 11, 4)


@pytest.fixture
def hidden(monkeypatch):
    """hidden(module, names): objects seem to have no such attribute, as the module sees it."""
    def hide(module, *names):
        def get(thing, name, *default):
            return default[0] if name in names else builtins.getattr(thing, name, *default)

        monkeypatch.setattr(module, "getattr", get, raising=False)

    jax.clear_caches()
    yield hide
    jax.clear_caches()


def mesh_of_one():
    return jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))


def in_shard_map(check_vma=True):
    return jax.jit(jax.shard_map(lambda x, w, y: jax.lax.psum(linear_cross_entropy(x, w, y, reduction="sum"), "d"),
                                 mesh=mesh_of_one(), in_specs=(P("d"), P(), P("d")), out_specs=P(), check_vma=check_vma))


def test_varying_axes_are_not_seen_under_their_older_name():
    older = types.SimpleNamespace(vma=frozenset({"d"}))
    assert _manual._axes(older) == {"d"} and _manual._axes(types.SimpleNamespace()) is None
    seen = []
    jax.shard_map(lambda x: seen.append(_manual._axes(jax.typeof(x))) or x, mesh=mesh_of_one(), in_specs=P("d"),
                  out_specs=P("d"))(X)
    assert seen == [{"d"}]


def test_a_psum_is_silently_wrong_where_varying_axes_are_not_seen(hidden):
    want = linear_cross_entropy(X, W, Y, reduction="sum")
    np.testing.assert_allclose(in_shard_map()(X, W, Y), want, rtol=1e-6)
    hidden(_manual, "manual_axis_type", "vma")
    for check_vma in (True, False):
        with pytest.raises(NotImplementedError, match="inside jax.shard_map.*call the loss outside shard_map"):
            in_shard_map(check_vma)(X, W, Y)
    np.testing.assert_allclose(linear_cross_entropy(X, W, Y, reduction="sum"), want, rtol=1e-6)
    mesh = {"mesh": mesh_of_one(), "x_spec": P("d"), "w_spec": P()}
    np.testing.assert_allclose(linear_cross_entropy(X, W, Y, reduction="sum", **mesh), want, rtol=1e-6)


def test_a_mesh_that_cannot_be_asked_for_is_an_error(monkeypatch):
    """`with mesh:` is then not seen; a mesh that is named, and the loss without any, stay as they are."""
    mesh = mesh_of_one()
    with mesh:
        assert _mesh._mesh(None) == mesh
        for gone in (types.SimpleNamespace(), None):
            if gone is None:
                monkeypatch.delattr(jax.interpreters, "pxla")
                monkeypatch.setitem(__import__("sys").modules, "jax.interpreters.pxla", None)
            else:
                monkeypatch.setattr(jax.interpreters, "pxla", gone)
            assert _mesh._mesh(None) is None
            want = linear_cross_entropy(X, W, Y)
            assert linear_cross_entropy(X, W, Y, mesh=mesh, w_spec=P()) == pytest.approx(float(want), rel=1e-6)
            with pytest.raises(ValueError, match="there is none: pass mesh="):
                linear_cross_entropy(X, W, Y, w_spec=P())


def test_a_tracer_that_hides_its_array_is_an_error(hidden):
    want = jax.grad(linear_cross_entropy, (0, 1))(X, W, Y)
    put = [jax.device_put(a, jax.NamedSharding(mesh_of_one(), P())) for a in (X, W)]
    hidden(_mesh, "to_concrete_value")
    tracers = []
    got = jax.grad(lambda *a: tracers.append(a[0]) or linear_cross_entropy(*a, Y), (0, 1))(*put)
    assert _mesh._concrete(tracers[0]) is None and _mesh._concrete(X) is X
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7), got, want)


@pytest.mark.long
def test_a_build_without_ffi_headers_has_no_loss(monkeypatch, hidden):
    want = jax.value_and_grad(linear_cross_entropy)(X, W, Y)
    monkeypatch.setattr(_ffi._core, "xla_handler", lambda: None)
    jax.clear_caches()  # compiled functions do not know
    _ffi.available.cache_clear()
    _vjp._warn_no_kernels.cache_clear()
    try:
        assert not _ffi.available()
        with pytest.warns(UserWarning, match="without JAX's FFI headers"):
            got = jax.jit(jax.value_and_grad(linear_cross_entropy))(X, W, Y)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, want)
        mesh = {"mesh": mesh_of_one(), "x_spec": P("d"), "w_spec": P()}
        assert linear_cross_entropy(X, W, Y, **mesh) == pytest.approx(float(want[0]), rel=1e-6)
        with pytest.raises(ValueError, match="filter 'tile' runs in the C\\+\\+ kernels"):
            jax.grad(functools.partial(linear_cross_entropy, filter="tile", epsilon=1e-3))(X, W, Y)
    finally:
        _ffi.available.cache_clear()
        _vjp._warn_no_kernels.cache_clear()
