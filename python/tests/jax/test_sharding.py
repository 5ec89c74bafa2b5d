"""The loss over two devices: under shard_map with and without type checks, and left to the partitioner."""

import processes

PROGRAM = """
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from oracle import problem
from cutloss.jax import linear_cross_entropy

jax.config.update("jax_disable_most_optimizations", True)
x, w, labels = problem(32, 75, 16)
mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
for impl in ("cpu", "xla"):
    def loss(x, w, labels):
        return linear_cross_entropy(x, w, labels, reduction="sum", _impl=impl)

    value, want = jax.jit(jax.value_and_grad(loss, (0, 1)))(x, w, labels)

    def check(what, got):
        for a, b in zip(got, want):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * np.abs(b).max(), err_msg=f"{impl} {what}")

    for check_vma in (True, False):
        sharded = jax.shard_map(lambda *a: jax.lax.psum(loss(*a), "d"), mesh=mesh, in_specs=(P("d"), P(), P("d")),
                                out_specs=P(), check_vma=check_vma)
        np.testing.assert_allclose(jax.jit(sharded)(x, w, labels), value, rtol=1e-6)
        check(f"shard_map {check_vma}", jax.jit(jax.grad(sharded, (0, 1)))(x, w, labels))
    put = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in ((x, P("d")), (w, P(None, "d")), (labels, P("d")))]
    check("partitioner", jax.jit(jax.grad(loss, (0, 1)))(*put))
"""


def test_sharded_gradient_is_scaled_or_not_summed():
    processes.run("-c", PROGRAM, devices=2)
