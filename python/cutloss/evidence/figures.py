"""A figure for each table that has one, as a matplotlib figure: report.py puts it into the page, a PNG and the PDF."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from .tables import Table

LIMIT = 15.75  # GiB of a v5e that the compiler has


def draw(table: Table) -> Any | None:
    """Returns the figure, or None if the table has none or too little to draw."""
    made = _DRAW[table.figure](table) if table.figure else None
    if made is not None:
        made.set_layout_engine("constrained")
    return made


def _new(width: float = 9, height: float = 4, columns: int = 1) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(1, columns, figsize=(width, height))


def _number(cell: Any) -> tuple[float | None, bool]:
    """(GiB, whether it fits) of a cell of planned memory."""
    if isinstance(cell, int | float):
        return float(cell), True
    found = re.search(r"\(([\d.]+)\)", cell or "")
    return (float(found[1]), False) if found else (None, False)


def _bars(table: Table) -> Any | None:
    """Bars of a shape side by side; those that did not fit are hollow."""
    arms, first = table.series, table.columns.index(table.series[0])
    own = [table.columns.index(arm) for arm in arms if not arm.startswith("published")]
    rows = [row for row in table.rows if any(_number(row[index])[0] is not None for index in own)][:14]
    if not rows:
        return None
    figure, axes = _new(max(7, 1.1 * len(rows) + 2), 4.4)
    width = 0.84 / len(arms)
    for k, arm in enumerate(arms):
        for at, row in enumerate(rows):
            value, fits = _number(row[first + k])
            if value is None:
                continue
            axes.bar(at + (k - len(arms) / 2 + 0.5) * width, min(value, 40), width, color=f"C{k}" if fits else "none",
                     edgecolor=f"C{k}", label=None)  # fmt: skip
    handles = [axes.bar([0], [0], color=f"C{k}", label=arm) for k, arm in enumerate(arms)]
    axes.axhline(LIMIT, color="grey", linestyle="--", linewidth=1)
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
    """Pass and fail of every point that was tried, one chip, the first model."""
    groups = {key: row for key, row in table.data.items() if key[0] == table.rows[0][0] and key[2] == table.rows[0][2]}
    arms = sorted({arm for row in groups.values() for arm in row})
    if not groups:
        return None
    figure, all_axes = _new(max(5, 3.2 * len(arms)), 3.6, len(arms))
    for axes, arm in zip(all_axes if len(arms) > 1 else [all_axes], arms, strict=True):
        for (_, _, _, batch), row in groups.items():
            for context, fits in row.get(arm, ()):
                axes.plot(context, batch, "o" if fits else "x", color="C2" if fits else "C3")
        for axis, scale in ((axes.xaxis, axes.set_xscale), (axes.yaxis, axes.set_yscale)):
            scale("log", base=2)
            axis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_title(arm, fontsize=9)
        axes.set_xlabel("context")
    (all_axes[0] if len(arms) > 1 else all_axes).set_ylabel("batch")
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
