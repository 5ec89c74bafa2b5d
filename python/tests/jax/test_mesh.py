"""Heads and tokens spread over 8 virtual devices; the checks are in the programs below."""

import functools
import json

import mesh_checks
import mesh_objective
import mesh_transforms
import mesh_vocabularies
import processes
import pytest

PROGRAMS = (mesh_checks, mesh_objective, mesh_transforms, mesh_vocabularies)


@functools.cache
def outcomes(program, group):
    return json.loads(processes.run(program.__file__, group, devices=8))


def checks(group):
    return [pytest.param(program, name, id=name) for program in PROGRAMS for name in program.check.groups[group]]


@pytest.mark.parametrize("program,name", checks("short"))
def test_mesh(program, name):
    assert outcomes(program, "short")[name] is None, outcomes(program, "short")[name]


@pytest.mark.long
@pytest.mark.parametrize("program,name", checks("long"))
def test_more_meshes(program, name):
    assert outcomes(program, "long")[name] is None, outcomes(program, "long")[name]
