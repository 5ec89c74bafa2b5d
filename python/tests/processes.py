"""Python of its own for what must be set before JAX starts, such as the number of devices."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


def environment(devices: int) -> dict[str, str]:
    """With as many virtual CPU devices, and the tests' folder to import from."""
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    return os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), "PYTHONPATH": path}


def run(*arguments: str, devices: int) -> str:
    """Returns what `python arguments...` prints; fails with its errors."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=environment(devices), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def start(devices: int, *arguments: object) -> subprocess.Popen:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.Popen(command, env=environment(devices), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def result(process: subprocess.Popen, timeout: float = 300) -> Any:
    """What a process prints last, as JSON; fails with its errors, or after `timeout` seconds."""
    out, error = process.communicate(timeout=timeout)
    assert process.returncode == 0, out + error[-4000:]
    return json.loads(out.splitlines()[-1])


def results_of_two(arguments: Callable[[str, int], Iterable[object]], devices: int = 4, timeout: float = 300) -> list[Any]:
    """What two processes of so many devices print; arguments(address, process) are those of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    together = [start(devices, *arguments(address, k)) for k in (0, 1)]
    try:
        return [result(process, timeout) for process in together]
    finally:
        for process in together:
            process.kill()
