"""A Tunix train step over 8 virtual devices: the loss and every adapter's gradient are those of Tunix's own loss, and no
device holds logits of more tokens than a tile."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("tunix_on_mesh.py")
long = pytest.mark.long


@pytest.mark.parametrize(
    ("family", "vocab", "fsdp", "tp", "how"),
    [
        ("gemma3", 512, 4, 2, "with"),
        pytest.param("gemma3", 499, 2, 4, "with", marks=long),  # a table that no axis divides
        pytest.param("gemma2", 512, 8, 1, "with", marks=long),
        pytest.param("gemma4", 512, 1, 8, "with", marks=long),
        pytest.param("qwen3-untied", 512, 2, 4, "with", marks=long),
        pytest.param("llama3-untied", 512, 4, 2, "with", marks=long),
        pytest.param("gemma3", 512, 4, 2, "set", marks=long),
    ],
)
def test_mesh_gives_tunix_gradients_without_logits(family, vocab, fsdp, tp, how):
    command = [sys.executable, str(SCRIPT), family, *map(str, (vocab, fsdp, tp)), how]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    # As for one device (test_tunix_families.py): sums over devices add roundings of the same size.
    assert abs(found["ours"] - found["dense"]) <= 1e-5 * abs(found["dense"])
    assert found["worst"] <= 1e-5
    assert found["logits"] == []
    assert (found["unseen"] is None) == (how == "with")  # Tunix does not see the other one, and the user is told
