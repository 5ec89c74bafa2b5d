"""Heads and tokens spread over 8 virtual devices; the checks are in mesh_checks.py."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import mesh_checks
import pytest


@functools.cache
def outcomes(group):
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
    run = subprocess.run([sys.executable, mesh_checks.__file__, group], env=os.environ | {"PYTHONPATH": path},
                         capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("name", mesh_checks.CHECKS["short"])
def test_mesh(name):
    assert outcomes("short")[name] is None, outcomes("short")[name]


@pytest.mark.long
@pytest.mark.parametrize("name", mesh_checks.CHECKS["long"])
def test_more_meshes(name):
    assert outcomes("long")[name] is None, outcomes("long")[name]
