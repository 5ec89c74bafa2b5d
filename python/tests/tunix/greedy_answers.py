"""Run in a process of its own, without cutloss: what tiny models answer, before training and with given weights.

    python greedy_answers.py FOLDER FAMILY...     FOLDER/FAMILY.npz: the weights; prints {family: [before, after]}
"""

import json
import os
import sys
from pathlib import Path

import numpy as np
import tiny


def vocabulary():
    from tunix.tests import test_common

    return test_common.MockVocab()


def vocab_size():
    return vocabulary().GetPieceSize()


def build(family):
    return tiny.model(family, vocab=vocab_size())


def sampler(model):
    from tunix.generate import sampler as sampling

    cache = sampling.CacheConfig(
        cache_size=32,
        num_layers=model.config.num_layers,
        num_kv_heads=model.config.num_kv_heads,
        head_dim=model.config.head_dim,
    )
    return sampling.Sampler(model, vocabulary(), cache)


def ask(made):
    return np.asarray(made(["input string"], max_generation_steps=8, temperature=0.0).tokens[0]).tolist()


def main(folder, *families):
    import jax
    from flax import nnx

    found = {}
    for family in families:
        model = build(family)
        before = ask(sampler(model))
        state = nnx.state(model, nnx.Param)
        arrays = iter(np.load(Path(folder, f"{family}.npz")).values())
        nnx.update(model, jax.tree.map(lambda leaf, arrays=arrays: jax.numpy.asarray(next(arrays)), state))
        found[family] = [before, ask(sampler(model))]
    assert not any(name.split(".")[0] == "cutloss" for name in sys.modules)
    print(json.dumps(found))


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    main(*sys.argv[1:])
