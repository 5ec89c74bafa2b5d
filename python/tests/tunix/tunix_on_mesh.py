"""Run in a process of its own with 8 virtual devices: Tunix train steps on meshes, with its own loss and with ours.

    python tunix_on_mesh.py CASE...     CASE: FAMILY,VOCAB,FSDP,TP,with|set,lora|full|qlora; prints a JSON object for each
"""

import json
import os
import sys
import warnings

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"

import jax
import numpy as np
import tiny
from flax import nnx
from tunix.sft import peft_trainer, sharding_utils

import cutloss.tunix as ct
from cutloss.jax import hlo
from cutloss.sft import models
from cutloss.tunix import meshes


def mesh_of(fsdp, tp, kind=jax.sharding.AxisType.Auto):
    return jax.make_mesh((fsdp, tp), ("fsdp", "tp"), axis_types=(kind,) * 2)


# A small tile, so that a small problem has more tokens and ids than one.
TILE = {"token_chunk": 8, "vocab_chunk": 64}
MODELS = {"lora": tiny.lora_model, "full": tiny.model, "qlora": tiny.quantised_model}


def norms(want, got):
    """The largest error of an array of gradients, in units of its norm."""
    want, got = (jax.tree.leaves(nnx.to_pure_dict(g)) for g in (want, got))
    assert len(want) == len(got) > 0 and all(np.linalg.norm(a) > 0 for a in want)
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(a)) for a, b in zip(want, got, strict=True))


def run(family, vocab, fsdp, tp, how, kind):
    mesh = mesh_of(fsdp, tp)
    model = models._spread(MODELS[kind](family, vocab=vocab), mesh)
    rows = 8
    mask = np.random.default_rng(2).random((rows, 12)) < np.linspace(0.05, 1, rows)[:, None]  # unequal over the devices
    data = tiny.batch(rows=rows, vocab=vocab, mask=mask)
    own, cut = peft_trainer._default_loss_fn, ct.loss_fn(strict=True, **TILE)
    wrt = nnx.DiffState(0, nnx.Param if kind == "full" else nnx.LoRAParam)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with mesh:
            batch = sharding_utils.shard_input(data, ("fsdp",))
    result = {}
    with mesh if how == "with" else jax.set_mesh(mesh):
        if how == "with":
            ct.loss_fn(model, strict=True, **TILE)  # the self-check

        def step(model, batch):
            return [nnx.value_and_grad(f, argnums=wrt)(model, **batch) for f in (own, cut)]

        (dense, dense_grads), (ours, grads) = nnx.jit(step)(model, batch)
        alone = nnx.jit(lambda model, batch: step(model, batch)[1]).lower(model, batch).compile().as_text()
        result["unseen"] = meshes.unseen_mesh(model)
    result["worst"] = norms(dense_grads, grads)
    found = hlo.scan(alone, vocab=vocab, tile_tokens=TILE["token_chunk"])
    result.update(dense=float(dense), ours=float(ours), logits=[one.array for one in found.logits])
    return result


def main(cases):
    for case in cases:
        family, vocab, fsdp, tp, how, kind = case.split(",")
        print(json.dumps({"case": case, **run(family, int(vocab), int(fsdp), int(tp), how, kind)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
