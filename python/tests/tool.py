"""The command-line tool as the tests call it, and the names of its input files."""

import json
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

BAD_USAGE, NO_MEMORY, UNAVAILABLE = 2, 3, 4


def find_tool() -> str | None:
    beside_python = Path(sysconfig.get_path("scripts")) / "cutloss"
    return str(beside_python) if beside_python.exists() else shutil.which("cutloss")


TOOL = os.environ.get("CUTLOSS_TOOL") or find_tool()


def run(*args, env=None, cwd=None):
    return subprocess.run(
        [TOOL, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        check=False,
    )


def run_json(*args, **kwargs):
    result = run(*args, "--json", **kwargs)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def refused(code, *args, words=(), **kwargs):
    """The call fails with this code and one line on stderr that has these words."""
    result = run(*args, **kwargs)
    assert result.returncode == code, (result.stdout, result.stderr)
    assert result.stdout == ""
    assert result.stderr.startswith("cutloss: error: ")
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    for word in words:
        assert word in result.stderr, result.stderr
    return result.stderr


def inputs(folder, **other):
    files = {name: folder / f"{name}.npy" for name in ("e", "c", "labels")} | other
    return [part for name, file in files.items() for part in (f"--{name}", file)]


needs_tool = pytest.mark.skipif(TOOL is None, reason="the tool cutloss is not installed")
