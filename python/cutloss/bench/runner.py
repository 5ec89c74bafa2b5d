"""Measures points one after the other, each in a process of its own, and checks them."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from . import cases, inputs, memory, reference, store

WORKER = Path(__file__).with_name("worker.py")
PEER_PYTHON = Path("build/peers/bin/python")
PACKAGES = {  #: of each peer: what worker.py imports, as importlib finds it
    "torch-dense": "torch", "torch-auto": "torch", "torch-chunks": "torch", "torch-loop": "torch",
    "optax": "optax", "jax-cce": "jax_cce",
}


def say(text: str, end: str = "\n") -> None:
    print(text, file=sys.stderr, flush=True, end=end)


def tool(*arguments: str) -> str:
    path = Path(sysconfig.get_path("scripts")) / "cutloss"
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


def machine(threads: int) -> dict[str, Any]:
    info = json.loads(tool("info", "--json"))
    return {"cpu": info["cpu"], "threads": threads, "target": info["target"], "system": platform.platform(),
            "python": platform.python_version()}


def peak_gflops(threads: int) -> float:
    """What multiply-adds alone reach, just now."""
    shape = ("--n", "1024", "--v", "8192", "--d", "128", "--frozen", "--reps", "1")
    return json.loads(tool("bench", *shape, "--threads", str(threads), "--json"))["peak_gflops"]


def commit() -> str:
    """Of the tree this package is used from, with a mark of what is changed in it; "unknown" outside of one."""
    git = ["git", "-C", str(Path(__file__).parent)]
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    if head.returncode != 0:
        return "unknown"
    changes = subprocess.run([*git, "diff", "HEAD"], capture_output=True, check=False).stdout
    return head.stdout.strip() + ("+" + hashlib.sha256(changes).hexdigest()[:8] if changes else "")


def missing_packages(python: Path, peers: list[str]) -> dict[str, list[str]]:
    """Packages that this Python does not have, each with the names of the peers that need it."""
    packages = sorted({PACKAGES[peer] for peer in peers})
    code = "import importlib.util, sys; print(*(name for name in sys.argv[1:] if importlib.util.find_spec(name)))"
    try:
        done = subprocess.run([python, "-c", code, *packages], capture_output=True, text=True, check=False)
        found = done.stdout.split()
    except OSError:
        found = []
    missing = [package for package in packages if package not in found]
    return {package: [peer for peer in peers if PACKAGES[peer] == package] for package in missing}


def run_worker(python: Path, job: dict, timeout: float) -> dict:
    """What the process reported, or {"status": "failed", "reason": ...}."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "job.json"
        out = Path(folder) / "out.npz"
        file.write_text(json.dumps({**job, "out": str(out)}))
        environment = {**os.environ, "OMP_NUM_THREADS": str(job["threads"]), "JAX_PLATFORMS": "cpu"}
        try:
            done = subprocess.run([python, WORKER, file], capture_output=True, text=True, timeout=timeout,
                                  env=environment, check=False)
        except subprocess.TimeoutExpired:
            return {"status": "failed", "reason": f"more than {timeout:.0f} s"}
        except OSError as error:
            return {"status": "failed", "reason": f"{python}: {error.strerror}"}
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
            killed = done.returncode == -9
            return {"status": "failed", "reason": "killed, probably for lack of memory" if killed else last[:200]}
        with np.load(out) as arrays:
            return {**json.loads(done.stdout.strip().splitlines()[-1]), "arrays": dict(arrays)}


def judge(result: dict, want: reference.Reference, shape: cases.Shape, dtype: str, way: cases.Variant) -> dict:
    """The result with its errors and what became of it, without the arrays: "ok"; "coarse", a filter off by more than
    exact peers may be compared with; "wrong"; or "failed"."""
    if result.get("status") == "failed":
        return result
    arrays = result.pop("arrays")
    found = reference.errors(want, arrays)
    limit = reference.limits(want, shape.d, dtype, rounded_logits=not way.ours, error=way.error)
    over = reference.wrong(found, limit)
    coarse = way.error is not None and found["loss"] <= limit["loss"] and not reference.wrong(
        found, {**limit, "d_e": FILTER_BROKEN, "d_c": FILTER_BROKEN})
    return {**result, "loss": float(arrays["loss"]), "errors": found, "wrong": over,
            "status": "ok" if not over else "coarse" if coarse else "wrong"}


FILTER_BROKEN = 0.2  #: no setting that is measured here is off by as much; a filter that is has a fault


def worker_version() -> str:
    """Changes with what is measured and how."""
    return hashlib.sha256(WORKER.read_bytes()).hexdigest()[:8]


def points_of(options, shape: cases.Shape) -> list[tuple[cases.Variant, dict[str, Any]]]:
    """What to measure, each with the fields that say what it is."""
    ways = cases.variants(shape, options.modes, options.peers)
    ways = cases.one_of_each(ways) if options.quick else ways
    version, worker = commit(), worker_version()
    return [
        (way, {"shape": shape.name, "n": shape.n, "v": shape.v, "d": shape.d, "dtype": dtype, "head": head,
               "threads": options.threads, "name": way.name, "family": way.family, "options": way.options,
               "ours": way.ours, "commit": version, "worker": worker, "flops": shape.flops(head)})
        for dtype in options.dtypes for head in options.heads for way in ways if head in way.heads
    ]


def measure_all(options, shapes: list[cases.Shape], results: store.Store) -> None:
    """Measures what is not in `results` yet and puts it there, point by point."""
    todo = {shape: points_of(options, shape) for shape in shapes}
    if not options.again:
        todo = {shape: [(way, p) for way, p in points if not results.find(p)] for shape, points in todo.items()}
    total, done = sum(map(len, todo.values())), 0
    for shape, points in todo.items():
        if not points:
            continue
        say(f"{shape.name}: inputs, and what is right in float64")
        paths = inputs.prepare(shape, options.work / "inputs")
        wants = {dtype: inputs.reference_of(paths, dtype) for dtype in options.dtypes}
        for way, point in points:
            done += 1
            say(f"[{done}/{total}] {shape.name}, {point['dtype']}, {point['head']}, {way.name}: ", end="")
            result = measure(options, shape, way, point, paths, wants[point["dtype"]])
            results.add({**point, "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **result})
            say(summary(result))


def measure(options, shape: cases.Shape, way: cases.Variant, point: dict, paths: dict[str, Path],
            want: reference.Reference) -> dict:
    if reason := memory.refusal(shape, point["dtype"], point["head"], way):
        return {"status": "failed", "reason": reason}
    job = {
        "impl": way.impl, "options": way.options, "dtype": point["dtype"], "head": point["head"],
        "threads": options.threads, "reps": options.reps, "least_reps": min(3, options.reps),
        "most_seconds": options.seconds, "vocab_rows": want.vocab_rows.tolist(),
        **{name: str(path) for name, path in paths.items()},
    }
    peak = peak_gflops(options.threads)
    python = Path(sys.executable) if way.ours else options.peer_python
    return {"peak_gflops": peak, **judge(run_worker(python, job, options.timeout), want, shape, point["dtype"], way)}


def summary(result: dict) -> str:
    if result["status"] == "failed":
        return "failed: " + result["reason"]
    if result["status"] == "wrong":
        return f"wrong: {'; '.join(result['wrong'])}"
    extra = "?" if result["extra_bytes"] is None else f"{result['extra_bytes'] / 2**20:.0f}"
    coarse = f" ({'; '.join(result['wrong'])})" if result["wrong"] else ""
    return f"{result['seconds_median']:.3f} s, {extra} MiB{coarse}"
