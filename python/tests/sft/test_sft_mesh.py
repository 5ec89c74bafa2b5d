"""cutloss-sft over 8 virtual devices, in processes of their own: the losses of one device, also after a kill."""

import json
import os
import subprocess
import sys

import pytest
import runs

PROGRAM = """
import json, os, signal, sys
from pathlib import Path
from cutloss.sft import config, fit, run

settings, out, kill = config.from_dict(json.loads(sys.argv[1])), Path(sys.argv[2]), int(sys.argv[3])

def emit(event, **fields):
    if event == "step" and fields["step"] == kill:
        os.kill(os.getpid(), signal.SIGKILL)

summary = run.run(settings, out, emit)
plan = fit.planner(settings)(settings.train.batch, settings.train.context)
print("FOUND", json.dumps({"summary": summary, "fit": plan}))
"""


def go(settings, out, devices, kill=0):
    environment = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_NUM_CPU_DEVICES": str(devices)}
    command = [sys.executable, "-c", PROGRAM, json.dumps(settings.to_dict()), str(out), str(kill)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == (-9 if kill else 0), done.stderr[-3000:]
    return None if kill else json.loads(done.stdout.split("FOUND ")[1])


@pytest.mark.long
def test_a_run_on_a_mesh_is_that_of_one_device_and_goes_on_after_a_kill(tmp_path):
    evaluation = ("evaluation.every=2", "evaluation.batches=1", "generation.prompts=1", "generation.tokens=4")
    mesh = ("mesh.fsdp=4", "mesh.tp=2", "data.held_out_one_in=2")
    common = {"batch": 8, "lr": 1e-3}
    go(runs.settings(tmp_path, *evaluation, mesh[2], **common), tmp_path / "one", 1)
    settings = runs.settings(tmp_path, *evaluation, *mesh, **common)
    straight = go(settings, tmp_path / "mesh", 8)
    # The step that was compiled for a budget is the one that was run; each device has its part of it.
    assert straight["fit"] == straight["summary"]["planned_bytes"]
    go(settings, tmp_path / "killed", 8, kill=5)
    resumed = go(settings, tmp_path / "killed", 8)
    assert resumed["summary"]["sha256"] == straight["summary"]["sha256"]
    one, mesh, killed = (
        [(e["event"], e["step"], e["loss"]) for name in ("step", "evaluated") for e in runs.recorded(tmp_path / place, name)]
        for place in ("one", "mesh", "killed")
    )
    assert killed == mesh and len(mesh) == 6 + 4
    for a, b in zip(one, mesh, strict=True):
        # Sums in another order: 1e-5 of a gradient, which Adam's first steps of 1e-3 may turn into a step's sign.
        assert a[:2] == b[:2] and a[2] == pytest.approx(b[2], rel=1e-4)
    assert (tmp_path / "mesh" / "after.jsonl").is_file()
