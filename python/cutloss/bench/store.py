"""The file of results: written after every point, so that a run goes on where the last one stopped."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

FORMAT = 1

KEY = ("shape", "n", "v", "d", "dtype", "head", "threads", "name", "options")


class ForeignResults(ValueError):
    """The file holds something else; the message says what and what to do."""


def key_of(point: dict[str, Any]) -> str:
    """What makes two points the same measurement: also how it was made, and for ours the commit."""
    return json.dumps([point[name] for name in (*KEY, "worker")] + [point["commit"] if point["ours"] else ""],
                      sort_keys=True)


class Store:
    """Points measured on one machine, in a JSON file."""

    def __init__(self, path: Path, machine: dict[str, Any]) -> None:
        self.path = path
        self.data: dict[str, Any] = {"format": FORMAT, "machine": machine, "points": []}
        if path.exists():
            self.data = read(path)
            if self.data["machine"]["cpu"] != machine["cpu"]:
                raise ForeignResults(f"{path} was measured on {self.data['machine']['cpu']}, this is {machine['cpu']}: "
                                     "name another file with --out")

    @property
    def points(self) -> list[dict[str, Any]]:
        return self.data["points"]

    def find(self, point: dict[str, Any]) -> dict[str, Any] | None:
        """The finished measurement of this point, if there is one. One that failed is not finished."""
        return next((p for p in self.points if key_of(p) == key_of(point) and p["status"] != "failed"), None)

    def add(self, point: dict[str, Any]) -> None:
        """Adds the point, in place of one of the same row (of any commit or worker), and writes the file."""
        same = {name: point[name] for name in KEY}
        self.data["points"] = [p for p in self.points if {name: p[name] for name in KEY} != same] + [point]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        building = self.path.with_suffix(f".{os.getpid()}.tmp")
        building.write_text(json.dumps(self.data, indent=1) + "\n")
        building.rename(self.path)


def read(path: Path) -> dict[str, Any]:
    """The content of a file of results.

    Raises:
        ForeignResults: it is not one, or of another format.
    """
    try:
        data = json.loads(path.read_text())
        if data["format"] == FORMAT and isinstance(data["points"], list) and "cpu" in data["machine"]:
            return data
        reason = f"format {data['format']}, expected {FORMAT}"
    except (ValueError, KeyError, TypeError) as error:
        reason = repr(error)
    raise ForeignResults(f"{path} is not a file of these results ({reason}); move it away or name another with --out")
