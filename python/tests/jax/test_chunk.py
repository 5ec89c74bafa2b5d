"""The XLA lowering's mode chunk: which problems take it, what it costs, and sums of several chunks."""

import functools
import re

import jax
import numpy as np
import pytest
from mesh_objective import arguments, compare
from oracle import F32

import cutloss
from cutloss.jax import _ffi, _gradients, _plan, _tiles, linear_cross_entropy
from cutloss.jax._options import Options, Wants

MIB = 1 << 20
TRAINABLE, FROZEN = Wants(True, True), Wants(True, False)
# Gemma 3 270M's head on a v5e, and a quarter of its tokens and of its hidden dimension on four
ALONE = _plan.Problem(tokens=8192, hidden=640, rows=262144, parts=1, width=2, gathers=False, splits_tokens=False,
                      soft=False, known=False, chip="TPU v5 lite")
PART = ALONE._replace(tokens=2048, gathers=True, splits_tokens=True)


def plan(wants=TRAINABLE, p=ALONE, **options):
    return _plan.make(Options(**options), wants, p)


@pytest.mark.parametrize("mode,chunks,wants,p,options", [
    ("recompute", 1, TRAINABLE, ALONE, {}),
    ("recompute", 1, TRAINABLE, ALONE, {"budget": 1600 * MIB}),  # 640 of the sum of dw, 1024 of a chunk
    ("chunk", 8, TRAINABLE, ALONE, {"budget": 1800 * MIB}),
    ("chunk", 1, TRAINABLE, ALONE, {"budget": 9000 * MIB}),
    ("chunk", 8, TRAINABLE, ALONE, {"mode": "chunk"}),
    ("chunk", 25, TRAINABLE, ALONE, {"mode": "chunk", "budget": 1000 * MIB}),
    ("recompute", 1, TRAINABLE, ALONE, {"mode": "recompute", "budget": 9000 * MIB}),
    ("recompute", 1, TRAINABLE, ALONE._replace(known=True), {"mode": "chunk"}),  # nothing to keep logits for
    ("recompute", 1, TRAINABLE, PART, {"budget": 1800 * MIB}),  # 2048 tokens have 2 GiB of logits
    ("chunk", 1, TRAINABLE, PART, {"budget": 2200 * MIB}),
    ("stream", 1, FROZEN, ALONE, {"budget": 9000 * MIB}),
    ("recompute", 1, FROZEN, PART._replace(soft=True), {}),
    ("chunk", 1, FROZEN, PART._replace(soft=True), {"budget": 3000 * MIB}),
    ("loss", 1, Wants(False, False), ALONE, {"mode": "chunk"}),
])
def test_another_way_is_taken(mode, chunks, wants, p, options):
    got = plan(wants, p, **options)
    assert (got.mode, got.chunks) == (mode, chunks)
    assert got.bytes <= options.get("budget", got.bytes)


def test_table_is_gathered_twice_or_kept_in_vain():
    table = 262144 * 640 * 2
    assert plan(p=PART).whole and plan(p=PART).bytes > table
    assert not plan(p=PART._replace(rows=2 * 262144)).whole
    assert not plan(p=PART, budget=300 * MIB).whole
    both = plan(p=PART, budget=2900 * MIB)
    assert both.mode == "chunk" and both.d_x_first and not both.whole  # its second pass reads no table
    soft = plan(p=PART._replace(soft=True), budget=2900 * MIB)
    assert soft.mode == "chunk" and not soft.d_x_first and soft.whole


def test_budget_that_is_named_does_not_do():
    for p, options in ((ALONE, {"budget": 1}), (ALONE, {"mode": "chunk", "budget": 500 * MIB}), (PART, {"mode": "chunk"})):
        with pytest.raises(cutloss.BudgetError, match="the XLA lowering has no plan for .* budget=") as caught:
            plan(p=p, **options)
        least = int(re.search(r"budget=(\d+)", str(caught.value))[1])
        assert plan(p=p, **options | {"budget": least}).bytes == least
        with pytest.raises(cutloss.BudgetError):
            plan(p=p, **options | {"budget": least - 1})


def test_memory_grows_with_tokens_times_vocabulary():
    for wants, mode in ((TRAINABLE, "auto"), (TRAINABLE, "chunk"), (FROZEN, "auto")):
        sizes = [plan(wants, ALONE._replace(tokens=n), mode=mode).bytes - n * (4 * 640 + 32) for n in (2**14, 2**20)]
        # The compensated sum of more than 64 chunks takes the table's gradient once more.
        assert sizes[1] - sizes[0] <= (4 * 262144 * 640 if mode == "chunk" else 4 * 4096 * 640), (wants, mode)


# ----------------------------------------------------------------------------------------------------------- programs


def test_logits_are_formed_twice():
    """FLOP of a program of one tile, where no loop hides its trips: 3u, and 4u of recompute."""
    n, v, d = 512, 2048, 256
    shapes = (jax.ShapeDtypeStruct((n, d), F32), jax.ShapeDtypeStruct((v, d), F32), jax.ShapeDtypeStruct((n,), np.int32))
    for mode, argnums, units in (("chunk", (0, 1), 3), ("chunk", (1,), 2), ("recompute", (0, 1), 4), ("auto", (0, 1), 4),
                                 ("auto", (0,), 2)):
        f = jax.value_and_grad(functools.partial(linear_cross_entropy, mode=mode, _impl="xla"), argnums)
        flops = jax.jit(f).lower(*shapes).cost_analysis()["flops"]
        assert units <= flops / (2 * n * v * d) <= units + 0.2, (mode, argnums)


@pytest.mark.parametrize("soft,cap,reduction,many", [(False, 3.0, "mean", 64), (True, None, "sum", 2)])
def test_an_option_or_a_sum_is_lost_between_chunks(soft, cap, reduction, many, small_tiles, quick_compiles, monkeypatch):
    for module in (_gradients, _plan):
        monkeypatch.setattr(module, "MANY_TILES", many)
    x, w, labels, bias, arrays = arguments(90, 75, 16, soft)
    if labels is not None:
        labels[30:60] = -100  # all of a chunk, whose logits are then those of the one before
    smoothing = {} if soft else {"label_smoothing": 0.15}
    compare(x, w, labels, bias, arrays, logit_scale=0.7, softcap=cap, z_loss=0.02, shift=2, reduction=reduction,
            mode="chunk", _impl="xla", lse=False, **smoothing)


def test_plain_sum_of_many_chunks_loses_digits(small_tiles, quick_compiles, monkeypatch):
    """One chunk's part of dw is 1, each of the other 129 adds less than half a unit in its last place."""
    monkeypatch.setattr(_plan, "CHUNK", 8)
    n = 130 * 8
    x = np.full((n, 1), 2.0**-25 / 8, F32)
    x[:8] = 1 / 8
    x[:, 0] *= 2  # p - 1 is -1/2 of two equal logits
    w = np.zeros((2, 1), F32)
    d_w = jax.grad(lambda w: linear_cross_entropy(x, w, np.zeros(n, int), reduction="sum", mode="chunk", _impl="xla"))(w)
    exact = 1 + 129 * 2.0**-25
    np.testing.assert_allclose(np.asarray(d_w)[:, 0], [-exact, exact], rtol=2 * 2.0**-24)


def test_memory_is_over_the_budget(small_tiles):
    """XLA for CPU copies what goes into a condition, so its figure is no more than near the plan's."""
    n, v, d = 256, 4096, 32
    f = jax.value_and_grad(functools.partial(linear_cross_entropy, mode="chunk", _impl="xla"), (0, 1))
    shapes = (jax.ShapeDtypeStruct((n, d), F32), jax.ShapeDtypeStruct((v, d), F32), jax.ShapeDtypeStruct((n,), np.int32))
    temp = jax.jit(f).lower(*shapes).compile().memory_analysis().temp_size_in_bytes
    p = _plan.problem(Options(), *shapes[:2], _plan.Place(), _plan.Extra(), False)
    planned = _plan.make(Options(mode="chunk"), TRAINABLE, p)
    assert planned.chunks == 8 and temp <= 2 * planned.bytes and temp < n * v * 4 / 2, (temp, planned)


# ------------------------------------------------------------------------------------------------- budgets of platforms


def lower(platform, **options):
    shapes = (jax.ShapeDtypeStruct((64, 64), F32), jax.ShapeDtypeStruct((4096, 64), F32), jax.ShapeDtypeStruct((64,), np.int32))
    f = jax.jit(jax.value_and_grad(lambda *a: linear_cross_entropy(*a, **options).sum(), (0, 1)))
    return f.trace(*shapes).lower(lowering_platforms=(platform,)).as_text()


def test_budget_is_held_against_another_platforms_program(monkeypatch):
    """The tiles of XLA take 114 KiB, the kernels 20."""
    for reduction in ("mean", "none"):
        lower("cpu", budget=50_000, reduction=reduction)
        with pytest.raises(cutloss.BudgetError, match="the smallest that works here is"):
            lower("cpu", budget=10_000, reduction=reduction)
    monkeypatch.setattr(_tiles, "default_chip", lambda: "TPU v5 lite")
    jax.clear_caches()
    for reduction in ("mean", "none"):
        with pytest.raises(cutloss.BudgetError, match="the XLA lowering has no plan"):
            lower("tpu", budget=50_000, reduction=reduction)
    make_plan = _ffi.make_plan

    def hungry(options, *rest):
        if options.budget is not None:
            raise cutloss.BudgetError("of the kernels")
        return make_plan(options, *rest)

    monkeypatch.setattr(_ffi, "make_plan", hungry)
    for reduction in ("mean", "none"):
        assert "cutloss" not in lower("tpu", budget="1MiB", reduction=reduction)
    jax.clear_caches()


def test_mode_or_budget_is_not_used():
    """Products in the program: of each kind of tile, whole and last, three; and one more of logits that are formed again."""
    x, w, labels = (jax.ShapeDtypeStruct(s, t) for s, t in (((4096, 8), F32), ((16484, 8), F32), ((4096,), np.int32)))
    for options, count in (({}, 8), ({"mode": "chunk"}, 6), ({"budget": "130MiB"}, 6), ({"budget": "20MiB"}, 8),
                           ({"budget": "130MiB", "reduction": "none"}, 8)):
        f = jax.grad(lambda *a: linear_cross_entropy(*a, _impl="xla", **options).sum(), (0, 1))
        assert jax.jit(f).lower(x, w, labels).as_text().count("stablehlo.dot_general") == count, options
