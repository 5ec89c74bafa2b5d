"""Checks over 8 virtual devices; `test_mesh.py` makes a test of each.

    mesh_checks.py short|long [-v] [-k PART]
"""

from __future__ import annotations

import contextlib

import mesh_runner

if __name__ == "__main__":
    mesh_runner.eight_devices()

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import BF16, F32, close, dense, problem

from cutloss.jax import hlo, linear_cross_entropy

check = mesh_runner.Checks()


def mesh_of(kind=AxisType.Auto, **axes):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))


FSDP_TP = P("tp", "fsdp")
MESHES = {
    "fsdp8": ({"fsdp": 8, "tp": 1}, FSDP_TP, P("fsdp")),
    "tp8": ({"fsdp": 1, "tp": 8}, FSDP_TP, P("fsdp")),
    "fsdp4tp2": ({"fsdp": 4, "tp": 2}, FSDP_TP, P("fsdp", "tp")),  # the hidden dimension of x split too
    "fsdp2tp4": ({"fsdp": 2, "tp": 4}, FSDP_TP, P("fsdp")),
    "data8": ({"data": 8}, P(), P("data")),
    "rows8": ({"fsdp": 8}, P("fsdp"), P("fsdp")),  # the ids split over the axis of the tokens
    "rows2tp4": ({"fsdp": 2, "tp": 4}, P(("tp", "fsdp")), P("fsdp")),
    "tp4rows2": ({"fsdp": 2, "tp": 4}, P(("fsdp", "tp")), P("fsdp")),
    "all": ({"a": 2, "b": 2, "c": 2}, P(("a", "b"), "c"), P(("b", "c"))),
    "same": ({"a": 2, "b": 2, "c": 2}, P("a", "b"), P()),  # tokens the same on all devices, c splits nothing
}


def compare(x, w, labels, run, argnums=(0, 1), cotangent=np.float32(1.5), **options):
    """run(value and gradients as a function of x, w, labels, cotangent, options) against the oracle."""
    def evaluate(x, w, labels, cotangent, **more):
        def loss(*some):
            both = [x, w]
            for i, value in zip(argnums, some):
                both[i] = value
            return linear_cross_entropy(*both, labels, **options, **more)

        value, pull = jax.vjp(loss, *((x, w)[i] for i in argnums))
        return value, pull(cotangent)

    value, gradients = run(evaluate)
    plain = {k: v for k, v in options.items() if k[0] != "_" and k not in ("mode", "budget")}
    want = dense(x.reshape(-1, x.shape[-1]), w, labels.reshape(-1), cotangent=np.reshape(cotangent, np.shape(cotangent)
                 and -1), roundings=2, **plain)
    close("loss", np.reshape(value, want.loss.shape), want.loss, want.tol_loss)
    if np.ndim(value) == 0:
        np.testing.assert_allclose(value, on_one_device(x, w, labels, **plain), rtol=1e-6)
    for i, gradient in zip(argnums, gradients):
        assert gradient.dtype == (x, w)[i].dtype and gradient.shape == (x, w)[i].shape
        name = ("d_e", "d_c")[i]
        wanted = getattr(want, name)
        gradient = np.asarray(gradient).reshape(wanted.shape)
        close(name, gradient, wanted, getattr(want, "tol_" + name))
        if gradient.dtype == F32:
            error, norm = np.linalg.norm(gradient - wanted), np.linalg.norm(wanted)
            assert error <= 1e-5 * norm, f"{name} is off by {error:.2g} in norm, of {norm:.2g}"
    return value, gradients


def on_one_device(x, w, labels, _known={}, **options):
    """The loss; many checks share a problem."""
    key = *(a.tobytes() for a in (x, w, labels)), *sorted(options.items())
    if key not in _known:
        _known[key] = float(linear_cross_entropy(x, w, labels, **options))
    return _known[key]


def on_mesh(name, x, w, labels, argnums=(0, 1), cotangent=np.float32(1.5), **options):
    axes, w_spec, x_spec = MESHES[name]
    mesh = mesh_of(**axes)
    if options.get("head_layout") == "dv":
        w_spec = P(*reversed((*w_spec, None, None)[:2]))

    def run(evaluate):
        return jax.jit(lambda *a: evaluate(*a, mesh=mesh, x_spec=x_spec, w_spec=w_spec))(x, w, labels, cotangent)

    return compare(x, w, labels, run, argnums, cotangent, **options)


def tokens(n, v, d, **dtypes):
    """With a tile and a half in which all tokens are ignored: the second device's, if there are eight."""
    x, w, labels = problem(n, v, d, **dtypes)
    labels[n // 8 : n // 4] = -100
    return x, w, labels


@check(("fsdp8",), ("tp8",), ("fsdp4tp2",), ("fsdp2tp4",),
       ("fsdp2tp4", "1GiB"), ("tp8", None),
       long=(*((name,) for name in MESHES if name[-1] not in "248"), ("data8",), ("rows8",), ("rows2tp4",), ("tp4rows2",),
             *((name, "1GiB") for name in ("fsdp8", "data8", "rows8", "rows2tp4", "tp4rows2", "all", "same"))))
def part_of_the_gradient_is_lost(name, chunk=False):
    """chunk: the budget of that mode. Without one tokens that are not split are worked on in chunks of 33."""
    on_mesh(name, *tokens(264, 264, 16), _impl="xla", **({} if chunk is False else {"mode": "chunk", "budget": chunk}))


@check(("fsdp4tp2",), ("rows8",), long=(("fsdp8",), ("tp8",), ("all",), ("rows2tp4",)))
def frozen_head_gets_another_gradient(name):
    """Also with no token ignored or padded: then the label rows fill their array to its end."""
    some = problem(256, 264, 16, ignored=False) if name == "rows8" else tokens(264, 264, 16)
    on_mesh(name, *some, argnums=(0,), _impl="xla", softcap=2.0)


@check(("fsdp4tp2",))
def backward_pass_of_no_reduction_is_another(name):
    x, w, labels = tokens(88, 264, 16, head_layout="dv")
    cotangent = np.linspace(-2, 3, 88).astype(F32)
    on_mesh(name, x, w, labels, cotangent=cotangent, _impl="xla", reduction="none", softcap=2.0, head_layout="dv")


@check((257, "tp8"), long=((150, "all"), (1, "tp8")))
def vocabulary_that_the_axis_does_not_divide(vocab, name):
    on_mesh(name, *tokens(88, vocab, 18), _impl="xla")


@check((89, "fsdp8"), long=((3, "fsdp4tp2"), (1, "all")))
def tokens_that_the_axis_does_not_divide(n, name):
    on_mesh(name, *problem(n, 72, 16, ignored=False), _impl="xla")


@check(("fsdp8",), long=(("fsdp4tp2",), ("rows8",)))
def kernels_see_the_part_of_one_device(name):
    on_mesh(name, *tokens(89, 72, 16))
    on_mesh(name, *tokens(88, 72, 16, e_dtype=BF16, c_dtype=BF16), reduction="sum")


@check(long=((),))
def bfloat16_is_summed_in_bfloat16():
    on_mesh("fsdp4tp2", *tokens(88, 264, 16, e_dtype=BF16, c_dtype=BF16), _impl="xla")


@check(long=((),))
def gathered_table_is_kept_against_the_budget():
    from cutloss.jax import _plan

    x, w, labels = tokens(88, 264, 16)
    limit, _plan.WHOLE_TABLE_BYTES = _plan.WHOLE_TABLE_BYTES, 0
    try:
        jax.clear_caches()
        on_mesh("all", x, w, labels, _impl="xla")
    finally:
        _plan.WHOLE_TABLE_BYTES = limit
        jax.clear_caches()


@check()
def devices_with_few_tokens_weigh_as_much_as_others():
    x, w, labels = problem(64, 40, 16, ignored=False)
    labels[9:] = -100  # 8 on the first device, 1 on the second, none elsewhere
    on_mesh("fsdp8", x, w, labels, _impl="xla")
    labels[:] = -100
    value, gradients = jax.value_and_grad(
        lambda x: linear_cross_entropy(x, w, labels, mesh=mesh_of(fsdp=8), w_spec=P(None, "fsdp")))(x)
    assert value == 0 and not gradients.any()


@check()
def bad_labels_look_good_to_all_parts():
    x, w, labels = problem(16, 40, 16, ignored=False)
    labels[5] = 40
    for name in ("tp8", "fsdp4tp2"):
        axes, w_spec, x_spec = MESHES[name]
        value, gradient = jax.jit(lambda x, y: jax.vjp(
            lambda x: linear_cross_entropy(x, w, y, reduction="none", mesh=mesh_of(**axes), x_spec=x_spec,
                                           w_spec=w_spec, _impl="xla"), x))(x, labels)
        gradient = gradient(np.ones(16, F32))[0]
        assert np.isnan(value[5]) and np.isnan(gradient[5]).all(), name
        assert np.isfinite(np.delete(value, 5)).all() and np.isfinite(np.delete(gradient, 5, 0)).all(), name


# ----------------------------------------------------------------------------------------- finding out how things lie


def program_of(f, *arguments):
    return jax.jit(f).trace(*arguments).jaxpr.pretty_print(source_info=False)


X, W, Y = tokens(64, 72, 16)


@check(("arrays",), ("with",), ("set_mesh",), ("argument",))
def mesh_is_not_found(how):
    mesh = mesh_of(fsdp=4, tp=2)
    x, w, y = (jax.device_put(a, NamedSharding(mesh, s)) for a, s in ((X, P("fsdp")), (W, FSDP_TP), (Y, P("fsdp"))))
    if how == "arrays":  # outside jit they say it themselves
        compare(X, W, Y, lambda f: f(x, w, y, np.float32(1.5)))
        d_w = jax.grad(linear_cross_entropy, 1)(x, w, y)
        assert d_w.sharding.is_equivalent_to(w.sharding, 2), d_w.sharding
        return
    options = {"w_spec": FSDP_TP} | ({"mesh": mesh} if how == "argument" else {})
    context = {"with": mesh, "set_mesh": jax.set_mesh(mesh) if how == "set_mesh" else None}.get(how)
    with context or contextlib.nullcontext():
        assert "shard_map" in program_of(lambda *a: linear_cross_entropy(*a, **options), x, w, y)
        compare(X, W, Y, lambda f: jax.jit(lambda *a: f(*a, **options))(x, w, y, np.float32(1.5)))


@check()
def explicit_axes_are_refused():
    mesh = mesh_of(AxisType.Explicit, fsdp=4, tp=2)
    with jax.set_mesh(mesh):
        x, w, y = (jax.device_put(a, NamedSharding(mesh, s))
                   for a, s in ((X.reshape(8, 8, 16), P("fsdp")), (W, FSDP_TP), (Y.reshape(8, 8), P("fsdp"))))
        compare(X.reshape(8, 8, 16), W, Y.reshape(8, 8), lambda f: jax.jit(f)(x, w, y, np.float32(1.5)))
        assert "shard_map" in program_of(linear_cross_entropy, x, w, y)


@check()
def unknown_layout_is_guessed():
    mesh = mesh_of(fsdp=4, tp=2)
    x, w, y = (jax.device_put(a, NamedSharding(mesh, s)) for a, s in ((X, P("fsdp")), (W, FSDP_TP), (Y, P("fsdp"))))
    with mesh:
        assert "shard_map" not in program_of(linear_cross_entropy, x, w, y)
        compare(X, W, Y, lambda f: jax.jit(f)(x, w, y, np.float32(1.5)), _impl="xla")


@check()
def sequence_axis_is_split_or_ragged():
    """[B, L, D] over two axes, 7 tokens in a row, inside scan and remat."""
    mesh = mesh_of(data=2, seq=2, tp=2)
    x, w, y = problem(4 * 7, 72, 16)
    x, y = x.reshape(4, 7, 16), y.reshape(4, 7)
    options = {"mesh": mesh, "x_spec": P("data", "seq"), "w_spec": P("tp", "data"), "_impl": "xla"}
    compare(x, w, y, lambda f: jax.jit(f)(x, w, y, np.float32(1.5)), **{k: v for k, v in options.items() if k[0] == "_"})
    compare(x, w, y, lambda f: jax.jit(lambda *a: f(*a, **{k: v for k, v in options.items() if k[0] != "_"}))(
        x, w, y, np.float32(1.5)), _impl="xla")

    @jax.jit
    def total(w):
        @jax.checkpoint
        def body(sum, batch):
            return sum + linear_cross_entropy(*batch[:1], w, batch[1], reduction="sum", **options), None

        return jax.lax.scan(body, jnp.float32(0), (x.reshape(2, 2, 7, 16), y.reshape(2, 2, 7)))[0]

    want = dense(x.reshape(-1, 16), w, y.reshape(-1), reduction="sum", roundings=3)
    value, gradient = jax.value_and_grad(total)(w)
    close("loss", value, want.loss, want.tol_loss)
    close("d_c", gradient, want.d_c, want.tol_d_c)


@check()
def shard_map_of_the_user_is_nested():
    mesh = mesh_of(d=8)
    f = jax.shard_map(lambda x, w, y: jax.lax.psum(linear_cross_entropy(x, w, y, reduction="sum"), "d"), mesh=mesh,
                      in_specs=(P("d"), P(), P("d")), out_specs=P())
    compare(X, W, Y, lambda g: (jax.jit(f)(X, W, Y), ()), (), reduction="sum")
    bad = jax.shard_map(lambda x, w, y: linear_cross_entropy(x, w, y, w_spec=P()), mesh=mesh,
                        in_specs=(P("d"), P(), P("d")), out_specs=P())
    refused(ValueError, "inside shard_map", lambda: bad(X, W, Y))


@check(("fsdp8", 1, (0,)), ("fsdp2tp4", 1 / 4, (0, 1)), ("fsdp2tp4", 1 / 4, (0, 1), "chunk"), long=(
    ("rows2tp4", 1 / 4, (0,)), ("tp8", 0, (0,)), ("tp8", 0, (0, 1), "chunk"), ("rows2tp4", 1 / 4, (0, 1), "chunk"),
    ("all", 3 / 4, (0, 1)),  # by columns into half of half a table's tiles, then by rows into whole ones
    ("all", 3 / 4, (0, 1), "chunk")))
def table_is_gathered_for_every_token_tile(name, gathered, argnums, mode="auto"):
    """In all, and counted with the trips of their loops, collectives gather this much of the table, and reduce as much
    of its gradient; none is inside two loops."""
    axes, w_spec, x_spec = MESHES[name]
    n, v, d = 264, 264, 16
    mesh = mesh_of(**axes)
    step = jax.jit(jax.value_and_grad(lambda *a: linear_cross_entropy(
        *a, mesh=mesh, x_spec=x_spec, w_spec=w_spec, mode=mode, budget="1GiB" if mode == "chunk" else None,
        _impl="xla"), argnums))
    arguments = (((n, d), F32, x_spec), ((v, d), F32, w_spec), ((n,), np.int32, P(*x_spec[:1])))
    program = step.lower(*(jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
                           for shape, dtype, spec in arguments)).compile()
    report = hlo.scan(program.as_text(), vocab=v, tile_tokens=16)
    assert mode == "chunk" or not report.logits, report.logits
    table = v * d * 4
    kinds = {kind: sum(c.total_bytes for c in report.collectives if c.kind == kind and c.bytes > 8 * 4)
             for kind in ("all-gather", "reduce-scatter", "all-reduce")}
    assert kinds["all-gather"] == gathered * table, hlo.table(report)
    assert kinds["reduce-scatter"] == (gathered * table if 1 in argnums else 0), hlo.table(report)
    # Three numbers and, for the gradient of x, a hidden state a token, over the vocabulary's parts.
    assert kinds["all-reduce"] <= 272 * 4 * (3 + d), hlo.table(report)
    assert all(c.depth <= 1 for c in report.collectives), hlo.table(report)


def refused(error, text, f):
    try:
        f()
    except error as caught:
        assert text in str(caught), caught
    else:
        raise AssertionError(f"not refused: {text}")


@check()
def bad_mesh_or_spec_is_accepted():
    mesh = mesh_of(fsdp=4, tp=2)
    for error, text, options in (
        (TypeError, "mesh: got str, a jax.sharding.Mesh", {"mesh": "fsdp"}),
        (ValueError, "there is none: pass mesh=", {"w_spec": P("fsdp")}),
        (ValueError, "w_spec: 'fdsp' is no axis of the mesh, which has 'fsdp', 'tp'", {"mesh": mesh, "w_spec": P("fdsp")}),
        (ValueError, "3 entries for an array of 2 axes", {"mesh": mesh, "w_spec": P("fsdp", None, None)}),
        (TypeError, "w_spec: got str", {"mesh": mesh, "w_spec": "fsdp"}),
        (ValueError, "names 'tp' twice", {"mesh": mesh, "w_spec": ("tp", "tp")}),
        (ValueError, "pass its PartitionSpec", {"mesh": mesh}),
    ):
        refused(error, text, lambda: jax.jit(lambda *a: linear_cross_entropy(*a, **options))(X, W, Y))


if __name__ == "__main__":
    check.main()
