"""PeftTrainer.train over 8 virtual devices: losses, evaluations and adapters are those of Tunix's own loss, and the user
is told where Tunix does not split the batch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("tunix_train_on_mesh.py")

TOLD = {
    "fsdp": [],
    "data": [],  # a batch split over two axes is split
    "undivided": ["a batch of 6 rows cannot be split over the 4 devices of mesh axis 'fsdp'"],
    "set_mesh": ["the mesh was set by jax.set_mesh, but Tunix shards the batch over the mesh of `with mesh:` only"],
}


@pytest.mark.long
@pytest.mark.parametrize("case", TOLD)
def test_training_on_a_mesh_is_that_of_tunix_s_own_loss(case):
    done = subprocess.run([sys.executable, str(SCRIPT), case], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for ours, dense in zip(found["ours"], found["dense"], strict=True):
        assert len(ours) >= 2 and ours == pytest.approx(dense, rel=1e-5)
    # Two steps of plain descent: as of one gradient (test_tunix_meshes.py), twice.
    assert found["worst"] <= 2e-5
    assert len(found["warnings"]) == len(TOLD[case])
    assert all(text.startswith(start) for text, start in zip(found["warnings"], TOLD[case], strict=True))
