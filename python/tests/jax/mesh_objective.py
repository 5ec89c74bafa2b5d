"""The whole objective over 8 virtual devices, against the dense one in float64.

    mesh_objective.py short|long [-v] [-k PART]
"""

from __future__ import annotations

import mesh_runner

if __name__ == "__main__":
    mesh_runner.eight_devices()

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from mesh_checks import MESHES, mesh_of, refused
from objective import dense, metrics_of, near
from oracle import BF16, F32, problem

from cutloss.jax import _plan, hlo, linear_cross_entropy

check = mesh_runner.Checks()
EVERY_METRIC = ("lse", "nll", "entropy", "argmax", "correct", "rank", "top_k=3", "mean_logits", "valid_count")


def spec_options(name):
    axes, w_spec, x_spec = MESHES[name]
    return {"mesh": mesh_of(**axes), "w_spec": w_spec, "x_spec": x_spec}


def arguments(n, v, d, soft, seed=0):
    """Arrays of a call with all options that go together, and the options that are static."""
    x, w, labels = problem(n, v, d, seed=seed)
    rng = np.random.default_rng(seed + 1)
    bias = rng.standard_normal(v).astype(F32)
    weights = rng.random(n).astype(F32)
    weights[n // 2 : n // 2 + 3] = 0
    arrays = {"token_weights": weights}
    if soft:
        ids = rng.integers(0, v, (n, 4))
        ids[::5, 1] = -100
        arrays["soft_targets"] = (ids, (rng.random((n, 4)) / 4).astype(F32))
        labels = None
    else:
        arrays["class_weights"] = rng.random(v).astype(F32)
    return x, w, labels, bias, arrays


def step(x, w, labels, bias, arrays, cotangent, lse_cotangent, argnums, **options):
    """Loss, metrics and gradients in one program, whose cotangents reach loss and lse."""
    def run(x, w, bias, labels, arrays, cotangent, lse_cotangent):
        def f(*some):
            every = [x, w, bias]
            for i, value in zip(argnums, some):
                every[i] = value
            found = linear_cross_entropy(*every[:2], labels, bias=every[2], **arrays, **options)
            return found if "metrics" in options else (found, {})

        loss, pull, found = jax.vjp(lambda *a: (lambda v: ((v[0], v[1].get("lse")), v[1]))(f(*a)),
                                    *((x, w, bias)[i] for i in argnums), has_aux=True)
        both = (jnp.broadcast_to(cotangent, loss[0].shape), lse_cotangent if "lse" in found else None)
        return loss[0], found, pull(both)

    return jax.jit(run)(x, w, bias, labels, arrays, cotangent, lse_cotangent)


def compare(x, w, labels, bias, arrays, argnums=(0, 1, 2), lse=True, sequence=0, **options):
    n = len(np.reshape(x, (-1, x.shape[-1])))
    rng = np.random.default_rng(5)
    lead = x.shape[:-1]
    cotangent = rng.standard_normal(lead).astype(F32) if options.get("reduction") == "none" else F32.type(1.5)
    lse_cotangent = rng.standard_normal(lead).astype(F32)
    if lse or options.get("mode") == "chunk":  # whose gradients a cotangent of lse forms anew
        options["metrics"] = EVERY_METRIC if lse else EVERY_METRIC[1:]
    loss, found, gradients = step(x, w, labels, bias, arrays, cotangent, lse_cotangent, argnums, **options)
    plain = {k: v for k, v in options.items() if k not in ("mesh", "w_spec", "x_spec", "metrics", "mode",
             "budget") and k[0] != "_"}
    flat = {k: tuple(a.reshape(n, -1) for a in v) if k == "soft_targets" else v.reshape(-1) for k, v in arrays.items()}
    want = dense(x.reshape(n, -1), w, None if labels is None else labels.reshape(-1), bias=bias, sequence=sequence,
                 cotangent=np.reshape(cotangent, np.shape(cotangent) and -1),
                 lse_cotangent=lse_cotangent.reshape(-1) if lse else None, **flat, **plain)
    tol = want["tol"]
    near("loss", np.reshape(loss, np.shape(want["loss"])), want["loss"], tol["loss"])
    if np.ndim(loss) == 0:
        alone = linear_cross_entropy(x, w, labels, bias=bias, **arrays, **plain)
        np.testing.assert_allclose(loss, alone, rtol=1e-6)
    for i, got in zip(argnums, gradients):
        name = ("d_e", "d_c", "d_bias")[i]
        assert got.dtype == (x, w, bias)[i].dtype and got.shape == (x, w, bias)[i].shape, name
        near(name, np.asarray(got).reshape(want[name].shape), want[name], tol[name])
        if got.dtype == F32:
            error, norm = np.linalg.norm(np.asarray(got).reshape(want[name].shape) - want[name]), np.linalg.norm(want[name])
            assert error <= 1e-5 * norm, f"{name} is off by {error:.2g} in norm, of {norm:.2g}"
    if found:
        compare_metrics(found, want, n)
    return loss, found, gradients


def compare_metrics(found, want, n):
    found = jax.tree.map(np.asarray, found)
    exact = metrics_of(want)
    counts, tol = want["counts"], want["tol"]
    if "lse" in found:
        near("lse", found["lse"].reshape(n), want["lse"], tol["lse"])
    near("nll", found["nll"].reshape(n)[counts], want["nll"][counts], tol["nll"][counts])
    near("entropy", found["entropy"].reshape(n), exact["entropy"], tol["lse"] * (1 + np.log(want["p"].shape[1])))
    for name in ("argmax", "correct", "rank"):
        np.testing.assert_array_equal(np.asarray(found[name]).reshape(n), exact[name], err_msg=name)
    ids = np.asarray(found["top_k_ids"]).reshape(n, -1)[counts]
    np.testing.assert_array_equal(ids, exact["order"][counts, :3])
    log_p = np.log(np.take_along_axis(want["p"][counts], ids, 1))
    near("top_k_logprobs", np.asarray(found["top_k_logprobs"]).reshape(n, -1)[counts], log_p, tol["lse"][counts, None] * 3)
    means = exact["mean_logits"]
    there = np.isfinite(means)
    near("mean_logits", np.asarray(found["mean_logits"])[there], means[there], np.max(tol["lse"]) * (1 + np.abs(means[there])))
    assert not np.isfinite(np.asarray(found["mean_logits"])[~there]).any()
    assert int(found["valid_count"]) == want["valid_count"]


MORE = ("rows8", "rows2tp4", "tp4rows2", "all", "same")
TWO = (3.0, None)  # with a softcap, and without


CHUNK = {"mode": "chunk", "budget": "1GiB"}


@check(("fsdp4tp2", 3.0), ("tp8", None), ("fsdp4tp2", 3.0, CHUNK), long=(
    ("fsdp4tp2", None), ("tp8", 3.0), ("tp8", None, {"mode": "chunk"}), ("tp8", 3.0, {"mode": "chunk"}),
    *((name, cap, more) for name in ("fsdp8", "fsdp2tp4", *MORE) for cap in TWO for more in ({}, CHUNK))))
def an_option_is_lost_or_summed_twice(name, cap, more={}):
    """Of two batches of tokens one that no axis divides, with everything at once: shift, weights, smoothing, z-loss."""
    x, w, labels, bias, arrays = arguments(90, 264, 16, soft=False)
    compare(x, w, labels, bias, arrays, lse=not more, logit_scale=0.7, softcap=cap, label_smoothing=0.15, z_loss=0.02,
            shift=2, _impl="xla", **more, **spec_options(name))


@check(("fsdp8", (0,)), long=(
    *((name, (0, 1, 2)) for name in ("tp8", "fsdp4tp2", "fsdp2tp4", *MORE)), *((name, (0,)) for name in ("tp8", "fsdp4tp2", "all")),
    *((name, (0, 1, 2), CHUNK) for name in ("fsdp8", "fsdp2tp4"))))
def soft_targets_are_seen_by_one_part(name, argnums, more={}):
    x, w, _, bias, arrays = arguments(90, 264, 16, soft=True)
    compare(x, w, None, bias, arrays, argnums, lse=not more, softcap=3.0, z_loss=0.02, shift=2, _impl="xla", **more,
            **spec_options(name))


@check(("fsdp4tp2", None), long=(("tp8", None), ("fsdp8", 3.0), ("rows2tp4", 3.0), ("all", None)))
def frozen_head_gets_another_gradient_with_options(name, cap):
    """Without lse: the gradient then comes out of the first pass, smoothing's constant row included."""
    x, w, labels, bias, arrays = arguments(90, 264, 16, soft=False)
    compare(x, w, labels, bias, arrays, (0,), lse=False, logit_scale=0.7, softcap=cap, label_smoothing=0.15, z_loss=0.02,
            _impl="xla", **spec_options(name))


@check(("fsdp2tp4",), long=(("fsdp8",), ("tp8",), ("all",)))
def losses_of_rows_are_another(name):
    x, w, labels, bias, arrays = arguments(90, 264, 16, soft=False)
    compare(x, w, labels, bias, arrays, reduction="none", softcap=3.0, label_smoothing=0.15, z_loss=0.02, shift=1,
            _impl="xla", **spec_options(name))


@check(("fsdp8", False), long=(("rows8", False), ("data8", False), ("fsdp8", True), ("rows8", True)))
def kernels_lose_an_option(name, soft):
    """The C++ kernels on each device's tokens."""
    x, w, labels, bias, arrays = arguments(90, 72, 16, soft)
    smoothing = {} if soft else {"label_smoothing": 0.15}
    compare(x, w, labels, bias, arrays, logit_scale=0.7, softcap=3.0, z_loss=0.02, shift=2, **smoothing,
            **spec_options(name))


@check((), long=(("none",),))
def sequences_on_two_axes_shift_over_their_end(reduction="mean"):
    """[B, L, D] with both split, L = 7 over two devices, soft targets without weights whose z-loss counts rows by itself."""
    x, w, _, bias, arrays = arguments(4 * 7, 72, 16, soft=True)
    del arrays["token_weights"]
    x = x.reshape(4, 7, 16)
    arrays["soft_targets"] = tuple(a.reshape(4, 7, 4) for a in arrays["soft_targets"])
    mesh = {"mesh": mesh_of(data=2, seq=2, tp=2), "x_spec": P("data", "seq"), "w_spec": P("tp", "data")}
    compare(x, w, None, bias, arrays, sequence=7, shift=2, z_loss=0.02, reduction=reduction, _impl="xla", **mesh)


@check()
def denominator_is_taken_for_each_device():
    x, w, labels, bias, arrays = arguments(90, 72, 16, soft=False)
    for impl in ("xla", "auto"):
        compare(x, w, labels, bias, arrays, lse=False, denominator=np.float32(7), _impl=impl, **spec_options("fsdp8"))


@check(long=(("fsdp4tp2",), ("rows8",)))
def gradient_of_a_narrow_bias_is_rounded_before_it_is_summed(name):
    x, w, labels, bias, arrays = arguments(90, 264, 16, soft=False)
    compare(x, w, labels, bias.astype(BF16), arrays, lse=False, **spec_options(name))


@check(("tp8",), long=(("rows8",),))
def masked_ids_of_one_part_make_nan(name):
    """All ids of the last device, and all but one of the first."""
    x, w, labels = problem(16, 64, 8)
    bias = np.where((np.arange(64) % 56 > 0), 0, -np.inf).astype(F32)
    bias[1:8] = bias[56:] = -np.inf
    bias[0], labels = 0, np.where(labels < 0, -100, 8 + labels % 40)

    def f(x, w, b, **options):
        return linear_cross_entropy(x, w, labels, bias=b, _impl="xla", metrics="entropy", **options)

    got, want = (jax.jit(jax.value_and_grad(functools.partial(f, **options), (0, 1, 2), has_aux=True))(x, w, bias)
                 for options in (spec_options(name), {}))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, want)
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(got)) and not np.any(got[1][2][56:])


@check()
def equal_logits_of_two_parts_swap_in_the_top_k():
    x, w = np.ones((8, 8), F32), np.ones((64, 8), F32)
    for name in ("rows2tp4", "tp4rows2"):
        _, found = jax.jit(functools.partial(linear_cross_entropy, metrics=("top_k=5", "argmax", "rank"), _impl="xla",
                                             **spec_options(name)))(x, w, np.arange(8))
        np.testing.assert_array_equal(found["top_k_ids"], np.broadcast_to(np.arange(5), (8, 5)), err_msg=name)
        assert not found["argmax"].any() and not found["rank"].any()


@check((False,), long=((True,),))
def explicit_axes_refuse_an_option(soft):
    """Also where an axis gets tokens beside what x says, and gradients must lie as what they are of."""
    mesh = mesh_of(AxisType.Explicit, fsdp=4, tp=2)
    x, w, labels, bias, arrays = arguments(64, 72, 16, soft)
    with jax.set_mesh(mesh):
        def put(a, spec):
            return jax.device_put(a, NamedSharding(mesh, spec))

        for table in (P("tp", "fsdp"), P(None, "fsdp")):
            compare(put(x, P("fsdp")), put(w, table), labels if soft else put(labels, P("fsdp")), bias, arrays, shift=1,
                    z_loss=0.1, _impl="xla")


@check((None, 1), long=((0, 3),))
def an_option_gathers_or_sums_for_every_token_tile(budget, gathers):
    """Over three axes: the half of the table that a device needs is gathered once and kept, or for each of the three
    passes that softcap, the gradient of w and rank make of it; nothing is inside two loops, and no logits are stored."""
    n, v, d = 264, 240, 16  # five whole tiles of 24 ids on each device
    specs = {"mesh": mesh_of(data=2, fsdp=2, tp=2), "x_spec": P(("data", "fsdp")), "w_spec": P("tp", "fsdp")}
    options = {"softcap": 3.0, "label_smoothing": 0.1, "z_loss": 0.01, "shift": 1, "_impl": "xla",
               "metrics": ("entropy", "argmax", "top_k=3", "rank")}

    def loss(x, w, labels, bias, weights):
        limit, _plan.WHOLE_TABLE_BYTES = _plan.WHOLE_TABLE_BYTES, budget if budget is not None else 1 << 30
        try:
            return linear_cross_entropy(x, w, labels, bias=bias, token_weights=weights, **options, **specs)
        finally:
            _plan.WHOLE_TABLE_BYTES = limit

    def lie(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(specs["mesh"], spec))

    tokens = P(("data", "fsdp"))
    program = jax.jit(jax.value_and_grad(loss, (0, 1, 3), has_aux=True)).lower(
        lie((n, d), F32, tokens), lie((v, d), F32, specs["w_spec"]), lie((n,), np.int32, tokens), lie((v,), F32, P()),
        lie((n,), F32, tokens)).compile()
    report = hlo.scan(program.as_text(), vocab=v, tile_tokens=16)
    assert not report.logits, report.logits
    assert all(c.depth <= 1 for c in report.collectives), hlo.table(report)
    moved = {kind: sum(c.total_bytes for c in report.collectives if c.kind == kind and c.loops)
             for kind in ("all-gather", "all-reduce")}
    assert moved["all-gather"] == gathers * v * d * 4 / 2, hlo.table(report)
    # In loops of all-reduces only the sum of the table's gradient over `data`, whose parts are summed over `fsdp` before.
    assert moved["all-reduce"] <= v * d * 4 / 4, hlo.table(report)


@check()
def filters_run_over_parts_of_their_order():
    x, w, labels = problem(16, 24, 8)
    for options in ({"filter_eps": 1.0}, {"filter": "certified", "tolerance": 1e-3}):
        refused(ValueError, "does not go with mesh", lambda: linear_cross_entropy(
            x, w, labels, **options, **spec_options("fsdp8")))


if __name__ == "__main__":
    check.main()
