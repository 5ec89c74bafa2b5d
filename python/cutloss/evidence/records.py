"""The file of records: one JSON object a line, added whole and synced, so that a kill loses at most the point in work."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FORMAT = 1

# Outcomes that a second try would not change. The others (failed, timeout, host-memory) are tried again if asked for.
FINAL = ("ok", "out-of-memory")
OUTCOMES = (*FINAL, "failed", "timeout", "host-memory")

# What every record has, and of what type.
FIELDS: dict[str, type | tuple[type, ...]] = {
    "format": int,
    "key": str,
    "kind": str,  # "plan", or the name of what was run
    "outcome": str,
    "message": str,
    "seconds": dict,
    "versions": dict,
    "date": str,
    "command": str,
}


class RecordsError(ValueError):
    """The file of records cannot be used; the message says where and what to do."""


class Records:
    """Records by key. A later line of a key replaces an earlier one.

    `with Records(path) as records:` locks the file: two sweeps that wrote to it would both do the same points.
    """

    def __init__(self, path: Path, readonly: bool = False) -> None:
        self.path, self._readonly, self._file = path, readonly, None
        self._found: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> Records:
        if not self._readonly:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a+b")
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                self._file.close()
                raise RecordsError(f"{self.path}: another sweep writes to it; wait for it, or name another --out") from None
            _cut_torn_line(self._file)
        self._found = {record["key"]: record for record in read(self.path)}
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._found.values())

    def __len__(self) -> int:
        return len(self._found)

    def find(self, key: str) -> dict[str, Any] | None:
        return self._found.get(key)

    def add(self, record: dict[str, Any]) -> None:
        check(record)
        line = json.dumps(record, sort_keys=True, allow_nan=False).encode() + b"\n"
        self._file.write(line)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._found[record["key"]] = record


def check(record: dict[str, Any]) -> None:
    """Raises RecordsError unless the record has every field, of its type."""
    for name, kind in FIELDS.items():
        if not isinstance(record.get(name), kind):
            raise RecordsError(f"record {record.get('key')!r}: {name} is {record.get(name)!r}, not a {kind.__name__}")
    if record["outcome"] not in OUTCOMES:
        raise RecordsError(f"record {record['key']!r}: outcome {record['outcome']!r} is not one of {', '.join(OUTCOMES)}")
    if record["format"] != FORMAT:
        raise RecordsError(f"record {record['key']!r}: format {record['format']}, not {FORMAT}")
    if record["kind"] == "plan" and record["outcome"] == "ok" and not isinstance(record.get("planned"), dict):
        raise RecordsError(f"record {record['key']!r}: it has no planned bytes")


def read(path: Path) -> list[dict[str, Any]]:
    """Returns the records of a file, or none if there is no file. A last line that was cut off is left out.

    Raises:
        RecordsError: another line is no record.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    found = []
    for number, line in enumerate(lines[:-1], 1):  # after the last line's end there is nothing, or a line without one
        try:
            record = json.loads(line)
            check(record)
        except (ValueError, AttributeError) as error:
            raise RecordsError(f"{path}, line {number}: {error}; delete the line, or move the file away") from error
        found.append(record)
    return found


def _cut_torn_line(file: Any) -> None:
    """Cuts off what a kill left of a line. Without its end it may be half of one that happens to parse."""
    file.seek(0)
    content = file.read()
    whole = content.rfind(b"\n") + 1
    if whole != len(content):
        file.truncate(whole)
    file.seek(0, os.SEEK_END)
