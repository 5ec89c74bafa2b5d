"""How far the cost model is from measured runs: each of a file of results, predicted by `cutloss plan --costs`.

Nothing is timed here: a result holds its time, the peak measured just before it, and what its filter kept. The page's
table comes from

    python -m cutloss.bench.costs docs/bench/epyc-avx2.json --bandwidth 22e9 --cache 32MiB --render docs/cost-model.md
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import _options, _pages
from ..analysis._tool import find_tool
from . import report, store

WITHIN = 0.2
GRADIENTS = {"loss": (False, False), "frozen": (True, False), "trainable": (True, True)}
HEAD_TEXT = {"loss": "none", "frozen": "dE", "trainable": "dE, dC"}


@dataclass(frozen=True)
class Machine:
    """What a file of results does not say of its machine: bytes per second, and bytes of the last cache."""

    bandwidth: float
    cache_bytes: float


@dataclass(frozen=True)
class Check:
    point: dict[str, Any]
    predicted: float

    @property
    def ratio(self) -> float:
        return self.point["seconds_median"] / self.predicted

    @property
    def within(self) -> bool:
        return abs(self.ratio - 1) <= WITHIN


def checks(data: dict[str, Any], machine: Machine) -> list[Check]:
    """Of every timed point of ours. Raises RuntimeError if the tool refuses one."""
    ours = [point for point in data["points"] if point["ours"] and report.has_speed(point)]
    return [Check(point, predict(point, machine, data["machine"]["target"])) for point in ours]


def predict(point: dict[str, Any], machine: Machine, target: str) -> float:
    """Returns the seconds that the model gives for a point's plan, at the peak measured beside it."""
    kept = kept_shares(point)
    with tempfile.TemporaryDirectory(prefix="cutloss-costs-") as name:
        described = Path(name, "machine.txt")
        described.write_text(
            f"name = as measured\nf32_flops = {point['peak_gflops'] * 1e9}\nbandwidth = {machine.bandwidth}\n"
            f"cache_bytes = {machine.cache_bytes}\nthreads = {point['threads']}\n"
        )
        options = {"n": point["n"], "v": point["v"], "d": point["d"], "dtype": point["dtype"], "mode": point["mode"],
                   "target": target, "machine": described, **kept}  # fmt: skip
        options |= {key: point["options"][key] for key in ("filter", "epsilon", "tolerance") if key in point["options"]}
        words = [word for key, value in options.items() for word in (f"--{key.replace('_', '-')}", str(value))]
        # A file of block sizes of this machine would give another plan.
        environment = {**os.environ, "CUTLOSS_TUNING_FILE": "none"}
        done = subprocess.run([find_tool(), "plan", "--costs", *words, "--json"], capture_output=True, text=True,
                              env=environment, check=False)  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"{point['shape']}, {point['name']}: {done.stderr.strip()}")
    wanted = (point["mode"], *GRADIENTS[point["head"]], point["options"].get("filter", "none"))
    (row,) = (r for r in json.loads(done.stdout)["rows"] if (r["mode"], r["d_e"], r["d_c"], r["filter"]) == wanted)
    return row["seconds"]


def kept_shares(point: dict[str, Any]) -> dict[str, float]:
    """What the filter kept of the rows that it did not leave to the exact mode, and the share of those it did."""
    told = point.get("filter_report")
    if not told:
        return {}
    stayed = told["rows"] - told["rows_redone"]
    return {
        "kept_share": min(1.0, told["kept_entries"] / (max(stayed, 1) * point["v"])),
        "redone_share": 1 - stayed / max(told["rows"], 1),
    }


def tables(found: Iterable[Check]) -> str:
    """The sentence with the count, and measured / predicted of each point by shape and gradients."""
    found = list(found)
    groups: dict[tuple, list[Check]] = {}
    for check in found:
        groups.setdefault(tuple(check.point[key] for key in ("shape", "n", "v", "d", "dtype", "head")), []).append(check)
    rows = []
    for (shape, n, v, d, dtype, head), members in groups.items():
        for check in members:
            name = check.point["name"].removeprefix("cutloss ")
            kept = kept_shares(check.point)
            rows.append([
                f"{shape}, {dtype}, {n} × {v} × {d}", HEAD_TEXT[head], name,
                f"{100 * kept['kept_share']:.2g} %" if kept else "", f"{check.point['peak_gflops']:.0f}",
                f"{check.predicted:.2f}", f"{check.point['seconds_median']:.2f}", f"{check.ratio:.2f}",
            ])  # fmt: skip
    head_row = ["head, dtype, N × V × D", "gradients", "mode or filter", "kept", "peak, GFLOP/s", "predicted, s",
                "measured, s", "ratio"]  # fmt: skip
    count = sum(check.within for check in found)
    said = f"Of these {len(found)} runs {count} are within {100 * WITHIN:.0f} % of the prediction."
    return f"{said}\n\n{_pages.table(head_row, rows)}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m cutloss.bench.costs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, help="a file of results of cutloss.bench")
    parser.add_argument("--bandwidth", type=float, required=True, help="of its machine, bytes per second")
    parser.add_argument("--cache", type=_options.size, required=True, help="its last cache, such as 32MiB")
    parser.add_argument("--render", type=Path, metavar="PAGE", help="put the table into the page")
    options = parser.parse_args(argv)
    try:
        text = tables(checks(store.read(options.results), Machine(options.bandwidth, float(options.cache))))
        if options.render:
            options.render.write_text(_pages.put(options.render.read_text(), "check", text))
        else:
            print(text)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"cutloss.bench.costs: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
