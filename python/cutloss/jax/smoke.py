"""Does the loss come out right over all devices there are, on one host or many? Tells before a long run does.

    python -m cutloss.jax.smoke                                                  # this host's devices
    python -m cutloss.jax.smoke --distributed                                    # on every host of a TPU pod
    python -m cutloss.jax.smoke --coordinator HOST:PORT --processes 2 --process 0    # ... and --process 1

Every host computes the loss and both gradients of a small head over several meshes of all devices, looks at its own
parts of them, and compares with the dense loss in NumPy. Ends with 0 if all agree, 1 if not, 2 if it cannot start.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

# Sums of at most K = N + V + D + 16 rounded terms are off by at most K * 2^-24 of their largest. K is below 1000 on up to
# 8 devices: 6e-5 in the worst case. On more devices roundings of many more terms still mostly cancel.
TOLERANCE = 6e-5


def problem(tokens: int, vocab: int, hidden: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = (3 * rng.standard_normal((tokens, hidden)) / np.sqrt(hidden)).astype(np.float32)
    w = rng.standard_normal((vocab, hidden)).astype(np.float32)
    labels = rng.integers(0, vocab, tokens).astype(np.int32)
    labels[rng.random(tokens) < 0.2] = -100
    return x, w, labels


def dense(x: np.ndarray, w: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The mean loss and its gradients, in float64."""
    x, w = x.astype(np.float64), w.astype(np.float64)
    valid = labels >= 0
    z = x @ w.T
    z -= z.max(axis=1, keepdims=True)
    p = np.exp(z)
    total = p.sum(axis=1, keepdims=True)
    chosen = np.arange(len(w)) == labels[:, None]
    loss = ((np.log(total) - z) * chosen).sum() / valid.sum()
    dz = np.where(valid[:, None], p / total - chosen, 0) / valid.sum()
    return loss, dz @ w, dz.T @ x


def meshes(devices: int) -> Iterator[tuple[int, int]]:
    """(fsdp, tp): all of one, all of the other, and the one between that is nearest to square."""
    between = max(k for k in range(1, devices + 1) if devices % k == 0 and k * k <= devices)
    yield from dict.fromkeys([(devices, 1), (devices // between, between), (1, devices)])


def error_of(array: Any, wanted: np.ndarray) -> float:
    """The largest difference in the parts that this process holds, in units of the largest entry."""
    worst = max(np.abs(np.asarray(s.data, np.float64) - wanted[s.index]).max() for s in array.addressable_shards)
    return float(worst / np.abs(wanted).max())


def check(fsdp: int, tp: int, impl: str = "auto") -> dict[str, float]:
    import jax
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    from . import linear_cross_entropy

    mesh = jax.make_mesh((fsdp, tp), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
    x, w, labels = problem(4 * fsdp, 24 * tp + 264 // tp * tp, 8 * fsdp)
    tokens, table = PartitionSpec("fsdp"), PartitionSpec("tp", "fsdp")

    def put(array: np.ndarray, spec: PartitionSpec) -> jax.Array:
        return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda index: array[index])

    def loss(x: jax.Array, w: jax.Array, labels: jax.Array) -> jax.Array:
        return linear_cross_entropy(x, w, labels, mesh=mesh, x_spec=tokens, w_spec=table, _impl=impl)

    arguments = put(x, tokens), put(w, table), put(labels, tokens)
    # JAX multiplies f32 in bf16 on TPU unless told otherwise.
    with jax.default_matmul_precision("highest"):
        value, gradients = jax.jit(jax.value_and_grad(loss, (0, 1)))(*arguments)
    wanted = dense(x, w, labels)
    names = ("loss", "gradient of x", "gradient of w")
    return {"value": float(value), **{n: error_of(a, np.asarray(b)) for n, a, b in zip(names, (value, *gradients), wanted)}}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m cutloss.jax.smoke", description=__doc__.splitlines()[0])
    parser.add_argument("--distributed", action="store_true", help="find the other hosts by the cluster's own means")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens")
    parser.add_argument("--processes", type=int, help="how many there are")
    parser.add_argument("--process", type=int, help="which one this is, from 0")
    parser.add_argument("--xla", action="store_true", help="on CPU: what runs on TPU and GPU, instead of the kernels")
    parser.add_argument("--json", action="store_true", help="print the errors as JSON")
    options = parser.parse_args(arguments)
    by_hand = [options.coordinator, options.processes, options.process]
    if any(a is not None for a in by_hand) and (None in by_hand or options.distributed):
        parser.error("--coordinator, --processes and --process go together, and without --distributed")
    import jax

    try:
        if options.distributed:
            jax.distributed.initialize()
        elif options.coordinator:
            jax.distributed.initialize(options.coordinator, options.processes, options.process,
                                       cluster_detection_method="deactivate")
        devices = jax.device_count()
    except (RuntimeError, ValueError) as error:
        print(f"error: cannot start: {error}", file=sys.stderr)
        return 2
    results = {f"fsdp {fsdp} x tp {tp}": check(fsdp, tp, "xla" if options.xla else "auto")
               for fsdp, tp in meshes(devices)}
    wrong = [name for name, found in results.items()
             if not all(found[key] <= TOLERANCE for key in found if key != "value")]  # also true for NaN
    if options.json:
        print(json.dumps(results))
    else:
        print(f"process {jax.process_index()} of {jax.process_count()}, {jax.local_device_count()} of {devices} devices "
              f"({jax.devices()[0].device_kind}); largest relative errors:")
        for name, found in results.items():
            errors = ", ".join(f"{key} {found[key]:.1e}" for key in found if key != "value")
            print(f"  {name}: {errors}{'  WRONG' if name in wrong else ''}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
