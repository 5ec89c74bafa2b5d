"""The real things: the TPU's compiler on tiny steps, several processes, parity over a kill. `make test-long` only."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cutloss.evidence.records import read

# As python/tests/jax/test_tpu.py: not in .venv, where JAX would look for a TPU in every program.
FOLDER = Path(__file__).parents[3] / "build" / "libtpu"


def command(*arguments, out, **popen):
    path = os.pathsep.join([str(FOLDER), *filter(None, sys.path)])
    program = [sys.executable, "-m", "cutloss.evidence.cli", *arguments, "--out", str(out)]
    return subprocess.Popen(program, env=os.environ | {"PYTHONPATH": path}, stderr=subprocess.PIPE, text=True, **popen)


def done(*arguments, out):
    child = command(*arguments, out=out, stdout=subprocess.DEVNULL)
    _, errors = child.communicate()
    return child.returncode, errors


needs_compiler = pytest.mark.skipif(
    not FOLDER.exists() and importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed: make test-long does, or pip install --target build/libtpu libtpu==0.0.42.1",
)


@pytest.mark.long
@needs_compiler
def test_a_tiny_step_is_planned_for_a_v5e(tmp_path):
    out = tmp_path / "records.jsonl"
    shapes = {"default": [], "cutloss": [], "scheme": [], "cutloss mesh": ["--fsdp", "2", "--tp", "2"]}
    for arm, more in shapes.items():
        status, errors = done("plan", "--model", "tiny-gemma3", "--arm", arm.split()[0], "--batch", "8", "--context", "256",
                              *more, out=out)  # fmt: skip
        assert status == 0, errors
    default, cutloss, scheme, mesh = read(out)
    for record in (default, cutloss, scheme, mesh):
        planned = record["planned"]
        assert planned["peak"] > planned["arguments"] > 0 and planned["total"] == planned["peak"] + planned["outputs"]
        assert record["estimate"]["flop"] > 0 and record["largest"], record
        assert record["versions"]["libtpu"]
    # 8 x 255 logits of 320 ids, f32: 2.5 MiB; what is planned with them is more.
    assert default["planned"]["peak"] - cutloss["planned"]["peak"] >= 2 << 20
    assert sum(mesh["hlo"]["collective_counts"].values()) > 0 and cutloss["hlo"]["collectives"] == []
    # Each of the scheme's four products is as much work as the default's two of the head: at least the default's FLOP.
    assert scheme["estimate"]["flop"] > default["estimate"]["flop"]


def workers_of(pid):
    """Command lines of the compilations that a sweep has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"cutloss.evidence.worker" in words and str(pid).encode() in words:
            found.append(words)
    return found


@pytest.mark.long
@needs_compiler
def test_a_frontier_killed_in_mid_compile_goes_on(tmp_path):
    out = tmp_path / "records.jsonl"
    arguments = ["frontier", "--model", "tiny-gemma3", "--arms", "cutloss", "--batches", "2,4", "--least", "32", "--most", "64",
                 "--step", "32"]  # fmt: skip
    child = command(*arguments, out=out, stdout=subprocess.DEVNULL)
    while child.poll() is None and not (read(out) and workers_of(child.pid)):
        time.sleep(0.05)
    assert child.poll() is None, child.stderr.read()
    child.send_signal(signal.SIGKILL)
    child.communicate()
    end = time.monotonic() + 20
    while workers_of(child.pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert not workers_of(child.pid)  # a compiler that went on would hold the memory the next sweep needs
    before = out.read_bytes()
    status, errors = done(*arguments, out=out)
    assert status == 0, errors
    shapes = [(record["point"]["batch"], record["point"]["context"]) for record in read(out)]
    assert out.read_bytes().startswith(before) and shapes == [(2, 32), (2, 64), (4, 32), (4, 64)]
    assert all(record["outcome"] == "ok" for record in read(out))


@pytest.mark.long
def test_several_processes_have_the_numbers_of_one(tmp_path):
    out = tmp_path / "records.jsonl"
    status, errors = done("multihost", "--processes", "2", "--devices", "2", out=out)
    assert status == 0, errors
    (record,) = read(out)
    assert len(record["results"]["several"]) == 2 and len(record["results"]["one"]) == 3


@pytest.mark.long
def test_parity_goes_on_after_kills_as_if_there_were_none(tmp_path):
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("".join(f"number {k}\tnombre {k} {'x' * (k % 7)}\n" for k in range(60)))
    arguments = ["parity", "--model-family", "gemma3", "--data", str(pairs), "--steps", "6", "--rank", "4", "--lr", "1e-2"]
    whole, killed = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    status, errors = done(*arguments, out=whole)
    assert status == 0, errors
    for wanted in (2, 4):
        child = command(*arguments, out=killed, stdout=subprocess.DEVNULL)
        while child.poll() is None and len(read(killed)) < wanted:
            time.sleep(0.01)
        child.send_signal(signal.SIGKILL)
        child.communicate()
    assert done(*arguments, out=killed)[0] == 0
    a, b = ([(one["key"], one["losses"], one["cosine"]) for one in read(path)] for path in (whole, killed))
    assert a == b and len(a) == 6
    for record in read(whole):
        assert abs(record["losses"]["cutloss"] - record["losses"]["default"]) <= 1e-5 * record["losses"]["default"]
        assert record["cosine"] >= 1 - 1e-9 and record["relative_difference"] <= 1e-4
    assert read(whole)[-1]["losses"]["default"] < read(whole)[0]["losses"]["default"]


@pytest.mark.long
def test_a_point_is_run_on_the_devices_there_are(tmp_path):
    out = tmp_path / "records.jsonl"
    child = command("run", "--model", "tiny-gemma3", "--arm", "cutloss", "--batch", "2", "--context", "32", "--json", out=out,
                    stdout=subprocess.PIPE)  # fmt: skip
    output, errors = child.communicate()
    assert child.returncode == 0, errors
    record = json.loads(output)
    assert record["kind"] == "run" and record["seconds"]["step"] > 0 and record["device"] == "cpu"
