"""Python of its own for what must be set before JAX starts, such as the number of devices."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def environment(devices: int) -> dict[str, str]:
    """With as many virtual CPU devices, and the tests' folder to import from."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
    return os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), "PYTHONPATH": path}


def run(*arguments: str, devices: int) -> str:
    """Returns what `python arguments...` prints; fails with its errors."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=environment(devices), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
