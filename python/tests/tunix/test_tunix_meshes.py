"""A Tunix train step over 8 virtual devices: the loss and every gradient are those of Tunix's own loss, and no device
holds logits of more tokens than a tile."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

SCRIPT = Path(__file__).with_name("tunix_on_mesh.py")
long = pytest.mark.long


@functools.cache
def outcomes(*cases):
    """{case: what came of it}, of one process: importing Tunix takes longer than a small step."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *cases], capture_output=True, text=True, check=False, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {one["case"]: one for one in found}


def check(found, seen=True):
    # As for one device (test_tunix_families.py): sums over devices add roundings of the same size.
    assert abs(found["ours"] - found["dense"]) <= 1e-5 * abs(found["dense"])
    assert found["worst"] <= 1e-5
    assert found["logits"] == []
    assert (found["unseen"] is None) == seen


@pytest.mark.parametrize(
    "case",
    [
        "gemma3,512,4,2,with,lora",
        pytest.param("gemma3,499,2,4,with,lora", marks=long),  # a table that no axis divides
        pytest.param("gemma2,512,8,1,with,lora", marks=long),
        pytest.param("gemma4,512,1,8,with,lora", marks=long),
        pytest.param("qwen3-untied,512,2,4,with,lora", marks=long),
        pytest.param("llama3-untied,512,4,2,with,full", marks=long),
        pytest.param("gemma2,512,1,8,with,full", marks=long),
        pytest.param("gemma3,512,4,2,set,lora", marks=long),
    ],
)
def test_mesh_gives_tunix_gradients_without_logits(case):
    check(outcomes(case)[case], seen=",with," in case)  # Tunix does not see the other one, and the user is told


MESHES = ((8, 1), (1, 8), (4, 2))


def cases_of(family):
    kinds = ["lora", "full", *(["qlora"] if family in tiny.QUANTISABLE else [])]
    return [f"{family},{tiny.VOCAB},{fsdp},{tp},with,{kind}" for fsdp, tp in MESHES for kind in kinds]


@long
@pytest.mark.parametrize("case", [case for family in tiny.FAMILIES for case in cases_of(family)])
def test_every_family_on_every_mesh_gets_tunix_gradients(case):
    check(outcomes(*cases_of(case.split(",")[0]))[case])
