"""Runs one point in a process of its own, within a time and a size, and returns its record whatever happens to it."""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from . import records, worker
from .points import Point

PACKAGES = ("cutloss", "jax", "jaxlib", "libtpu", "google-tunix", "flax", "qwix", "optax")
_POLL = 0.2


class Stopped(Exception):
    """The sweep was interrupted; there is no record of the point."""


def run(
    point: Point,
    timeout: float,
    host_bytes: int | None = None,
    command: list[str] | None = None,
    environment: dict[str, str] = worker.ENVIRONMENT,
    stop: threading.Event | None = None,
) -> dict[str, Any]:
    """Returns the point's record.

    Args:
        point: what to compile.
        timeout: seconds after which it is given up.
        host_bytes: resident size above which it is given up; None: no limit.
        command: program and first arguments instead of worker.py's.
        environment: variables over this process's.
        stop: ends it when set, and raises Stopped.
    """
    start, peak, stopped = time.monotonic(), 0, None
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder, "result"), Path(folder, "log")
        arguments = [json.dumps(point.to_json()), str(result), str(os.getpid())]
        with log.open("wb") as output:
            child = subprocess.Popen(
                [*(command or [sys.executable, "-m", worker.__name__]), *arguments],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=_environment(environment),
                process_group=0,  # and not a session, in which it would have a priority of its own again
            )  # fmt: skip
            try:
                while child.poll() is None and stopped is None:
                    time.sleep(_POLL)
                    if stop is not None and stop.is_set():
                        raise Stopped
                    peak = max(peak, _resident(child.pid))
                    if time.monotonic() - start > timeout:
                        stopped = ("timeout", f"given up after {timeout:.0f} s; --timeout sets the limit")
                    elif host_bytes is not None and peak > host_bytes:
                        text = f"given up at {peak / 2**30:.1f} GiB of this machine's memory; --host-memory sets the limit"
                        stopped = ("host-memory", text)
            finally:
                _kill(child)
        taken = time.monotonic() - start
        found = _outcome(child, result, log, stopped)
    found["seconds"] = {**found["seconds"], "total": round(taken, 2)}
    return record(point, {**found, "host_peak_bytes": peak})


def record(point: Point, found: dict[str, Any], kind: str = "plan") -> dict[str, Any]:
    """The record of a point from what is particular to it."""
    return {
        "format": records.FORMAT,
        "kind": kind,
        "key": point.key,
        "point": point.to_json(),
        "command": point.command,
        "date": now(),
        "versions": versions(),
        **found,
    }


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


@functools.cache
def versions() -> dict[str, str]:
    """Of what decides the result, as installed; libtpu may be on PYTHONPATH alone."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return found


def _environment(more: dict[str, str]) -> dict[str, str]:
    return os.environ | more | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def _outcome(child: Any, result: Path, log: Path, stopped: tuple[str, str] | None) -> dict[str, Any]:
    if result.exists():  # also where the process dies while it ends
        return json.loads(result.read_text())
    if stopped is None:
        lines = log.read_text(errors="replace").strip().splitlines()
        how = f"killed by {signal.Signals(-child.returncode).name}" if child.returncode < 0 else f"exit {child.returncode}"
        stopped = ("failed", worker.shortened(f"{how}: " + "\n".join(lines[-8:])))
    return {"outcome": stopped[0], "message": stopped[1], "seconds": {}}


def _resident(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def _kill(child: Any) -> None:
    if child.poll() is None:
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    child.wait()
