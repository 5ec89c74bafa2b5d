"""Whole train steps compiled for a v5e by the real compiler, on this CPU: no shape plans more than with Tunix's loss."""

import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("tpu_steps.py")
# `make test-long` puts libtpu here and not into .venv, where JAX would look for a TPU in every program.
FOLDER = Path(__file__).parents[3] / "build" / "libtpu"
MIB = 2**20

ONE_CHIP = [f"gemma3_270m,1,1,{rows},{length},16" for rows, length in ((1, 64), (1, 256), (4, 64), (4, 512))]
CASES = [
    *ONE_CHIP,
    "gemma3_270m,1,1,1,64,0",  # every weight trained
    "qwen3_0p6b,1,1,1,64,16",
    "llama3p2_1b,1,1,2,64,16",
    "gemma3_270m,4,1,4,64,16",
    "gemma3_270m,2,2,2,64,16",
    "gemma3_270m,1,4,1,64,16",
]


@functools.cache
def planned():
    if not FOLDER.exists() and importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed: make test-long does, or pip install --target build/libtpu libtpu==0.0.42.1")
    path = os.pathsep.join([str(FOLDER), *filter(None, sys.path)])
    run = subprocess.run([sys.executable, str(SCRIPT), *CASES], env=os.environ | {"PYTHONPATH": path},
                         capture_output=True, text=True, check=False)  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    return {found["case"]: found for found in map(json.loads, filter(lambda x: x[0] == "{", run.stdout.splitlines()))}


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_step_for_a_chip_plans_no_more_than_the_default_loss(case):
    found = planned()[case]
    assert found["cutloss"] <= found["dense"] + MIB, {k: f"{v / MIB:.1f} MiB" for k, v in found.items() if k != "case"}


@pytest.mark.long
def test_step_for_a_chip_saves_the_logits():
    """4 x 511 rows of 262,144 logits in f32 are 2 GiB; the default loss holds them at least once."""
    found = planned()[ONE_CHIP[-1]]
    assert found["dense"] - found["cutloss"] >= 4 * 511 * 262144 * 4 // 2
