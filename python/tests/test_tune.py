"""`cutloss tune`, end to end: what it keeps is used by the tool, NumPy and JAX; a bad file is ignored and named."""

import os
import subprocess
import sys

import pytest
from tool import BAD_USAGE, needs_tool, refused, run, run_json

pytestmark = needs_tool

SHAPE = ("--n", 512, "--v", 4000, "--d", 32)
QUICKLY = ("--seconds", 0, "--reps", 1)


@pytest.fixture
def tuning(tmp_path):
    return {"CUTLOSS_TUNING_FILE": str(tmp_path / "cache" / "tuning.txt")}


@pytest.mark.parametrize("mode", ["stream", "chunk", "recompute"])
def test_what_was_measured_is_used(tuning, mode):
    options = (*SHAPE, "--mode", mode, *(["--frozen"] if mode == "stream" else []))
    before = run_json("plan", *options, env=tuning)
    found = run_json("tune", *options, *QUICKLY, env=tuning)
    assert found["mode"] == mode and found["file"] == tuning["CUTLOSS_TUNING_FILE"]
    knobs = {measured["knob"] for measured in found["measured"]}
    assert {"vocab_tile", "token_block"} <= knobs
    assert ("chunk_tokens" in knobs) == (mode == "chunk") and ("head_rows" in knobs) == (mode == "recompute")
    after = run_json("plan", *options, env=tuning)
    assert not before["tuned"] and after["tuned"]
    rows = after["vocab_tile"]
    assert found["blocks"]["vocab_tile"] - rows < 32  # rounded to the kernel's rows
    assert "1 entry in" in run_json("info", env=tuning)["tuning"]
    assert "measured by 'cutloss tune'" in run("plan", *options, env=tuning).stdout


def test_entries_of_other_problems_stay(tuning):
    for extra in (["--frozen"], ["--mode", "loss"], ["--frozen", "--dtype", "bf16"], ["--frozen"]):
        run_json("tune", *SHAPE, *QUICKLY, *extra, env=tuning)
    assert "3 entries" in run_json("info", env=tuning)["tuning"]


def test_dry_run_keeps_nothing_and_json_is_alone_on_stdout(tuning):
    found = run_json("tune", *SHAPE, *QUICKLY, "--frozen", "--dry-run", env=tuning)
    assert found["file"] == "" and not os.path.exists(tuning["CUTLOSS_TUNING_FILE"])
    assert "none yet" in run_json("info", env=tuning)["tuning"]


def test_broken_file_is_ignored_named_and_replaced(tuning, tmp_path):
    (tmp_path / "cache").mkdir()
    file = tmp_path / "cache" / "tuning.txt"
    file.write_text("cutloss tuning 1\ncpu")
    for command in (["info"], ["plan", *SHAPE]):
        result = run(*command, env=tuning)
        assert result.returncode == 0 and f"ignored {file}: cut short" in result.stdout
    for command in (["plan", *SHAPE, "--json"], ["bench", *SHAPE, "--reps", 1, "--json"]):
        result = run(*command, env=tuning)
        assert result.returncode == 0 and result.stderr == f"cutloss: warning: ignored {file}: cut short\n"
    assert not run_json("plan", *SHAPE, env=tuning)["tuned"]
    assert "replacing" in run("tune", *SHAPE, *QUICKLY, "--frozen", env=tuning).stderr
    assert "1 entry" in run_json("info", env=tuning)["tuning"]


def test_bad_usage(tuning):
    refused(BAD_USAGE, "tune", "--n", 0, "--frozen", words=["--n 0"])
    refused(BAD_USAGE, "tune", *SHAPE, "--seconds", "nan", env=tuning, words=["--seconds"])
    refused(BAD_USAGE, "tune", *SHAPE, env={"CUTLOSS_TUNING_FILE": "none"}, words=["CUTLOSS_TUNING_FILE", "--file"])
    assert "Examples:" in run("tune", "--help").stdout


# A plan made while tracing must be the plan made while running: the table goes along with the program.
PROGRAM = """
import os, numpy as np, jax, cutloss
from cutloss.jax import linear_cross_entropy
rng = np.random.default_rng(0)
e, c = rng.normal(size=(512, 32)).astype("f4"), rng.normal(size=(4000, 32)).astype("f4")
y = rng.integers(0, 4000, 512)
plan = cutloss.linear_cross_entropy(e, c, y, wrt="e").plan
loss = jax.jit(jax.grad(lambda x: linear_cross_entropy(x, c, y)))
compiled = loss.lower(e).compile()
os.environ["CUTLOSS_TUNING_FILE"] = "none"  # changed or deleted meanwhile
d_e = np.asarray(compiled(e))
print(plan.tuned, np.abs(d_e - cutloss.linear_cross_entropy(e, c, y, wrt="e").d_e).max() < 1e-6)
"""


def test_compiled_programs_keep_the_table_they_were_traced_with(tuning):
    pytest.importorskip("jax")
    run_json("tune", *SHAPE, *QUICKLY, "--frozen", env=tuning)
    result = subprocess.run([sys.executable, "-c", PROGRAM], env={**os.environ, **tuning}, capture_output=True,
                            text=True, timeout=120, check=True)
    assert result.stdout.split() == ["True", "True"]


def test_measured_memory_is_what_was_planned():
    """Peak over inputs and gradients within 10 % of the plan's workspace, in a process of its own."""
    code = """
import resource, sys, numpy as np, cutloss
n, v, d, budget, wrt = eval(sys.argv[1])
rng = np.random.default_rng(0)
e, c = rng.random((n, d), np.float32), rng.random((v, d), np.float32)
y = rng.integers(0, v, n)
cutloss.linear_cross_entropy(e[:8], c[:8], y[:8] % 8, wrt=wrt)
def status(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field))
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
plan = cutloss.linear_cross_entropy(e, c, y, wrt=wrt, budget=budget).plan
print((status("VmHWM") - before) * 1024, plan.as_dict()["gradient_bytes"] + plan.workspace_bytes)
"""
    cases = ((1024, 40000, 64, "160MiB", ("e", "c")), (1024, 40000, 64, "40MiB", ("e", "c")),
             (16384, 500, 512, None, "e"))
    for case in cases:
        result = subprocess.run([sys.executable, "-c", code, repr(case)], capture_output=True, text=True, timeout=120,
                                check=False)
        if "clear_refs" in result.stderr:
            pytest.skip("this system does not reset VmHWM")
        measured, planned = map(int, result.stdout.split())
        assert 0.9 * planned < measured < 1.1 * planned + 2**21, case
