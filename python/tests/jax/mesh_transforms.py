"""JAX's transformations, the policies on odd input and the check of labels, over 8 virtual devices.

    mesh_transforms.py short|long [-v] [-k PART]
"""

from __future__ import annotations

import mesh_runner

if __name__ == "__main__":
    mesh_runner.eight_devices()

import functools

import jax
import numpy as np
from jax.experimental import checkify
from jax.sharding import NamedSharding
from mesh_checks import MESHES, refused, tokens
from mesh_objective import EVERY_METRIC, arguments, spec_options
from oracle import F32
from policies import VALUES, check_values
from policies import arguments as policy_arguments

from cutloss.jax import linear_cross_entropy

check = mesh_runner.Checks()


def equal(got, want):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=4e-6, atol=4e-6), got, want)


def stacked(trees):
    return jax.tree.map(lambda *a: np.stack(a), *trees)


@check(("fsdp4tp2",), long=tuple((name,) for name in MESHES if name != "fsdp4tp2"))
def vmap_is_not_a_loop(name):
    x, w, labels = tokens(40, 72, 16)
    xs, ys = np.stack([x, 2 * x]), np.stack([labels, np.roll(labels, 1)])

    def f(x, w, y):
        return linear_cross_entropy(x, w, y, softcap=3.0, _impl="xla", **spec_options(name))

    step = jax.jit(jax.value_and_grad(f, (0, 1)))
    want = stacked([step(x, w, y) for x, y in zip(xs, ys)])
    equal(jax.jit(jax.vmap(jax.value_and_grad(f, (0, 1)), (0, None, 0)))(xs, w, ys), want)
    shared = jax.jit(jax.grad(lambda w, xs, ys: jax.vmap(f, (0, None, 0))(xs, w, ys).sum()))(w, xs, ys)
    equal(shared, want[1][1].sum(0))


@check(long=(("fsdp4tp2", False), ("fsdp4tp2", True), ("rows8", False), ("tp8", True)))
def vmap_mixes_up_the_options_of_its_batch(name, soft):
    x, w, labels, bias, arrays = arguments(40, 72, 16, soft)
    targets = arrays["soft_targets"] if soft else labels
    some = x, targets, arrays["token_weights"], bias
    batch = jax.tree.map(lambda a: np.stack([a, a[::-1]]), some)

    def one(x, targets, weights, bias):
        def f(x, w, bias):
            given = {"soft_targets": targets} if soft else {"labels": targets}
            return linear_cross_entropy(x, w, token_weights=weights, bias=bias, z_loss=0.02, shift=1,
                                        metrics=EVERY_METRIC, _impl="xla", **given, **spec_options(name))

        return jax.value_and_grad(f, (0, 1, 2), has_aux=True)(x, w, bias)

    single = jax.jit(one)
    equal(jax.jit(jax.vmap(one))(*batch), stacked([single(*jax.tree.map(lambda a: a[k], batch)) for k in (0, 1)]))


@check(long=(("fsdp4tp2",), ("rows8",), ("tp8",), ("all",)))
def wide_integers_or_donated_buffers_change_a_gradient(name):
    x, w, labels = tokens(40, 72, 16)
    options = spec_options(name)
    step = jax.jit(jax.value_and_grad(functools.partial(linear_cross_entropy, _impl="xla", **options), (0, 1)))
    want = step(x, w, labels)
    with jax.enable_x64(True):
        got = step(x, w, labels.astype(np.int64))
        assert all(a.dtype == F32 for a in jax.tree.leaves(got))
        equal(got, want)

    def train(x, w, labels):
        return jax.tree.map(lambda a, g: a - 0.5 * g, (x, w), step(x, w, labels)[1])

    put = [jax.device_put(a, NamedSharding(options["mesh"], spec))
           for a, spec in ((x, options["x_spec"]), (w, options["w_spec"]))]
    trained = jax.jit(train, donate_argnums=(0, 1))(*put, labels)
    assert all(a.is_deleted() for a in put)
    equal(trained, (x - 0.5 * want[1][0], w - 0.5 * want[1][1]))


# What makes another program: compiling takes most of the time.
STATIC = ("tokens", "denominator", "ignore_index", "label_smoothing", "soft_padding")


@check(("fsdp4tp2", False), long=(("fsdp4tp2", True), ("fsdp8", True), ("tp4rows2", True), ("all", True)))
def a_rules_value_differs(name, every):
    """Of 12 ids and 8 hidden numbers, so that axes of 2 and 4 split the table. Rules that change values alone share one
    program, and are those that are tried where not `every` one is."""
    @functools.partial(jax.jit, static_argnames=("ignore_index", "label_smoothing"))
    def step(e, c, labels, denominator=None, soft_targets=None, **options):
        def f(e, c):
            loss, metrics = linear_cross_entropy(e, c, labels, soft_targets=soft_targets, denominator=denominator,
                                                 metrics="valid_count", _impl="xla", **options, **spec_options(name))
            return loss, metrics["valid_count"]

        return jax.value_and_grad(f, (0, 1), has_aux=True)(e, c)

    for policy in VALUES:
        if not every and any(word in policy["set"] for word in STATIC):
            continue
        given = policy["set"] | {"vocab": 12, "hidden": 8}
        if policy["set"].get("label", [0, 0])[1] == 11:  # the first that is outside
            given["label"] = [policy["set"]["label"][0], 12]
        e, c, labels, options = policy_arguments(given)
        options.pop("nan_labels", None)
        options.setdefault("token_weights", np.ones(len(e), F32))
        options.setdefault("bias", np.zeros(12, F32))
        if labels is not None:
            options.setdefault("class_weights", np.ones(12, F32))
        try:
            (loss, count), gradients = step(e, c, labels, **options)
            check_values(policy, loss, *gradients, count)
        except AssertionError as error:
            raise AssertionError(f"{policy['name']}: {error}") from error


@check(("fsdp4tp2",), long=(("rows8",), ("tp8",), ("all",)))
def a_bad_label_passes_the_check(name):
    x, w, labels = tokens(40, 72, 16)
    labels = labels.astype(np.int32)
    step = jax.jit(checkify.checkify(jax.value_and_grad(functools.partial(
        linear_cross_entropy, check_labels=True, _impl="xla", **spec_options(name)))))
    error, got = step(x, w, labels)
    error.throw()
    equal(got, jax.value_and_grad(linear_cross_entropy)(x, w, labels))
    labels[33] = 72
    text = "labels[33] is 72, outside [0, vocab) = [0, 72) and not ignore_index (-100)"
    refused(ValueError, text, lambda: linear_cross_entropy(x, w, labels))
    refused(ValueError, text, lambda: step(x, w, labels)[0].throw())


if __name__ == "__main__":
    check.main()
