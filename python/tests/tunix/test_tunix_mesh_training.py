"""PeftTrainer.train over 8 virtual devices, of one process and of two: losses, evaluations and adapters are those of
Tunix's own loss, and the user is told where Tunix does not split the batch."""

import json
from pathlib import Path

import processes
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
    found = json.loads(processes.run(str(SCRIPT), case, devices=8).splitlines()[-1])
    for ours, dense in zip(found["ours"], found["dense"], strict=True):
        assert len(ours) >= 2 and ours == pytest.approx(dense, rel=1e-5)
    # Two steps of plain descent: as of one gradient (test_tunix_meshes.py), twice.
    assert found["worst"] <= 2e-5
    assert len(found["warnings"]) == len(TOLD[case])
    assert all(text.startswith(start) for text, start in zip(found["warnings"], TOLD[case], strict=True))


@pytest.mark.long
def test_two_hosts_train_otherwise_than_one():
    """The rows of a batch come from two processes of 4 devices each; the same rows in one process of 8 are the measure."""
    first, second = processes.results_of_two(lambda address, k: (SCRIPT, "fsdp", "--host", address, 2, k), timeout=900)
    alone = processes.result(processes.start(8, SCRIPT, "fsdp"), timeout=900)
    for name in ("ours", "dense"):
        assert first[name] == second[name]
        for together, single in zip(first[name], alone[name], strict=True):
            # Sums of at most 512 + 128 f32 terms each, in another order: 640 epsilon at worst, and two steps of it.
            assert together == pytest.approx(single, rel=2 * 640 * 2**-24)
    assert first["worst"] <= 2e-5 and first["norms"] == second["norms"] == pytest.approx(alone["norms"], rel=2e-5)
    assert first["warnings"] == []
