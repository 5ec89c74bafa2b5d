"""What the surroundings may be: few CPUs, other OpenMP runtimes, no compiler, another order of imports, forked workers."""

import multiprocessing
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from oracle import lattice
from tool import TOOL, needs_tool, run, run_json

import cutloss
from cutloss import _core, linear_cross_entropy

FIXED = 3.77654999  # the loss of lattice(7, 11, 5)
PROGRAM = """
import sys
{imports}
from oracle import lattice
from cutloss import linear_cross_entropy
assert abs(linear_cross_entropy(*lattice(7, 11, 5)).loss - 3.77654999) < 4e-6
{after}
"""


def python(imports="", after="", **environment):
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    run = subprocess.run([sys.executable, "-c", PROGRAM.format(imports=imports, after=after)], capture_output=True,
                         text=True, env={**os.environ, "PYTHONPATH": path, **environment}, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


@needs_tool
def test_threads_of_the_host_are_used_instead_of_ours():
    """By affinity and by the environment; CPU quotas are tested on files in quota_test.cc."""
    if shutil.which("taskset") is None:
        pytest.skip("needs taskset")
    one = subprocess.run(["taskset", "-c", str(min(os.sched_getaffinity(0))), TOOL, "info", "--json"],
                         capture_output=True, text=True, check=True).stdout
    assert '"threads": 1,' in one
    assert run_json("info", env={"OMP_NUM_THREADS": "1"})["threads"] == 1
    assert run_json("info", env={"CUTLOSS_NUM_THREADS": "1", "OMP_NUM_THREADS": "64"})["threads"] == 1
    assert run_json("info", env={"OMP_NUM_THREADS": "1000"})["threads"] == run_json("info")["threads"]


@needs_tool
def test_a_higher_target_than_the_cpu_has_is_used():
    info = run_json("info")
    for target in info["targets"]:
        assert run_json("info", env={"CUTLOSS_TARGET": target})["target"] == target
    foreign = {"avx512", "avx2", "sse4", "neon"} - set(info["targets"])
    assert foreign
    for target in foreign:
        result = run("info", env={"CUTLOSS_TARGET": target})
        assert result.returncode == 4 and len(result.stderr.splitlines()) == 1 and target in result.stderr


def test_targets_give_other_losses():
    e, c, labels = lattice(7, 11, 5)
    for target in cutloss.available_targets():
        got = linear_cross_entropy(e, c, labels, target=target)
        assert got.plan.target == target and got.loss == pytest.approx(FIXED, rel=1e-6)


@needs_tool
def test_an_older_cpu_gets_an_illegal_instruction():
    emulator = shutil.which("qemu-x86_64") or shutil.which("qemu-x86_64-static")
    if emulator is None:
        pytest.skip("needs qemu-x86_64")
    for cpu in ("Nehalem", "Westmere", "Haswell", "max"):
        result = subprocess.run([emulator, "-cpu", cpu, TOOL, "check", "--cases", "1", "--n", "7", "--v", "11", "--d", "5"],
                                capture_output=True, text=True, check=False)
        assert result.returncode == 0, (cpu, result.stderr)


def test_a_compiler_or_driver_is_needed_to_run():
    python("sys.modules['torch'] = sys.modules['triton'] = None", PATH="", CC="/nothing", CUDA_VISIBLE_DEVICES="")


@pytest.mark.parametrize("order", [("numpy", "cutloss", "jax.numpy"), ("cutloss", "jax.numpy", "numpy"),
                                   ("jax.numpy", "numpy", "cutloss")], ids="-".join)
def test_order_of_imports_matters(order):
    pytest.importorskip("jax")
    python("".join(f"import {name}\n" for name in order), """
import jax, numpy
from cutloss.jax import linear_cross_entropy as loss
assert abs(loss(*lattice(7, 11, 5)) - 3.77654999) < 4e-6
assert (numpy.ones((64, 64)) @ numpy.ones((64, 64)))[0, 0] == 64 == (jax.numpy.ones((64, 64)) @ jax.numpy.ones((64, 64)))[0, 0]
""")


def test_one_framework_needs_the_other():
    python("for name in ('torch', 'jax', 'jaxlib', 'tunix', 'flax'): sys.modules[name] = None")


@pytest.mark.skipif(shutil.which("ldd") is None, reason="needs ldd")
def test_a_second_openmp_or_a_missing_symbol_is_linked_in():
    listed = subprocess.run(["ldd", _core.__file__], capture_output=True, text=True, check=True).stdout
    libraries = {line.split()[0] for line in listed.splitlines()}
    assert not any(word in name for name in libraries for word in ("omp", "torch", "jax", "mkl", "blas")), libraries
    relocated = subprocess.run(["ldd", "-r", _core.__file__], capture_output=True, text=True, check=False)
    missing = [line for line in (relocated.stdout + relocated.stderr).splitlines() if "undefined symbol" in line]
    assert all(" Py" in line or " _Py" in line for line in missing), missing  # the interpreter has those


def loss_in_a_worker(threads):
    return linear_cross_entropy(*lattice(200, 4000, 16), threads=threads).loss


def test_a_forked_worker_hangs():
    want = loss_in_a_worker(2)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map_async(loss_in_a_worker, [2] * 8).get(60) == [want] * 8


def test_inputs_are_written_to():
    e, c, labels = lattice(20, 30, 6)
    bias = np.linspace(-1, 1, 30, dtype=np.float32)
    before = [array.tobytes() for array in (e, c, labels, bias)]
    for mode in ("chunk", "recompute"):
        linear_cross_entropy(e, c, labels, bias=bias, wrt=("e", "c", "bias"), mode=mode, softcap=2.0)
        assert [array.tobytes() for array in (e, c, labels, bias)] == before


def test_memory_of_an_earlier_array_shows_through():
    """Results are made without being cleared: fill the allocator's free blocks with NaN first."""
    e, c, labels = lattice(256, 4096, 32)
    labels[::4] = -100
    for reduction in ("mean", "sum", "none"):
        results = []
        for _ in range(3):
            for size in (256, 256 * 32, 4096 * 32):
                np.full(size, np.nan, np.float32)
            results.append(linear_cross_entropy(e, c, labels, reduction=reduction))
            assert reduction != "none" or not results[-1].loss[::4].any()
            assert not results[-1].d_e[::4].any() and np.isfinite(results[-1].d_c).all()
        assert len({np.asarray(r.loss).tobytes() + r.d_c.tobytes() for r in results}) == 1
