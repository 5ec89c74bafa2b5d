"""The figures of an analysis. matplotlib is imported here and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

METHODS = {"drop": "tab:red", "tail": "tab:orange", "unbiased": "tab:green", "tile": "tab:gray"}
FILTERS = {"certified": ("D", "tab:orange"), "unbiased": ("o", "tab:green")}


def draw(results: dict[str, dict[str, Any]], out: Path, stem: str = "") -> list[Path]:
    """Draws what the results (label -> analysis) hold, as PNG and SVG in the folder `out`; returns the files."""
    import matplotlib

    matplotlib.use("agg")
    # Ids in an SVG are random by default: the same figure would be another file each time.
    matplotlib.rcParams["svg.hashsalt"] = "cutloss"
    files = []
    for name, having, make in (("survival", "mass", survival), ("tiles", "maps", tile_maps),
                               ("error", "errors", error_against_cost)):  # fmt: skip
        shown = {label: result for label, result in results.items() if result.get(having)}
        if not shown:
            continue
        figure = make(shown)
        for kind in ("png", "svg"):
            files.append(out / f"{stem}{name}.{kind}")
            figure.savefig(files[-1], dpi=110, metadata={"Date": None} if kind == "svg" else {"Software": None})
    return files


def survival(results: dict[str, dict[str, Any]]):
    """Mean probability by rank, and the mass that the ranks after it hold."""
    figure, (left, right) = _axes(1, 2, (10, 4))
    for label, result in results.items():
        mass = result["mass"]
        left.loglog(mass["rank"], mass["probability"], label=label)
        right.loglog(mass["rank"], [max(1 - c, 1e-9) for c in mass["cumulative"]], label=label)
    left.axhline(2**-12, color="black", lw=0.7, ls=":")
    left.annotate("$2^{-12}$", (1.2, 2**-12), va="bottom")
    left.set(xlabel="rank", ylabel="mean probability", ylim=(1e-10, 1.2))
    right.set(xlabel="rank", ylabel="mass beyond it", ylim=(1e-6, 1.2))
    left.legend(fontsize="small")
    return figure


def tile_maps(results: dict[str, dict[str, Any]]):
    """The largest |G| of each tile, one row of pictures for each result, one column for each order."""
    columns = max(len(result["maps"]) for result in results.values())
    figure, axes = _axes(len(results), columns, (5 * columns, 0.6 + 1.7 * len(results)), squeeze=False)
    for row, (label, result) in zip(axes, results.items(), strict=True):
        for axis, tile_map in zip(row, result["maps"], strict=False):
            values = [[-40 if x is None else x for x in line] for line in tile_map["log2_largest"]]
            picture = axis.imshow(values, aspect="auto", cmap="magma", vmin=-24, vmax=0, interpolation="nearest")
            axis.set_title(f"{label}, {tile_map['order']} order", fontsize="small")
            axis.set(xlabel="tile of ids", ylabel="tile of tokens")
    figure.colorbar(picture, ax=axes, label="log2 of the largest |G|")
    return figure


def error_against_cost(results: dict[str, dict[str, Any]]):
    """Relative error of dE and dC over the share of entries worked on; points: the shipped filters by tolerance."""
    figure, axes = _axes(len(results), 2, (10, 0.6 + 3.2 * len(results)), squeeze=False)
    for row, (label, result) in zip(axes, results.items(), strict=True):
        for axis, gradient, name in zip(row, ("d_e", "d_c"), ("dE", "dC"), strict=True):
            for errors in result["errors"]:
                points = [(x, e["relative"]) for x, e in zip(errors["kept"], errors[gradient], strict=False)]
                points = [point for point in points if point[1] > 0]
                if points:
                    axis.loglog(*zip(*points, strict=True), ".-", color=METHODS[errors["method"]],
                                label=errors["method"])  # fmt: skip
            for point in result.get("tolerances", []):
                if gradient not in point:
                    continue
                marker, color = FILTERS[point["filter"]]
                axis.loglog(point["kept"], point[gradient]["relative"], marker, mfc="none", color=color)
                axis.annotate(f"{point['tolerance']:.0e}", (point["kept"], point[gradient]["relative"]), fontsize=6)
            axis.axhline(2**-9, color="black", lw=0.7, ls=":")
            axis.set(title=f"{label}: {name}", xlabel="share of entries worked on", ylabel="relative error")
        row[0].legend(fontsize="small")
    return figure


def _axes(rows: int, columns: int, size: tuple[float, float], squeeze: bool = True):
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=squeeze)
