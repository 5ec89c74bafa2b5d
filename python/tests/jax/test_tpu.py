"""Programs compiled for TPUs by the real compiler, on this CPU: what they hold and what they move."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tpu_checks

from cutloss import _check

MIB = 1 << 20
TABLE = tpu_checks.VOCAB * tpu_checks.HIDDEN * 2
GRADIENT_OF_X = tpu_checks.TOKENS * tpu_checks.HIDDEN * 4  # as it is summed, f32

ON_CHIP = 128 * MIB

# `make test-long` puts libtpu here and not into .venv, where JAX would look for a TPU in every program.
FOLDER = Path(__file__).parents[3] / "build" / "libtpu"


def compile_for_tpu(*names):
    if not FOLDER.exists() and importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed: make test-long does, or pip install --target build/libtpu libtpu==0.0.42.1")
    path = os.pathsep.join([str(Path(__file__).parents[1]), str(FOLDER), *filter(None, sys.path)])
    run = subprocess.run([sys.executable, tpu_checks.__file__, *names], env=os.environ | {"PYTHONPATH": path},
                         capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    return {r["name"]: r for r in map(json.loads, filter(lambda line: line.startswith("{"), run.stdout.splitlines()))}


@pytest.fixture(scope="module")
def programs():
    return compile_for_tpu(*tpu_checks.CASES)


def beside(program):
    """Bytes that are neither arguments nor results, at most, on-chip memory included."""
    return program["peak_bytes"] - program["argument_bytes"] - program["output_bytes"]


def test_logits_leave_the_chip():
    check_frozen(compile_for_tpu("1 frozen")["1 frozen"])


def check_frozen(program, most=MIB):
    assert program["logits"] == [], program["logits"]
    assert program["temp_bytes"] <= most, program["text"]  # a few vectors over the tokens; a tile is 32 MiB
    assert beside(program) <= 64 * MIB, program["text"]


def moved(program, kind):
    """Bytes in one step, and those in loops; counts of tokens and devices left out."""
    rows = [c for c in program["collectives"] if c["kind"] == kind and c["bytes"] > 64]
    return sum(c["total_bytes"] for c in rows), sum(c["total_bytes"] for c in rows if c["loops"])


# Of the table, what a device works on when it is gathered.
MESHES = [("fsdp4", 1), ("fsdp2tp2", 1 / 2), ("tp4", 0), ("fsdp8", 1), ("fsdp4tp2", 1 / 2), ("tp8", 0)]


@pytest.mark.long
@pytest.mark.parametrize("mesh,gathered", MESHES)
def test_table_is_gathered_twice_or_kept(programs, mesh, gathered):
    program = programs[mesh + " frozen"]
    check_frozen(program, 1.3 * MIB)  # 0.8 to 1.0, on fsdp2tp2 1.27: what is exchanged is in it too
    assert program["loop_bytes"] == moved(program, "all-gather")[1] <= gathered * TABLE, program["text"]
    # Outside loops: three f32 a token and the gradient of x, once.
    assert moved(program, "all-reduce")[0] <= GRADIENT_OF_X + 3 * 4 * tpu_checks.TOKENS, program["text"]
    assert all(len(c["loops"]) <= 1 for c in program["collectives"]), program["text"]


@pytest.mark.long
def test_options_gather_the_table_again(programs):
    program = programs["fsdp2tp2 options"]
    assert program["logits"] == [], program["logits"]
    assert moved(program, "all-gather")[1] <= TABLE / 2, program["text"]
    assert all(len(c["loops"]) <= 1 for c in program["collectives"]), program["text"]


@pytest.mark.long
def test_trainable_head_needs_more_than_its_gradient(programs):
    program = programs["1 trainable"]
    assert program["logits"] == []
    assert program["temp_bytes"] <= 1.25 * MIB, program["text"]
    assert beside(program) <= 64 * MIB, program["text"]  # the gradient is a result


@pytest.mark.long
@pytest.mark.parametrize("mesh,gathered", MESHES)
def test_trainable_head_gathers_twice_or_sums_in_bfloat16(programs, mesh, gathered):
    program = programs[mesh + " trainable"]
    assert program["logits"] == []
    # The gathered part of the table is kept, so that it is gathered once; its gradient is reduced in f32.
    assert program["temp_bytes"] <= gathered * TABLE + 1.25 * MIB, program["text"]
    assert beside(program) <= gathered * TABLE + ON_CHIP, program["text"]  # a small gradient is on the chip at first
    assert moved(program, "all-gather")[0] <= gathered * TABLE, program["text"]
    assert moved(program, "reduce-scatter")[0] <= gathered * 2 * TABLE, program["text"]
    assert moved(program, "all-reduce")[0] <= GRADIENT_OF_X + 3 * 4 * tpu_checks.TOKENS, program["text"]
    assert all("f32" in c["array"] for c in program["collectives"] if c["kind"] == "reduce-scatter"), program["text"]
    assert all(len(c["loops"]) <= 1 for c in program["collectives"]), program["text"]


@pytest.mark.long
def test_budget_for_no_table_keeps_it(programs):
    program = programs["fsdp8 trainable by tile"]
    table = 50264 * tpu_checks.HIDDEN * 2
    assert program["logits"] == []
    assert beside(program) <= 64 * MIB, program["text"]
    assert moved(program, "all-gather")[0] <= 2 * table, program["text"]
    assert moved(program, "reduce-scatter")[0] <= 2 * table, program["text"]


@pytest.mark.long
@pytest.mark.parametrize("mesh,gathered", [("1", 0), ("fsdp4", 1), ("tp4", 0)])
def test_kept_logits_take_more_than_the_budget_or_another_gather(programs, mesh, gathered):
    program = programs[mesh + " chunk"]
    budget = _check.budget(tpu_checks.CASES[mesh + " chunk"][-1]["budget"])
    assert budget / 2 <= beside(program) <= budget, program["text"]  # at least half of it are the logits
    assert moved(program, "all-gather")[0] <= gathered * TABLE, program["text"]
    assert moved(program, "reduce-scatter")[0] <= gathered * 2 * TABLE, program["text"]
    # Three f32 a token and the gradient of x, with the tokens that fill up the last tile (16 on tp4).
    assert moved(program, "all-reduce")[0] <= 1.01 * (GRADIENT_OF_X + 3 * 4 * tpu_checks.TOKENS), program["text"]
    assert all(len(c["loops"]) <= 1 for c in program["collectives"]), program["text"]


@pytest.mark.long
def test_other_chips_spill(programs):
    check_frozen(programs["v6e frozen"], 1.25 * MIB)
    # XLA for a v5p puts every tile of logits into main memory: f32, 1024 x 4096, and half as much beside it.
    assert programs["v5p frozen"]["logits"] == []
    assert programs["v5p frozen"]["temp_bytes"] <= 1.6 * 1024 * 4096 * 4, programs["v5p frozen"]["text"]


@pytest.mark.long
@pytest.mark.parametrize("name", ["fsdp4tp2 ragged", "fsdp2tp4 4B"])
def test_other_shapes_spill(programs, name):
    program = programs[name]
    assert program["logits"] == [], program["logits"]
    assert all(len(c["loops"]) <= 1 for c in program["collectives"]), program["text"]
    # Two copies of the gradient of x and one of its f32 sum may be in main memory; a tile of logits, 16 MiB or more, not.
    assert program["temp_bytes"] <= 4 * program["output_bytes"] + 8 * MIB, program["text"]
