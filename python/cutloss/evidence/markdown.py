"""The report as a page of Markdown, for readers of the repository; its figures and whole tables lie beside it."""

from __future__ import annotations

from typing import Any

from .. import _pages
from . import texts
from .cells import Table

# A longer table is cut here; its CSV has all of it.
_ROWS = 40


def page(found: list[dict[str, Any]], made: list[Table], pictures: Any) -> str:
    parts = [f"# {texts.TITLE}", *texts.summary(found, made), "## Method", *texts.METHOD, texts.made_with(found)]
    for table in made:
        parts += [f"## {table.title}", *texts.about(table)]
        parts += [f"![{table.title}]({table.name}.png)"] if table.name in pictures else []
        parts += [*_table(table), f"Again: `{table.command}`"]
    parts += ["## What is not shown", *texts.limits(found), "## Files", _files(made, pictures)]
    return "\n\n".join(parts) + "\n"


def _table(table: Table) -> list[str]:
    common, columns, rows = table.brief()
    cells = [["" if cell is None else str(cell).replace("\n", " ") for cell in row] for row in rows[:_ROWS]]
    more = f"{len(rows) - _ROWS} more rows are in [{table.name}.csv]({table.name}.csv)." if len(rows) > _ROWS else ""
    return [part for part in (f"All of {common}:" if common else "", _pages.table(columns, cells), more) if part]


def _files(made: list[Table], pictures: Any) -> str:
    rows = [["`records.jsonl`", "the records; each has the command that makes it again", ""],
            ["`report.html`, `report.pdf`", "this page", "`cutloss-evidence report`"]]  # fmt: skip
    for table in made:
        png = f", `{table.name}.png`" if table.name in pictures else ""
        rows.append([f"`{table.name}.csv`{png}", table.title, f"`{table.command}`"])
    return _pages.table(["file", "what", "records by"], rows)
