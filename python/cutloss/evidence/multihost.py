"""Several processes as several hosts: the same numbers as one process, over jax.distributed with gloo on this machine.

Each process runs cutloss.jax.smoke, which computes loss and gradients over every mesh of all devices and compares its own
parts with a dense float64 reference. One process with all devices does the same; the losses must agree.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from . import process, records

# The sums of a loss are split over processes as they are over devices, and gloo adds in another order than one process:
# two f32 sums of fewer than 1000 terms. See smoke.TOLERANCE, which each has to keep to by itself.
SAME = 2**-20


def add(commands: Any) -> None:
    command = commands.add_parser("multihost", help="several processes on this machine: the same numbers as one")
    command.add_argument("--processes", type=int, default=2, help="(default %(default)s)")
    command.add_argument("--devices", type=int, default=2, help="of each process (default %(default)s)")
    command.add_argument("--timeout", type=float, default=900.0, help="seconds, of all (default %(default)s)")
    command.add_argument("--out", default="evidence/records.jsonl", metavar="FILE")
    command.add_argument("--json", action="store_true", help="print the record as JSON")
    command.set_defaults(run=main)


def main(options: argparse.Namespace, console: Any) -> int:
    for name in ("processes", "devices"):
        if getattr(options, name) < 1:
            raise records.RecordsError(f"--{name}: {getattr(options, name)} is less than 1")
    key = f"multihost {options.processes}x{options.devices}"
    with records.Records(Path(options.out)) as store:
        record = store.find(key)
        if record is None or record["outcome"] not in records.FINAL:
            with console.status(f"{options.processes} processes of {options.devices} devices, then one"):
                record = compare(options.processes, options.devices, options.timeout)
            store.add(record)
    if options.json:
        print(json.dumps(record))
    else:
        console.print(f"{key}: {record['outcome']}. {record['message']}", highlight=False, markup=False, soft_wrap=True)
    return 0 if record["outcome"] == "ok" else 1


def compare(processes: int, devices: int, timeout: float) -> dict[str, Any]:
    """Returns the record of `processes` x `devices` against one process with all devices."""
    start = time.monotonic()
    found: dict[str, Any] = {"outcome": "ok", "message": "", "results": {}}
    try:
        port = _free_port()
        together = ["--coordinator", f"127.0.0.1:{port}", "--processes", str(processes)]
        several = _run([[*together, "--process", str(k)] for k in range(processes)], devices, timeout)
        (one,) = _run([[]], processes * devices, timeout)
        found["results"] = {"several": several, "one": one}
        worst = difference(several, one)
        found["message"] = f"{len(one)} meshes; the losses differ by {worst:.1e} at most, relative to one process"
        if not worst <= SAME:
            found["outcome"] = "failed"
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        found |= {"outcome": "failed", "message": process.worker.shortened(str(error))}
    return {
        "format": records.FORMAT, "kind": "multihost", "key": f"multihost {processes}x{devices}", "date": process.now(),
        "command": f"cutloss-evidence multihost --processes {processes} --devices {devices}",
        "versions": process.versions(), "seconds": {"total": round(time.monotonic() - start, 2)}, **found,
    }  # fmt: skip


def difference(several: list[dict[str, Any]], one: dict[str, Any]) -> float:
    """The largest relative difference of a process's loss from that of one process; infinite if a mesh is missing."""
    worst = 0.0
    for result in several:
        if set(result) != set(one):
            return float("inf")
        for mesh, expected in one.items():
            error = abs(result[mesh]["value"] - expected["value"]) / abs(expected["value"])
            worst = error if not error <= worst else worst  # also a NaN
    return worst


def _run(commands: list[list[str]], devices: int, timeout: float) -> list[dict[str, Any]]:
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    program = [sys.executable, "-m", "cutloss.jax.smoke", "--json", "--xla"]
    running = [
        subprocess.Popen([*program, *more], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for more in commands
    ]
    try:
        results, end = [], time.monotonic() + timeout
        for child in running:
            output, errors = child.communicate(timeout=max(1.0, end - time.monotonic()))
            if child.returncode != 0:
                raise RuntimeError(f"cutloss.jax.smoke ended with {child.returncode}: {(errors or output).strip()[-1000:]}")
            results.append(json.loads(next(line for line in output.splitlines() if line.startswith("{"))))
        return results
    finally:
        for child in running:
            if child.poll() is None:
                child.kill()
                child.communicate()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
