"""Heads and tokens spread over 8 virtual devices; the checks are in mesh_checks.py and mesh_objective.py."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import mesh_checks
import mesh_objective
import pytest

PROGRAMS = (mesh_checks, mesh_objective)


@functools.cache
def outcomes(program, group):
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
    run = subprocess.run([sys.executable, program.__file__, group], env=os.environ | {"PYTHONPATH": path},
                         capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def checks(group):
    return [pytest.param(program, name, id=name) for program in PROGRAMS for name in program.check.groups[group]]


@pytest.mark.parametrize("program,name", checks("short"))
def test_mesh(program, name):
    assert outcomes(program, "short")[name] is None, outcomes(program, "short")[name]


@pytest.mark.long
@pytest.mark.parametrize("program,name", checks("long"))
def test_more_meshes(program, name):
    assert outcomes(program, "long")[name] is None, outcomes(program, "long")[name]
