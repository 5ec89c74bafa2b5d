"""Planned bytes, out of what XLA writes beside a program with --xla_dump_to: *-buffer-assignment.txt."""

from __future__ import annotations

import re
from typing import NamedTuple

# "allocation 14: size 1073742336, preallocated-temp:"; with a color, it is in another memory than the main one.
_ALLOCATION = re.compile(r"^allocation \d+: size (\d+)((?:,[^\n]*)?):$", re.MULTILINE)


class Buffers(NamedTuple):
    """By the names of `compiled.memory_analysis()`, as far as this file has them."""

    temp_size_in_bytes: int
    peak_memory_in_bytes: int | None = None


def parse(text: str) -> Buffers:
    """Raises ValueError if the text is no buffer assignment."""
    found = _ALLOCATION.findall(text)
    if not found:
        raise ValueError("no line is an allocation: not a buffer assignment, which --xla_dump_to writes as "
                         "*-buffer-assignment.txt")
    return Buffers(sum(int(size) for size, kind in found if "preallocated-temp" in kind and "color" not in kind))
