"""The tool `cutloss analyze`, called with arrays."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

FLOATS = ("float32", "bfloat16", "float16")


class AnalysisError(ValueError):
    """The arrays or options cannot be analysed; the message is the tool's."""


def analyze(
    e: Any, c: Any, labels: Any, *, progress: bool = False, extra: Sequence[str] = (), **options: Any
) -> dict[str, Any]:
    """Returns what `cutloss analyze --json` prints for hidden states, table and labels.

    Args:
        e: hidden states [N, D], an array (float32, bfloat16 or float16) or the path of a .npy file.
        c: the head's table, [V, D] or, with head_layout="dv", [D, V].
        labels: [N], integers.
        progress: leave the tool's standard error to the terminal, where it shows how far it is.
        extra: words of the command line, as they are.
        **options: the tool's, with underscores: tile="64x256", exponents="8:26", what=["shares", "d_e"], softcap=30.0,
            orders=["natural", "given"], order=ids, counts=counts, sample_tokens=512. Lists are joined with commas;
            order and counts may be arrays.

    Raises:
        AnalysisError: a bad array or option.
        RuntimeError: the tool is not installed.
    """
    with tempfile.TemporaryDirectory(prefix="cutloss-analyze-") as name:
        folder = Path(name)
        arrays = {"hidden": e, "table": c, "labels": labels}
        arrays |= {key: options.pop(key) for key in ("order", "counts") if options.get(key) is not None}
        files = {key: _file(key, array, folder) for key, array in arrays.items()}
        named = [part for key, file in files.items() for part in (f"--{key}", file)]
        return run([*named, *_words(options), *extra], progress)


def run(arguments: list[str], progress: bool = False) -> dict[str, Any]:
    """Returns the JSON of `cutloss analyze` with these arguments."""
    with tempfile.TemporaryDirectory(prefix="cutloss-analyze-") as name:
        out = Path(name, "analysis.json")
        done = subprocess.run(
            [find_tool(), "analyze", *arguments, "--json", str(out)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=None if progress else subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            said = (done.stderr or "").strip().removeprefix("cutloss: error: ")
            raise AnalysisError(said or f"cutloss analyze failed with exit code {done.returncode}")
        return json.loads(out.read_text())


def find_tool() -> str:
    """Returns the path of the tool: $CUTLOSS_TOOL, beside this Python, or on the PATH."""
    beside = Path(sysconfig.get_path("scripts")) / "cutloss"
    found = os.environ.get("CUTLOSS_TOOL") or (str(beside) if beside.exists() else shutil.which("cutloss"))
    if not found:
        raise RuntimeError("the tool cutloss is not installed; it comes with the package: pip install cutloss")
    return found


def _file(key: str, array: Any, folder: Path) -> str:
    if isinstance(array, (str, os.PathLike)):
        return os.fspath(array)
    array = np.asarray(array)
    if key in ("hidden", "table") and array.dtype.name not in FLOATS:
        raise AnalysisError(f"{key} is {array.dtype.name}; it must be {', '.join(FLOATS[:2])} or {FLOATS[2]}")
    path = folder / f"{key}.npy"
    np.save(path, array)
    return str(path)


def _words(options: dict[str, Any]) -> list[str]:
    words = []
    for key, value in options.items():
        if value is None:
            continue
        listed = isinstance(value, (list, tuple))
        words += [f"--{key.replace('_', '-')}", ",".join(map(str, value)) if listed else str(value)]
    return words
