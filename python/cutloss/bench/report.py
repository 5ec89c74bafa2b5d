"""Tables and pictures of measured points."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import _pages

MIB = 2**20
HEADER = ("", "median s", "quartiles", "GFLOP/s", "of peak", "u", "extra MiB", "off: loss", "dE", "dC", "best peer /")

Point = dict[str, Any]


@dataclass(frozen=True)
class Section:
    """Points of one shape, dtype and head.

    Attributes:
        points: one of each family.
        rows: the cells of HEADER for each, ours first, by time.
    """

    title: str
    points: list[Point]
    rows: list[tuple[str, ...]]


def sections(data: dict[str, Any]) -> list[Section]:
    """In the order in which the shapes come."""
    groups: dict[tuple, list[Point]] = {}
    for point in data["points"]:
        key = tuple(point[name] for name in ("shape", "n", "dtype", "head", "threads"))
        groups.setdefault(key, []).append(point)
    result = []
    for (shape, n, dtype, _, threads), points in groups.items():
        unit = unit_seconds(groups.get((shape, n, dtype, "loss", threads), []))
        shown = sorted(chosen(points), key=lambda p: (not p["ours"], not has_speed(p), seconds_of(p)))
        peer = best_peer(points)
        result.append(Section(title(points[0]), shown, [row(point, peer, unit) for point in shown]))
    return result


def has_speed(point: Point) -> bool:
    return point["status"] in ("ok", "coarse")


def seconds_of(point: Point) -> float:
    return point.get("seconds_median", math.inf)


def chosen(points: list[Point]) -> list[Point]:
    """One point of each family: the fastest right one, or if none is right the fastest, or one that failed."""
    families: dict[str, list[Point]] = {}
    for point in points:
        families.setdefault(point["family"], []).append(point)
    rank = {"ok": 0, "coarse": 1, "wrong": 2, "failed": 3}
    return [min(family, key=lambda p: (rank[p["status"]], seconds_of(p))) for family in families.values()]


def best_peer(points: list[Point]) -> Point | None:
    """The fastest right one that is not ours."""
    return min((p for p in points if p["status"] == "ok" and not p["ours"]), key=seconds_of, default=None)


def unit_seconds(points: list[Point]) -> float | None:
    """1u here: the time of our forward alone, one product over the vocabulary."""
    return min((seconds_of(p) for p in points if p["status"] == "ok" and p["ours"]), default=None)


def row(point: Point, peer: Point | None, unit: float | None = None) -> tuple[str, ...]:
    """The cells of HEADER. A wrong result has its error and no speed; a filter's that is too coarse is not compared."""
    if point["status"] == "failed":
        return (point["name"], "failed: " + point["reason"], *[""] * (len(HEADER) - 2))
    errors = [f"{point['errors'][name]:.1e}" if name in point["errors"] else "" for name in ("loss", "d_e", "d_c")]
    extra = "" if point["extra_bytes"] is None else f"{point['extra_bytes'] / MIB:.0f}"
    if point["status"] == "wrong":
        return (point["name"], f"wrong: {'; '.join(point['wrong'])}", "", "", "", "", extra, *errors, "")
    low, high = quartiles(point["seconds"])
    seconds = point["seconds_median"]
    gflops = point["flops"] / seconds / 1e9
    ratio = "coarse" if point["status"] == "coarse" else f"{peer['seconds_median'] / seconds:.2f} x" if peer else ""
    return (point["name"], f"{seconds:.3f}", f"{low:.3f}–{high:.3f}", f"{gflops:.0f}",
            f"{100 * gflops / point['peak_gflops']:.0f} %", f"{seconds / unit:.2f}" if unit else "", extra, *errors,
            ratio)


def quartiles(seconds: list[float]) -> tuple[float, float]:
    if len(seconds) < 2:
        return seconds[0], seconds[0]
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return low, high


def title(p: Point) -> str:
    head = "loss only" if p["head"] == "loss" else f"{p['head']} head"
    return f"{p['shape']}, {p['dtype']}, {head} (N {p['n']}, V {p['v']}, D {p['d']}, {p['threads']} threads)"


def text_table(table: list[tuple[str, ...]]) -> str:
    """Columns for a terminal. Cells that say why there is no number take the rest of their line."""
    lines = [HEADER, *table]
    plain = [line for line in lines if not line[1].startswith(("failed", "wrong"))]
    widths = [max(len(line[k]) for line in plain) for k in range(len(HEADER))]
    widths[0] = max(len(line[0]) for line in lines)

    def show(line):
        name = line[0].ljust(widths[0])
        if line in plain:
            return "  ".join([name, *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:]))]).rstrip()
        return f"{name}  {line[1]}"

    return "\n".join(show(line) for line in lines)


def markdown_table(table: list[tuple[str, ...]]) -> str:
    return _pages.table(HEADER, table, numbers=True)


def machine_line(data: dict[str, Any]) -> str:
    machine = data["machine"]
    commits = sorted({p["commit"][:10] for p in data["points"] if p["ours"] and "commit" in p})
    where = f"{machine['cpu']}, {machine['threads']} threads, target {machine['target']}"
    return f"{where}; commit {', '.join(commits) or '?'}"


def markdown(files: dict[str, dict[str, Any]]) -> str:
    """Everything measured, by file name, as sections of a page."""
    parts = []
    for name, data in files.items():
        parts.append(f"### {machine_line(data)}\n\n`{name}`")
        parts += [f"**{section.title}**\n\n{markdown_table(section.rows)}" for section in sections(data)]
    return "\n\n".join(parts) if parts else "No results are kept yet."


def render(page: str, files: dict[str, dict[str, Any]]) -> str:
    """The page with its tables made from these files.

    Raises:
        ValueError: the page has no place for tables.
    """
    return _pages.put(page, "tables", markdown(files))


def plot(data: dict[str, Any], folder: Path) -> list[Path]:
    """One picture for each shape: time and extra memory, a line of panels for each head and dtype.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    by_shape: dict[str, list[Section]] = {}
    for section in sections(data):
        if any(map(has_speed, section.points)):
            by_shape.setdefault(section.points[0]["shape"], []).append(section)
    paths = []
    for shape, panels in by_shape.items():
        height = sum(1.2 + 0.28 * len(panel.points) for panel in panels)
        figure, axes = pyplot.subplots(len(panels), 2, figsize=(12, height), layout="constrained", squeeze=False)
        for (time_axis, memory_axis), panel in zip(axes, panels, strict=True):
            draw_panel(time_axis, memory_axis, panel)
        figure.suptitle(machine_line(data), fontsize=9)
        paths.append(folder / f"{shape}.png")
        figure.savefig(paths[-1], dpi=110)
        pyplot.close(figure)
    return paths


def draw_panel(time_axis, memory_axis, panel: Section) -> None:
    """Bars, the fastest on top; ours in blue, coarse filters pale."""
    points = sorted(filter(has_speed, panel.points), key=lambda p: -p["seconds_median"])
    names = [p["name"] for p in points]
    colours = [{(True, "ok"): "tab:blue", (True, "coarse"): "lightsteelblue"}.get((p["ours"], p["status"]), "tab:gray")
               for p in points]
    spread = [[max(0.0, p["seconds_median"] - quartiles(p["seconds"])[0]) for p in points],
              [max(0.0, quartiles(p["seconds"])[1] - p["seconds_median"]) for p in points]]
    bars = time_axis.barh(names, [p["seconds_median"] for p in points], xerr=spread, color=colours)
    time_axis.bar_label(bars, fmt="%.3g", padding=3)
    time_axis.set_title(f"{panel.title}\nseconds", fontsize=9)
    bars = memory_axis.barh(names, [max(0, p["extra_bytes"] or 0) / MIB for p in points], color=colours)
    memory_axis.bar_label(bars, fmt="%.0f", padding=3)
    memory_axis.set_yticks([])
    memory_axis.set_title("extra memory, MiB", fontsize=9)
    for axis in (time_axis, memory_axis):
        axis.margins(x=0.15)
