"""Finished runs side by side: the table, summary.csv and plot.png."""

from __future__ import annotations

import csv
import json
import math
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .config import ConfigError
from .display import GIB


@dataclass
class ArmResult:
    """What is known of one arm, filled in from its events."""

    arm: str
    data: dict[str, Any] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    compile_seconds: float | None = None
    planned_bytes: int | None = None
    peak_rss_bytes: int | None = None
    translation: dict[str, str] = field(default_factory=dict)
    quality: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    def take(self, event: dict[str, Any]) -> None:
        """Takes in one event of a run."""
        match event["event"]:
            case "data":
                self.data = event
            case "compiled":
                self.compile_seconds, self.planned_bytes = event["seconds"], event["planned_bytes"]
            case "step":
                self.losses.append(event["loss"])
                self.seconds.append(event["seconds"])
            case "trained":
                self.peak_rss_bytes = event["peak_rss_bytes"]
            case "generated":
                self.translation = {key: event[key] for key in ("source", "reference", "before", "after")}
            case "quality":
                self.quality = {when: event[when] for when in ("before", "after")}
            case "error":
                self.error = event["message"]

    @property
    def step_seconds(self) -> float:
        """Median seconds of a step; the compilation is not in any of them."""
        return statistics.median(self.seconds)

    def summary(self) -> dict[str, Any]:
        return {
            "arm": self.arm,
            "steps": len(self.losses),
            "first_loss": self.losses[0],
            "last_loss": self.losses[-1],
            "step_seconds_median": round(self.step_seconds, 4),
            "compile_seconds": round(self.compile_seconds, 2),
            "planned_bytes": self.planned_bytes,
            "peak_rss_bytes": self.peak_rss_bytes,
        }


def read(path: Path) -> ArmResult:
    """Returns what a run folder holds; raises ConfigError if its run is not finished."""
    events = path / "metrics.jsonl"
    if not (path / "summary.json").is_file() or not events.is_file():
        raise ConfigError(f"{path}: no finished run; there is no summary.json")
    result = ArmResult(path.name)
    for line in events.read_text().splitlines():
        result.take(json.loads(line))
    return result


def largest_difference(results: list[ArmResult]) -> float:
    """Returns the largest difference of the arms' losses at the same step; NaN if a loss is not finite."""
    steps = list(zip(*(r.losses for r in results), strict=True))
    # max() passes over a NaN that does not come first.
    if not all(math.isfinite(loss) for losses in steps for loss in losses):
        return math.nan
    return max(max(losses) - min(losses) for losses in steps)


def table(results: list[ArmResult], title: str | None = None):
    """Returns the rich table: a column for each arm, and what the second has over the first."""
    from rich.table import Table

    shown = Table(title=title)
    shown.add_column("")
    for result in results:
        shown.add_column({"default": "Tunix's loss"}.get(result.arm, result.arm), justify="right")
    if len(results) == 2:
        shown.add_column("difference", justify="right")

    def row(name, values, show, compare):
        cells = [show(value) for value in values]
        shown.add_row(name, *cells, *([compare(*values)] if len(values) == 2 else []))

    def less(a, b):
        return f"{b / a:.2f} x" if a else ""

    common = min(len(r.losses) for r in results)
    shown_steps = sorted({round(1 + i * (common - 1) / 9) for i in range(10)}) if common else []
    for step in shown_steps:
        row(f"loss, step {step}", [r.losses[step - 1] for r in results], "{:.6f}".format, lambda a, b: f"{b - a:+.1e}")
    row("seconds a step (median)", [r.step_seconds for r in results], "{:.2f}".format, less)
    row("seconds to compile", [r.compile_seconds for r in results], "{:.1f}".format, less)
    row("planned memory of the step", [r.planned_bytes / GIB for r in results], "{:.2f} GiB".format, less)
    row("peak memory of the process", [r.peak_rss_bytes / GIB for r in results], "{:.2f} GiB".format, less)
    return shown


def write_csv(results: list[ArmResult], path: Path) -> None:
    """Writes a row for each arm."""
    rows = [result.summary() for result in results]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


def plot(results: list[ArmResult], path: Path) -> None:
    """Draws memory and loss side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (memory, loss) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    names = [result.arm for result in results]
    for offset, key, label in ((-0.2, "planned_bytes", "planned, the step"), (0.2, "peak_rss_bytes", "peak, the process")):
        values = [getattr(result, key) / GIB for result in results]
        bars = memory.bar([i + offset for i in range(len(names))], values, 0.38, label=label)
        memory.bar_label(bars, fmt="%.2f")
    memory.set_xticks(range(len(names)), names)
    memory.set_ylabel("GiB")
    memory.margins(y=0.15)
    memory.set_title("Memory")
    memory.legend()
    # Right curves lie on each other: the second is drawn dashed so that both can be seen.
    for result, style in zip(results, ("-o", "--x"), strict=False):
        loss.plot(range(1, len(result.losses) + 1), result.losses, style, label=result.arm)
    loss.set_xlabel("step")
    loss.set_ylabel("loss (nats a token)")
    loss.xaxis.get_major_locator().set_params(integer=True)
    loss.set_title("Loss")
    loss.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
