"""Heads and tokens spread over 8 virtual devices; the checks are in mesh_checks.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import mesh_checks
import pytest


@pytest.fixture(scope="module")
def outcomes():
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
    run = subprocess.run([sys.executable, mesh_checks.__file__], env=os.environ | {"PYTHONPATH": path},
                         capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("name", mesh_checks.CHECKS)
def test_mesh(outcomes, name):
    assert outcomes[name] is None, outcomes[name]
