"""What tables are made of: columns, rows of cells, and what to know about them."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .points import MODELS, Point

GIB = 2**30
Record = dict[str, Any]


@dataclass
class Table:
    """
    Attributes:
        name: of its files.
        title, note: for readers.
        columns, rows: text and numbers; None where nothing is known.
        command: what makes its records.
        figure: how figures.py draws it, or None.
        series: the columns that the figure compares.
    """

    name: str
    title: str
    columns: list[str]
    rows: list[list[Any]]
    note: str = ""
    command: str = ""
    figure: str | None = None
    data: Any = field(default=None, repr=False)
    series: list[str] = field(default_factory=list)

    def write_csv(self, path: Path) -> None:
        with path.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(self.columns)
            writer.writerows([["" if cell is None else cell for cell in row] for row in self.rows])

    def brief(self) -> tuple[str, list[str], list[list[Any]]]:
        """(what all rows have in common, the other columns, their cells); columns without a cell are left out."""
        common, kept = [], []
        for index, column in enumerate(self.columns):
            cells = {row[index] for row in self.rows}
            if column in _COMMON and len(cells) == 1:
                common.append(_COMMON[column](*cells))
            elif cells != {None}:
                kept.append(index)
        return ", ".join(common), [self.columns[i] for i in kept], [[row[i] for i in kept] for row in self.rows]


def model_name(key: str) -> str:
    return MODELS[key].name if key in MODELS else key


_COMMON = {"model": model_name, "chip": str, "mesh": str, "rank": lambda rank: f"rank {rank}"}
NOT_RUN = "not run"


def gib(record: Record | None) -> str | float | None:
    """The cell of a record: GiB a chip, or by how much it did not fit."""
    if record is None:
        return None
    if record["outcome"] == "ok":
        return round(record["planned"]["total"] / GIB, 2)
    if record["outcome"] == "out-of-memory":
        needed = record.get("needed") or {}
        used = needed.get("total_bytes", needed.get("used_bytes"))
        return "does not fit" if used is None else f"does not fit ({used / GIB:.2f})"
    return record["outcome"]


def column_of(point: Point) -> str:
    name = point.arm if point.remat == "NONE" else f"{point.arm}, {point.remat} remat"
    return name if point.split else f"{name}, whole batch a chip"


def plans(records: Iterable[Record]) -> list[tuple[Point, Record]]:
    return [(Point.from_json(one["point"]), one) for one in records if one["kind"] == "plan"]
