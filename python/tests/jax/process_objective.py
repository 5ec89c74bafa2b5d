"""The objective's options over all devices of several processes, against the dense one in float64.

    process_objective.py HOST:PORT PROCESSES PROCESS      prints {mesh: loss} as JSON; fails where a part of it is wrong
"""

from __future__ import annotations

import json
import sys

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from mesh_checks import MESHES, mesh_of
from mesh_objective import arguments, step
from objective import dense, near
from oracle import F32

OPTIONS = {"softcap": 3.0, "label_smoothing": 0.15, "z_loss": 0.02, "logit_scale": 0.7, "shift": 1}


def parts_near(name, array, wanted, tolerance):
    """The parts that this process holds."""
    assert array.shape == wanted.shape, name
    for shard in array.addressable_shards:
        near(name, np.asarray(shard.data), wanted[shard.index], np.broadcast_to(tolerance, wanted.shape)[shard.index])


def check(name, impl):
    axes, w_spec, x_spec = MESHES[name]
    mesh = mesh_of(**axes)
    x, w, labels, bias, arrays = arguments(96, 264, 16, soft=False)
    lse_cotangent = np.random.default_rng(5).standard_normal(96).astype(F32)
    want = dense(x, w, labels, bias=bias, cotangent=F32.type(1.5), lse_cotangent=lse_cotangent, **arrays, **OPTIONS)

    def put(array, spec=P()):
        return jax.make_array_from_callback(np.shape(array), NamedSharding(mesh, spec), lambda index: array[index])

    rows = P(*x_spec[:1])
    placed = {"token_weights": put(arrays["token_weights"], rows), "class_weights": put(arrays["class_weights"])}
    loss, found, gradients = step(
        put(x, x_spec), put(w, w_spec), put(labels, rows), put(bias), placed, put(np.asarray(1.5, F32)),
        put(lse_cotangent, rows), (0, 1, 2), mesh=mesh, w_spec=w_spec, x_spec=x_spec, metrics=("lse",), _impl=impl,
        **OPTIONS,
    )  # fmt: skip
    tol = want["tol"]
    parts_near("loss", loss, np.asarray(want["loss"]), tol["loss"])
    parts_near("lse", found["lse"], want["lse"], tol["lse"])
    for key, gradient in zip(("d_e", "d_c", "d_bias"), gradients, strict=True):
        parts_near(key, gradient, want[key], tol[key])
    return float(loss)


def main() -> None:
    coordinator, processes, process = sys.argv[1], *map(int, sys.argv[2:])
    if processes > 1:
        jax.distributed.initialize(coordinator, processes, process, cluster_detection_method="deactivate")
    jax.config.update("jax_disable_most_optimizations", True)
    runs = [("fsdp8", "auto"), ("fsdp4tp2", "xla"), ("tp8", "xla")]
    print(json.dumps({f"{name} {impl}": check(name, impl) for name, impl in runs}))


if __name__ == "__main__":
    main()
