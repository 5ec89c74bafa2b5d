"""Compiles the loss for TPUs that are not there, with the compiler in libtpu, and prints one JSON line for each case: its
name, memory and traffic. A program of its own: libtpu is set up by environment variables and held by one process.

    tpu_checks.py CASE...
"""

from __future__ import annotations

import json
import os
import sys

if __name__ == "__main__":
    # No metadata server, no other host; and no lock, since nothing here touches a device.
    os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost",
                   "TPU_ACCELERATOR_TYPE": "v5litepod-4", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cutloss.jax import hlo, linear_cross_entropy

TOKENS, HIDDEN, VOCAB = 8192, 640, 262144  # Gemma 3 270M

FROZEN, TRAINABLE = (0,), (0, 1)
# name: chips, fsdp, tp, what is differentiated, options
CASES = {
    "1 frozen": ("v5e:2x2", 1, 1, FROZEN, {}),
    "1 trainable": ("v5e:2x2", 1, 1, TRAINABLE, {}),
    "fsdp4 frozen": ("v5e:2x2", 4, 1, FROZEN, {}),
    "fsdp2tp2 frozen": ("v5e:2x2", 2, 2, FROZEN, {}),
    "tp4 frozen": ("v5e:2x2", 1, 4, FROZEN, {}),
    "fsdp8 frozen": ("v5e:2x4", 8, 1, FROZEN, {}),
    "fsdp4tp2 frozen": ("v5e:2x4", 4, 2, FROZEN, {}),
    "tp8 frozen": ("v5e:2x4", 1, 8, FROZEN, {}),
    "fsdp4 trainable": ("v5e:2x2", 4, 1, TRAINABLE, {}),
    "fsdp2tp2 trainable": ("v5e:2x2", 2, 2, TRAINABLE, {}),
    "tp4 trainable": ("v5e:2x2", 1, 4, TRAINABLE, {}),
    "fsdp8 trainable": ("v5e:2x4", 8, 1, TRAINABLE, {}),
    "fsdp4tp2 trainable": ("v5e:2x4", 4, 2, TRAINABLE, {}),
    "tp8 trainable": ("v5e:2x4", 1, 8, TRAINABLE, {}),
    "1 chunk": ("v5e:2x2", 1, 1, TRAINABLE, {"budget": "1800MiB"}),
    "fsdp4 chunk": ("v5e:2x2", 4, 1, TRAINABLE, {"budget": "2200MiB"}),
    "tp4 chunk": ("v5e:2x2", 1, 4, TRAINABLE, {"budget": "600MiB"}),
    "fsdp8 trainable by tile": ("v5e:2x4", 8, 1, TRAINABLE, {"vocab": 50257 + 7, "budget": "24MiB"}),
    "fsdp4tp2 ragged": ("v5e:2x4", 4, 2, FROZEN, {"vocab": VOCAB + 1, "tokens": 4 * 1023}),
    "fsdp2tp4 4B": ("v5e:2x4", 2, 4, FROZEN, {"hidden": 2560}),
    "fsdp2tp2 options": ("v5e:2x2", 2, 2, FROZEN, {
        "label_smoothing": 0.1, "z_loss": 1e-4, "softcap": 30.0, "shift": 1, "metrics": ("entropy", "argmax", "top_k=5")}),
    "v6e frozen": ("v6e:2x2", 1, 1, FROZEN, {"vocab": 65536}),
    "v5p frozen": ("v5p:2x2x1", 1, 1, FROZEN, {"vocab": 65536}),
}


def compiled(chips, fsdp, tp, argnums, tokens=TOKENS, hidden=HIDDEN, vocab=VOCAB, **options):
    devices = topologies.get_topology_desc(chips, platform="tpu").devices
    mesh = Mesh(np.array(devices[: fsdp * tp]).reshape(fsdp, tp), ("fsdp", "tp"))
    table = P("tp" if vocab % tp == 0 else None, "fsdp")

    def loss(x, w, labels):
        return linear_cross_entropy(x, w, labels, mesh=mesh, x_spec=P("fsdp"), w_spec=table, **options)

    arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec)) for shape, dtype, spec in (
        ((tokens, hidden), jnp.bfloat16, P("fsdp")), ((vocab, hidden), jnp.bfloat16, table),
        ((tokens,), jnp.int32, P("fsdp")))]
    step = jax.value_and_grad(loss, argnums, has_aux="metrics" in options)
    return jax.jit(step).lower(*arguments).compile(), vocab


def main() -> None:
    for name in sys.argv[1:]:
        chips, fsdp, tp, argnums, options = CASES[name]
        program, vocab = compiled(chips, fsdp, tp, argnums, **options)
        report = hlo.scan(program.as_text(), vocab=vocab, memory=program.memory_analysis())
        print(json.dumps({"name": name, "text": hlo.table(report), **report.to_json()}), flush=True)


if __name__ == "__main__":
    main()
