"""What a sweep shows while it runs, and its table at the end."""

from __future__ import annotations

from typing import Any

from .points import Point

GIB = 2**30


def gib(count: int | float | None) -> str:
    return "–" if count is None else f"{count / GIB:.2f}"


def in_words(record: dict[str, Any]) -> str:
    """A record's result in a few words."""
    if record["outcome"] == "ok":
        return f"plans {gib(record['planned']['total'])} GiB" if "planned" in record else "done"
    if record["outcome"] == "out-of-memory":
        needed = record.get("needed") or {}
        used = needed.get("total_bytes", needed.get("used_bytes"))
        return f"does not fit: needs {gib(used)} of {gib(needed.get('limit_bytes'))} GiB"
    return f"{record['outcome']}: {record['message'].splitlines()[-1] if record['message'] else ''}"


class Display:
    """A progress bar on a terminal, a line for each point elsewhere; `total` None: not known beforehand."""

    def __init__(self, console: Any, wanted: list[Point] | None, store: Any = None) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
        from rich.progress import TimeElapsedColumn, TimeRemainingColumn

        self._console = console
        self._progress = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(),
            TimeElapsedColumn(), TimeRemainingColumn(), console=console, disable=not console.is_terminal,
        )  # fmt: skip
        self._task = self._progress.add_task("points", total=None if wanted is None else len(wanted))

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, event: str, point: Point, record: dict[str, Any] | None) -> None:
        if event == "begin":
            self._progress.update(self._task, description=point.key)
            return
        self._progress.advance(self._task)
        if event == "done" or not self._console.is_terminal:
            known = " (done before)" if event == "known" else f" ({record['seconds'].get('total', 0):.0f} s)"
            text = f"{point.key}: {in_words(record)}{known}"
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def records_table(found: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table("point", "outcome", "arguments", "outputs", "temporary", "peak", "total")
    for record in found:
        planned = record.get("planned") or {}
        cells = [gib(planned.get(name)) for name in ("arguments", "outputs", "temporary", "peak", "total")]
        if not planned and record.get("needed"):
            cells[-1] = gib(record["needed"].get("total_bytes", record["needed"].get("used_bytes")))
        table.add_row(record["key"], record["outcome"], *cells)
    return table


def frontier_table(rows: list[dict[str, Any]] | None) -> Any:
    from rich.table import Table

    table = Table("model", "mesh", "arm", "remat", "batch", "largest context", "first that does not fit")
    for row in rows or ():
        cells = [row[name] for name in ("model", "mesh", "arm", "remat", "batch", "largest", "smallest_unfit")]
        table.add_row(*("–" if cell is None else str(cell) for cell in cells))
    return table
