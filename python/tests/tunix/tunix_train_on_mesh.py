"""Run in a process of its own with virtual devices: whole runs of PeftTrainer on meshes, with its own loss and with ours.

    python tunix_train_on_mesh.py CASE...     prints a JSON object for each case of CASES

With --host HOST:PORT COUNT PROCESS it is one of several hosts, and feeds its own rows of each batch.
"""

import argparse
import json
import os
import warnings

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")  # of each process
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"

import contextlib

import jax
import numpy as np
import optax
import tiny
from flax import nnx

import cutloss.tunix as ct
from cutloss.sft import models


def mesh_of(**sizes):
    auto = (jax.sharding.AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=auto)


# name: (axes of the mesh, the trainer's settings, rows, how the mesh is set)
CASES = {
    "fsdp": ({"fsdp": 4, "tp": 2}, {}, 8, "with"),
    "data": ({"data": 2, "fsdp": 2, "tp": 2}, {"data_sharding_axis": (("data", "fsdp"),)}, 8, "with"),
    "undivided": ({"fsdp": 4, "tp": 2}, {}, 6, "with"),
    "set_mesh": ({"fsdp": 4, "tp": 2}, {}, 8, "set"),
}


def own_rows(batch):
    """What a host's data loader gives it: Tunix puts the parts together over the first axes of the mesh."""
    many, number = jax.process_count(), jax.process_index()
    return jax.tree.map(lambda array: np.split(np.asarray(array), many)[number], batch) if many > 1 else batch


def whole(leaf):
    from jax.experimental import multihost_utils

    return np.asarray(leaf if leaf.is_fully_addressable else multihost_utils.process_allgather(leaf, tiled=True))


def train(case, patched):
    axes, settings, rows, how = CASES[case]
    mesh = mesh_of(**axes)
    model = models._spread(tiny.lora_model("gemma3", vocab=512), mesh)
    data = [own_rows(tiny.batch(rows=rows, vocab=512, seed=seed)) for seed in range(2)]
    with mesh if how == "with" else jax.set_mesh(mesh), ct.patched() if patched else contextlib.nullcontext():
        trainer = tiny.trainer(model, optimizer=optax.sgd(0.1), evaluate_every=1, **settings)
        losses, evaluated = [], []
        trainer._post_process_train_step = lambda aux: losses.append(float(trainer._buffered_train_metrics.losses[-1]))
        trainer._post_process_eval_step = lambda aux: evaluated.append(float(trainer._buffered_eval_metrics.losses[-1]))
        trainer.train(data, data[:1])
    assert trainer.train_steps == 2
    return losses, evaluated, [whole(leaf) for leaf in jax.tree.leaves(nnx.to_pure_dict(nnx.state(model, nnx.LoRAParam)))]


def run(case):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        ours = train(case, patched=True)
    dense = train(case, patched=False)
    start = jax.tree.leaves(nnx.to_pure_dict(nnx.state(tiny.lora_model("gemma3", vocab=512), nnx.LoRAParam)))
    worst = max(
        float(np.linalg.norm(b - a) / np.linalg.norm(a - np.asarray(first)))
        for first, a, b in zip(start, dense[2], ours[2], strict=True)
    )
    told = sorted({str(w.message) for w in seen if issubclass(w.category, ct.CutLossWarning)})
    sums = [float(np.linalg.norm(leaf.astype(np.float64))) for leaf in ours[2]]
    return {"ours": ours[:2], "dense": dense[:2], "worst": worst, "norms": sums, "warnings": told}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="+", choices=CASES)
    parser.add_argument("--host", nargs=3)
    options = parser.parse_args()
    if options.host:
        coordinator, *numbers = options.host
        jax.distributed.initialize(coordinator, *map(int, numbers), cluster_detection_method="deactivate")
    for name in options.cases:
        print(json.dumps({"case": name, **run(name)}), flush=True)
