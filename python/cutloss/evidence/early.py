"""Ends a compilation when its memory is known: generating the code takes five times as long as all before it.

XLA writes the optimized program with its memory assigned before it generates code. If all of it is well within the chip's
memory, the compiler will not refuse it, and nothing more is asked. Near the limit and above it, the compiler decides.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import buffers
from .points import CHIPS, Point

# The total has the outputs twice where the compiler's refusal has them once: what it compares is never more. Published runs
# of 15.65 GiB in all ran on chips of 15.75.
WELL_WITHIN = 0.95
_PROGRAM = "*after_optimizations_after_buffer_assignment.txt"  # written last
_POLL = 0.5


def fits_for_sure(total_bytes: int, point: Point) -> bool:
    return total_bytes <= WELL_WITHIN * CHIPS[point.chip][1] * 2**30


def watch(dump: Path, point: Point, finish: Callable[[str, dict[str, Any]], None]) -> None:
    """Calls `finish(text, what buffers.of returns)` from a thread as soon as the program is there and fits for sure."""

    def look() -> None:
        text = _when_whole(dump)
        written = buffers.of(dump, text)
        if "total_bytes" in written and fits_for_sure(written["total_bytes"], point):
            finish(text, written)

    threading.Thread(target=look, daemon=True).start()


def _when_whole(dump: Path) -> str:
    """The text of the program, once it ends as a program does and has stopped growing."""
    before = -1
    while True:
        time.sleep(_POLL)
        for path in dump.glob(_PROGRAM):
            size = path.stat().st_size
            if size == before and is_whole(text := path.read_text(errors="replace")):
                return text
            before = size


def is_whole(text: str) -> bool:
    """Whether the text ends where the program's entry, its last computation, does."""
    entry = text.rfind("\nENTRY ")
    return entry >= 0 and "\n}" in text[entry:] and text.rstrip().endswith("\n}")
