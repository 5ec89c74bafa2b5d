"""What XLA wrote about a program's memory: all bytes it plans, and what is alive when the temporaries are largest.

XLA for TPU hands out no buffer assignment, but writes it as text where `--xla_dump_to` says, for programs that it then
refuses too: `*memory-usage-report.txt` has the total, the figure of the published tables; `*buffer-assignment.txt` the
size and place of every value, `*live-range.txt` from when to when each is alive.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

MODULE = ".*train_step.*"
FLAGS = "--xla_dump_to={folder} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=" + MODULE

_ALLOCATION = re.compile(r"^allocation \d+: size (\d+)(.*)")
_VALUE = re.compile(r"^ value: <\d+ (\S+) @(\d+)> \(size=(\d+),offset=\d+\): (\S.*)")
_RANGE = re.compile(r"^\s+(\S+):(\d+)-(\d+)$")
_KINDS = ("parameter", "maybe-live-out", "preallocated-temp", "constant")


def of(folder: Path, text: str | None = None, most: int = 12) -> dict[str, Any]:
    """Returns {"total_bytes", "kinds": bytes by kind, "largest": buffers at the peak}, as far as XLA wrote them.

    `text` is that of the compiled program, which says what part of the model a buffer is of; of a program that was
    refused there is only what is in the folder.
    """
    found: dict[str, Any] = {"largest": []}
    report = _newest(folder, "memory-usage-report")
    total = re.search(r"\(color=0\)\s+Total bytes: (\d+)", report)
    if total:
        found["total_bytes"] = int(total[1])
    assignment = _newest(folder, "buffer-assignment")
    if assignment:
        found["kinds"], values = _assignment(assignment)
        alive = _at_peak(values, _newest(folder, "live-range"))
        names = parts_of(text if text is not None else _newest(folder, "after_optimizations"))
        found["largest"] = _together(alive, names)[:most]
    return found


def _newest(folder: Path, what: str) -> str:
    files = sorted(folder.glob(f"*{what}.txt"), key=lambda path: path.stat().st_mtime)
    return files[-1].read_text(errors="replace") if files else ""


def _assignment(text: str) -> tuple[dict[str, int], list[tuple[str, int, str]]]:
    """(bytes of main memory by kind of allocation, (name, size, array) of each value of the temporaries). An argument in
    whose place an output is written is of kind "aliased"."""
    kinds: dict[str, int] = defaultdict(int)
    values, temporary = [], False
    for line in text.splitlines():
        if head := _ALLOCATION.match(line):
            kind = next((kind for kind in _KINDS if kind in head[2]), None)
            kind = "aliased" if kind == "parameter" and "maybe-live-out" in head[2] else kind
            in_main = "color" not in head[2]
            temporary = in_main and kind == "preallocated-temp"
            if in_main and kind and "thread-local" not in head[2]:
                kinds[kind] += int(head[1])
        elif temporary and (value := _VALUE.match(line)):
            values.append((value[1], int(value[3]), value[4].split("{")[0]))
    return dict(kinds), values


def _at_peak(values: list[tuple[str, int, str]], ranges: str) -> list[tuple[str, int, str]]:
    """Those that are alive when they are most bytes together."""
    lives = {found[1].removesuffix("{}"): (int(found[2]), int(found[3]))
             for found in map(_RANGE.match, ranges.splitlines()) if found}  # fmt: skip
    changes: dict[int, int] = defaultdict(int)
    known = [(value, lives[value[0].removesuffix("{}")]) for value in values if value[0].removesuffix("{}") in lives]
    for (_, size, _), (begin, end) in known:
        changes[begin] += size
        changes[end + 1] -= size
    best = now = 0
    at = None
    for time in sorted(changes):
        now += changes[time]
        if now > best:
            best, at = now, time
    return [value for value, (begin, end) in known if at is not None and begin <= at <= end]


def _together(alive: list[tuple[str, int, str]], names: dict[str, str]) -> list[dict[str, Any]]:
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for name, size, array in alive:
        plain = re.sub(r"\{.*\}$", "", name)
        of = names.get(plain, re.sub(r"[.\d]+$", "", plain))
        row = found.setdefault((array, of), {"bytes": 0, "count": 0, "array": array, "of": of})
        row["bytes"] += size
        row["count"] += 1
    return sorted(found.values(), key=lambda row: -row["bytes"])


def parts_of(text: str) -> dict[str, str]:
    """The part of the model that each instruction of a program is of, as its metadata have it; a copy is of what it copies."""
    found, copies = {}, {}
    for line in text.splitlines():
        head = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = ", line)
        if head is None:
            continue
        if of := re.search(r'op_name="([^"]*)"', line):
            found[head[1]] = part_of(of[1])
        elif copied := re.search(r" copy(?:-start|-done)?\(%?([\w.\-]+)", line):
            copies[head[1]] = copied[1]
    for name, copied in copies.items():
        while copied in copies:
            copied = copies[copied]
        if copied in found:
            found[name] = found[copied]
    return found


def part_of(op_name: str) -> str:
    """An op_name without the transformations around it: what a reader of the model would call it."""
    backward = "transpose(" in op_name
    short, before = re.sub(r"^jit\([^)]*\)/", "", op_name), ""
    while short != before:
        before, short = short, re.sub(r"\b(?:transpose|jvp|jit|vmap|checkpoint|rematted_computation)\(([^()]*)\)", r"\1", short)
    short = re.sub(r"layers?[_/.]?\d+", "layers", short)
    return ("gradient: " if backward else "") + short.strip("/")[:100]
