"""What is in the lowered programs: no logits, no gradient that nobody asked for, and memory that XLA knows of."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import BF16, F32
from programs import is_product, most_elements, outside_branches, results, shapes

from cutloss.jax import linear_cross_entropy
from cutloss.jax._hlo_text import parse

IMPLEMENTATIONS = ["cpu", "xla"]
N, V, D = 4104, 16384 + 100, 24  # five token tiles of the XLA lowering, four vocabulary tiles and a tail


def arguments(n=N, dtype=F32):
    return (jax.ShapeDtypeStruct((n, D), dtype), jax.ShapeDtypeStruct((V, D), dtype),
            jax.ShapeDtypeStruct((n,), np.int32))


def step(argnums, impl, **options):
    f = functools.partial(linear_cross_entropy, _impl=impl, **options)
    return jax.jit(jax.value_and_grad(lambda *a: f(*a).sum(), argnums) if argnums else f)


@functools.cache
def compiled_step(argnums, impl, reduction, n=N):
    return step(argnums, impl, reduction=reduction, budget="8MiB").lower(*arguments(n)).compile()


EVERY_STEP = pytest.mark.parametrize("reduction,argnums", [
    (reduction, argnums) for reduction in ("mean", "none") for argnums in ((), (0,), (1,), (0, 1))])


@EVERY_STEP
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_logits_are_stored(impl, argnums, reduction):
    compiled = compiled_step(argnums, impl, reduction)
    text = compiled.as_text()
    assert not [s for s in shapes(text) if len(s) > 1 and N in s and max(s) > V // 4], "tokens x vocabulary"
    assert most_elements(text) <= max(1024 * 4096, 8 << 20, V * D)
    assert compiled.memory_analysis().temp_size_in_bytes < N * V * 4 / 2


SHORT = (("mean", (0,)), ("mean", (0, 1)), ("none", (0, 1)))


@pytest.mark.parametrize("impl,reduction,argnums", [
    pytest.param(impl, *some, marks=[] if impl == "cpu" or some in SHORT else [pytest.mark.long])
    for impl in IMPLEMENTATIONS for some in EVERY_STEP.args[1]])
def test_memory_grows_with_tokens_by_more_than_the_gradient(impl, reduction, argnums):
    temps = [compiled_step(argnums, impl, reduction, n).memory_analysis().temp_size_in_bytes - n * (4 * D * 4 + 64)
             for n in (N, 4 * N)]
    assert temps[1] <= temps[0] * 1.1, temps  # beyond four N x D arrays and 64 bytes a token, nothing


@EVERY_STEP
def test_tiles_of_ignored_tokens_are_multiplied_all_the_same(argnums, reduction):
    """All products are in a branch that XLA's own passes have left one: a select would compute both sides."""
    program = parse(compiled_step(argnums, "xla", reduction).as_text())
    every = [i for c in program.computations.values() for i in c.instructions.values() if is_product(i)]
    assert len(every) >= 2  # of whole tiles and of the last
    assert not [i.name for i in outside_branches(program, program.entry) if is_product(i)]


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_frozen_head_computes_its_gradient(impl, reduction):
    x, w, y = arguments()
    frozen = step((0,), impl, reduction=reduction).lower(x, w, y).as_text()
    both = step((0, 1), impl, reduction=reduction).lower(x, w, y).as_text()
    assert results(frozen, (V, D)) == 0
    assert results(both, (V, D)) > 0


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_unused_gradient_of_x_is_computed(impl):
    text = step((1,), impl).lower(*arguments()).as_text()
    if impl == "cpu":
        assert "want_d_e = true" not in text
    else:  # logits; logits and dW; each for the whole tiles and for the tail
        assert text.count("stablehlo.dot_general") == 2 * 1 + 2 * 2


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_evaluation_computes_gradients(impl):
    text = step((), impl).lower(*arguments()).as_text()
    if impl == "cpu":
        assert "want_d_e = false" in text and "want_d_e = true" not in text and "want_d_c = true" not in text
    else:
        assert text.count("stablehlo.dot_general") == 2


def test_frozen_head_inside_a_model_computes_its_gradient():
    """The head is a leaf of the parameters, but only the adapters are differentiated: through jit, remat and scan."""
    def loss(adapter, w, x, y):
        @jax.checkpoint
        def chunk(total, batch):
            return total + linear_cross_entropy(batch[0] @ adapter, w, batch[1], reduction="sum"), None

        return jax.lax.scan(jax.jit(chunk), jnp.float32(0), (x, y))[0]

    text = jax.jit(jax.grad(loss)).lower(
        jax.ShapeDtypeStruct((D, D), F32), jax.ShapeDtypeStruct((V, D), F32),
        jax.ShapeDtypeStruct((4, 64, D), F32), jax.ShapeDtypeStruct((4, 64), np.int32)).as_text()
    assert "want_d_e = true" in text and "want_d_c = true" not in text


def test_workspace_is_hidden_from_xla():
    from cutloss.jax import _ffi, _options

    options = _options.Options()
    x, w, y = arguments()
    plan, _ = _ffi.make_plan(options, _options.Wants(True, True), x, w, y)
    temp = step((0, 1), "auto").lower(x, w, y).compile().memory_analysis().temp_size_in_bytes
    assert plan.workspace_bytes <= temp <= plan.workspace_bytes + 2 * N * D * 4 + 2 * V * D * 4 + (1 << 20)


def test_ids_in_64_bits_are_copied_beside_xlas_memory():
    """JAX has them in 32. For each token two are 16 bytes, before they are cut to 8; an order of the vocabulary is 8 V."""
    def temp(**options):
        f = functools.partial(linear_cross_entropy, _impl="cpu", **options)
        return jax.jit(f).lower(*arguments()).compile().memory_analysis().temp_size_in_bytes

    assert temp(metrics=("argmax", "rank")) - temp() >= 16 * N
    gradient = jax.jit(jax.grad(functools.partial(linear_cross_entropy, filter="certified", epsilon=1e-3, _impl="cpu")))
    with_order, without = (gradient.lower(*arguments(), **options).compile().memory_analysis().temp_size_in_bytes
                           for options in ({"vocab_sort_indices": jax.ShapeDtypeStruct((V,), np.int32)}, {}))
    assert with_order - without >= 8 * V


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("argnums", [(), (0,), (0, 1)])
def test_accelerator_program_calls_into_the_cpu(argnums, dtype):
    traced = step(argnums, "auto").trace(*arguments(dtype=dtype))
    for platform in ("tpu", "cuda"):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert "cutloss" not in "".join(l for l in text.splitlines() if "custom_call" in l)
        assert "dot_general" in text
    text = traced.lower(lowering_platforms=("cpu",)).as_text()
    assert "cutloss_linear_cross_entropy" in text and "dot_general" not in text


def test_table_is_copied_to_float32():
    text = step((0,), "xla").lower(*arguments(dtype=BF16)).as_text()
    assert f"tensor<{V}x{D}xf32>" not in text
