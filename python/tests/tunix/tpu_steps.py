"""Compiles whole train steps for TPUs that are not there, with the compiler in libtpu; prints one JSON line for each: what
Tunix's loss and ours plan on a chip.

    tpu_steps.py NAME,FSDP,TP,ROWS,LENGTH,RANK...       NAME: a model of Tunix's, here with two layers
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys

# No metadata server, no other host; and no lock, since nothing here touches a device.
os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost",
               "TPU_ACCELERATOR_TYPE": "v5litepod-4", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}  # fmt: skip

import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from cutloss.sft import config, fit, models, trainer

DEVICES = topologies.get_topology_desc("v5e:2x2", platform="tpu").devices


def planned(name, fsdp, tp, rows, length, rank, arm):
    settings = config.load(
        None,
        [f"model.name={name}", "model.dtype=bfloat16", "model.tokenizer=bytes", f"lora.rank={rank}", f"loss.arm={arm}"],
    )
    source = models.find(settings.model)
    source = dataclasses.replace(source, config=dataclasses.replace(source.config, num_layers=2))
    mesh = Mesh(np.array(DEVICES[: fsdp * tp]).reshape(fsdp, tp), ("fsdp", "tp"))
    with mesh:
        made = trainer.build(models.abstract(source, settings, mesh), settings, None)
        trainer.with_loss(made, settings, check=False)
        trainer.forget_values(made, mesh)
        return trainer.planned_bytes(trainer.compile_step(made, fit.example(rows, length, mesh)))


def main() -> None:
    for case in sys.argv[1:]:
        name, *sizes = case.split(",")
        print(json.dumps({"case": case, **{arm: planned(name, *map(int, sizes), arm) for arm in ("dense", "cutloss")}}), flush=True)


if __name__ == "__main__":
    main()
