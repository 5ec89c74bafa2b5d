"""A figure for each table that has one, as a matplotlib figure: report.py puts it into the page, a PNG and the PDF."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from .cells import Table
from .points import CHIPS


def draw(table: Table) -> Any | None:
    """Returns the figure, or None if the table has none or too little to draw."""
    made = _DRAW[table.figure](table) if table.figure else None
    if made is not None:
        made.set_layout_engine("constrained")
    return made


def _new(width: float = 9, height: float = 4, columns: int = 1, rows: int | None = None) -> tuple[Any, Any]:
    """With `rows`, a grid of axes with one range."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    grid = {} if rows is None else {"sharex": True, "sharey": True, "squeeze": False}
    return pyplot.subplots(rows or 1, columns, figsize=(width, height), **grid)


def _number(cell: Any) -> tuple[float | None, bool]:
    """(GiB, whether it fits) of a cell of planned memory."""
    if isinstance(cell, int | float):
        return float(cell), True
    found = re.search(r"\(([\d.]+)\)", cell or "")
    return (float(found[1]), False) if found else (None, False)


def _bars(table: Table) -> Any | None:
    """Bars of a shape side by side; those that did not fit are hollow."""
    own = [table.columns.index(arm) for arm in table.series if not arm.startswith("published")]
    rows = [row for row in table.rows if any(_number(row[index])[0] is not None for index in own)][:14]
    arms = [arm for arm in table.series if any(_number(row[table.columns.index(arm)])[0] is not None for row in rows)]
    if not rows:
        return None
    figure, axes = _new(max(7, 1.1 * len(rows) + 2), 4.4)
    width = 0.84 / len(arms)
    for k, arm in enumerate(arms):
        for at, row in enumerate(rows):
            value, fits = _number(row[table.columns.index(arm)])
            if value is None:
                continue
            axes.bar(at + (k - len(arms) / 2 + 0.5) * width, min(value, 40), width, color=f"C{k}" if fits else "none",
                     edgecolor=f"C{k}", label=None)  # fmt: skip
    handles = [axes.bar([0], [0], color=f"C{k}", label=arm) for k, arm in enumerate(arms)]
    for limit in {CHIPS[row[1]][1] for row in rows}:
        axes.axhline(limit, color="grey", linestyle="--", linewidth=1)
    names = [f"{row[3]}x{row[4]}" + ("" if row[5] == 16 else f" r{row[5]}") for row in rows]
    if len({row[0] for row in rows}) > 1:
        names = [f"{row[0]}\n{name}" for row, name in zip(rows, names, strict=True)]
    if len({row[2] for row in rows}) > 1:
        names = [f"{name}\n{row[2]}" for row, name in zip(rows, names, strict=True)]
    axes.set_xticks(range(len(rows)), names, fontsize=7)
    axes.set_ylabel("GiB a chip (cut at 40)")
    axes.set_title(f"{table.title}; hollow: does not fit", fontsize=10)
    axes.legend(handles=handles, fontsize=7)
    return figure


def _frontier(table: Table) -> Any | None:
    """Pass and fail of every point of the model and mesh with most of them, an arm a panel; published ends as lines."""
    tries = Counter()
    for key, row in table.data.items():
        tries[key[:3]] += sum(map(len, row.values()))
    of = list(max(tries, key=tries.get))
    groups = {key[3]: row for key, row in table.data.items() if list(key[:3]) == of}
    arms = [column for column in table.columns[6:] if any(column in row for row in groups.values())]
    if not arms:
        return None
    across = min(3, len(arms))
    figure, grid = _new(3.4 * across, 3.2 * -(-len(arms) // across), across, -(-len(arms) // across))
    for k, axes in enumerate(grid.flat):
        if k >= len(arms):
            axes.axis("off")
            continue
        for name, color in (("published default", "C0"), ("published CCE", "C1")):
            ends = [(row[table.columns.index(name)], row[3]) for row in table.rows if row[:3] == of]
            ends = [(context, batch) for context, batch in ends if context]
            axes.plot(*zip(*ends, strict=True), "-", color=color, linewidth=1, label=f"{name} ends") if ends else None
        for batch, row in groups.items():
            for context, fits in row.get(arms[k], ()):
                axes.plot(context, batch, "o" if fits else "x", color="C2" if fits else "C3")
        for axis, scale in ((axes.xaxis, axes.set_xscale), (axes.yaxis, axes.set_yscale)):
            scale("log", base=2)
            axis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_title(arms[k], fontsize=9)
        axes.set_xlabel("context", fontsize=8)
        axes.set_ylabel("batch", fontsize=8)
    grid.flat[0].legend(fontsize=7)
    return figure


def _parity(table: Table) -> Any | None:
    steps = [row[1] for row in table.rows]
    figure, (losses, cosines) = _new(9, 3.6, 2)
    losses.plot(steps, [row[2] for row in table.rows], "-o", markersize=3, label="Tunix's loss")
    losses.plot(steps, [row[3] for row in table.rows], "--x", markersize=4, label="cutloss")
    losses.set_xlabel("step")
    losses.set_ylabel("loss (nats a token)")
    losses.legend(fontsize=8)
    cosines.semilogy(steps, [max(float(row[5]), 1e-17) for row in table.rows], "-o", markersize=3, label="1 - cosine")
    cosines.semilogy(steps, [max(float(row[6]), 1e-17) for row in table.rows], "-s", markersize=3, label="relative difference")
    cosines.set_xlabel("step")
    cosines.set_title("gradients", fontsize=9)
    cosines.legend(fontsize=8)
    return figure


def _quality(table: Table) -> Any | None:
    figure, (train, held_out) = _new(9, 3.6, 2)
    for one, style in zip(table.data, ("-", "--", ":"), strict=False):
        if one["outcome"] != "ok":
            continue
        rows = one["batch"]
        train.plot([rows * (k + 1) for k in range(len(one["losses"]))], _smooth(one["losses"]), style, label=one["arm"])
        held_out.plot([rows * step for step, _ in one["evaluated"]], [loss for _, loss in one["evaluated"]], style + "o",
                      markersize=3, label=one["arm"])  # fmt: skip
    for axes, title in ((train, "training loss, mean of 8 steps"), (held_out, "held-out loss")):
        axes.set_xlabel("rows seen")
        axes.set_title(title, fontsize=9)
        axes.legend(fontsize=8)
    return figure


def _smooth(values: list[float], over: int = 8) -> list[float]:
    return [sum(values[max(0, k + 1 - over) : k + 1]) / len(values[max(0, k + 1 - over) : k + 1]) for k in range(len(values))]


_DRAW: dict[str, Callable[[Table], Any | None]] = {
    "bars": _bars, "frontier": _frontier, "parity": _parity, "quality": _quality,
}  # fmt: skip
