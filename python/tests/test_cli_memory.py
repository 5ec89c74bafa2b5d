"""Memory that the tool plans, and what a process of its own then takes."""

import json
import resource
import subprocess
import sys

import numpy as np
import pytest
from tool import NO_MEMORY, TOOL, inputs, needs_tool, refused, run_json

pytestmark = needs_tool

MIB = 2**20
HUGE = ("--n", 32768, "--v", 262144, "--d", 64)  # 32 GiB of logits


def test_budgets_from_nothing_to_a_tebibyte():
    """Neither a chunk of 0 tokens, nor one chunk of everything because the machine is large."""
    for budget, size in (("0", 0), ("1MiB", MIB)):
        words = [f"budget is {size} bytes", "smallest that works"]
        message = refused(NO_MEMORY, "plan", *HUGE, "--budget", budget, words=words)
    smallest = int(message.split("smallest that works here is ")[1].split()[0])
    refused(NO_MEMORY, "plan", *HUGE, "--budget", smallest - 1)
    budgets = [smallest, 4 * MIB, 64 * MIB, 1024 * MIB, 2**40]
    plans = [run_json("plan", *HUGE, "--budget", budget) for budget in budgets]
    assert all(plan["workspace_bytes"] <= budget for plan, budget in zip(plans, budgets))
    chunks, units = [[plan[name] for plan in plans] for name in ("chunk_tokens", "units")]
    assert chunks == sorted(chunks) and chunks[-1] > 0
    assert units == sorted(units, reverse=True)
    assert plans[-1]["workspace_bytes"] <= 1100 * MIB  # 1 GiB of logits, and what is beside them


# A child's peak begins at that of the process that started it, so a small one has to.
MEASURE = """
import os, sys
process = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ)
_, status, usage = os.wait4(process, 0)
print(usage.ru_maxrss * 1024, file=sys.stderr)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def peak_of(arguments):
    """Most resident memory of the tool in a process of its own, in bytes."""
    command = [sys.executable, "-S", "-E", "-c", MEASURE, TOOL, *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=True)
    return int(done.stderr)


@pytest.mark.parametrize("options", [("--frozen",), ("--budget", "8MiB"), ("--budget", "64MiB")], ids=" ".join)
def test_predicted_peak_is_the_process_s(tmp_path, options):
    n, v, d = 2048, 20000, 384
    rng = np.random.default_rng(0)
    np.save(tmp_path / "e.npy", rng.random((n, d), np.float32))
    np.save(tmp_path / "c.npy", rng.random((v, d), np.float32))
    np.save(tmp_path / "labels.npy", rng.integers(0, v, n))
    gradients = ["--d-e", tmp_path / "d_e.npy"]
    if "--frozen" not in options:
        gradients += ["--d-c", tmp_path / "d_c.npy"]
    arguments = [*inputs(tmp_path), *gradients, *options]
    planned = run_json("plan", "--n", n, "--v", v, "--d", d, *options)["predicted_peak_bytes"]
    nothing = peak_of(["--version"])  # the program itself: its code and libraries
    measured = peak_of(["loss", *arguments]) - nothing
    assert 0.9 * planned < measured < 1.1 * planned + 2 * MIB, (measured / MIB, planned / MIB)


def test_a_limit_of_the_address_space_is_heeded():
    """512 MiB of logits by default, where the process may not have as much."""

    def limit():
        resource.setrlimit(resource.RLIMIT_AS, (400 * MIB, 400 * MIB))

    def workspace(preexec_fn=None):
        command = [TOOL, "plan", *map(str, HUGE), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, preexec_fn=preexec_fn)
        return json.loads(done.stdout)["workspace_bytes"]

    assert workspace() > 256 * MIB
    assert workspace(limit) < 400 * MIB
