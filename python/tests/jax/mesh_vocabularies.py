"""Vocabularies of real models, ragged ones among them, with real tiles over meshes of 8 virtual devices.

    mesh_vocabularies.py short|long [-v] [-k PART]
"""

from __future__ import annotations

import mesh_runner

if __name__ == "__main__":
    mesh_runner.eight_devices()

import jax
import numpy as np
from jax.sharding import PartitionSpec as P
from mesh_checks import mesh_of
from oracle import F32, dense, problem

from cutloss.jax import linear_cross_entropy

check = mesh_runner.Checks()

N, D = 24, 16
VOCABULARIES = (50257, 128256, 151936, 262145)
# axes, table, tokens: every table split along D, since no axis of two divides the odd vocabularies.
MESHES = {
    "2x2x2": ({"a": 2, "b": 2, "c": 2}, P(None, ("a", "b")), P(("b", "c"))),
    "2x2x2 ids": ({"a": 2, "b": 2, "c": 2}, P("a", "b"), P("c")),
    "8x1": ({"fsdp": 8, "tp": 1}, P("tp", "fsdp"), P("fsdp")),
    "1x8": ({"fsdp": 1, "tp": 8}, P("fsdp", "tp"), P()),
}
CASES = [(vocab, name) for vocab in VOCABULARIES for name in MESHES if name != "2x2x2 ids" or vocab % 2 == 0]


@check(long=CASES)
def last_tile_of_a_ragged_vocabulary_is_wrong(vocab, name):
    axes, w_spec, x_spec = MESHES[name]
    x, w, labels = problem(N, vocab, D, ignored=False)
    labels[:6] = 0, vocab - 1, 4095, 4096, vocab - 2, vocab - vocab % 4096
    labels[7] = -100
    w[-1] *= 3  # what the last id adds is seen
    want = dense(x, w, labels)
    # As in test_vocabularies.py, and 8 for the sums over the devices.
    tolerance = 8 * np.sqrt(4096 + 65 + D + 8) * 2.0**-24
    layout = {"mesh": mesh_of(**axes), "w_spec": w_spec, "x_spec": x_spec, "_impl": "xla"}
    for argnums in ((0,), (0, 1)):
        value, gradients = jax.jit(jax.value_and_grad(lambda *a: linear_cross_entropy(*a, **layout), argnums))(x, w, labels)
        np.testing.assert_allclose(value, want.loss, rtol=1e-6)
        for got, wanted in zip(gradients, (want.d_e, want.d_c)):
            assert got.dtype == F32 and np.linalg.norm(got - wanted) <= tolerance * np.linalg.norm(wanted)
            assert np.linalg.norm(got[-1] - wanted[-1]) <= tolerance * (np.linalg.norm(wanted[-1]) + 1e-3)


if __name__ == "__main__":
    check.main(small_tiles=False)
