"""The tables of docs/analysis.md, from the JSON files of `python -m cutloss.analysis`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import _pages

EXPONENT = 12  # of the published study's epsilon
WHEN = ("before", "after")  # training
SHOWN = (12, 16, 20, 24)  # exponents of the tables of errors
TITLES = {"gemma3-270m": "Gemma 3 270M", "gemma3-270m-tuned": "Gemma 3 270M", "smollm2-135m": "SmolLM2 135M"}

# Of Qwen2.5-0.5B, by row; see the page for the source. What it does not tell is left out.
PUBLISHED = {
    "V, D": "151936, 896",
    "tokens": "4096",
    "mean nll": "3.52",
    "entries with p ≥ ε": "0.125 %",
    "a token, mean (most)": "190 (757)",
    "rank at which mean p < ε": "187",
    "tiles kept, natural order": "60.9 %",
    "tiles kept, sorted order": "49.3 %",
    "tiles kept, random order": "99.1 %",
    "of them for a label alone, natural": "4.7 %",
    "of them for a label alone, sorted": "3.5 %",
    "of them for a label alone, random": "7.5 %",
    "tiles (sorted), entries at temperature 0.75": "36.0 %, 0.055 %",
    "tiles (sorted), entries at temperature 0.5": "21.0 %, 0.017 %",
    "tiles (sorted), entries at temperature 0.35": "13.0 %, 0.007 %",
    "tile filter: error of dE": "3.1e-3",
    "tile filter: error of dC": "7.7e-4",
    "rows of dC with nothing": "10.0 %",
    "their share of ‖dC‖²": "< 1e-5",
}


def render(page: str, files: dict[str, dict[str, Any]]) -> str:
    """The page with its tables made from {"MODEL-TEXT": analysis}.

    Raises:
        ValueError: the page has no place for them, or an analysis lacks what is shown.
    """
    runs, texts = (
        {name: result for name, result in files.items() if (model_and_text(name)[1] in WHEN) == trained}
        for trained in (True, False)
    )
    try:
        if runs:
            page = _pages.put(page, "training", training(runs))
        page = _pages.put(page, "study", study(texts))
        return _pages.put(page, "tables", "\n\n".join(_of_one(name, result) for name, result in texts.items()))
    except (KeyError, StopIteration) as error:
        raise ValueError(f"an analysis lacks {error}; make it without --what and --exponents") from error


def model_and_text(name: str) -> tuple[str, str]:
    model, _, text = name.rpartition("-")
    return model, text


def title(name: str) -> str:
    model, text = model_and_text(name)
    return f"{TITLES.get(model, model)}, {text.capitalize() if text in ('english', 'french') else text}"


def study(files: dict[str, dict[str, Any]]) -> str:
    """The published study's numbers beside the same of each file."""
    columns = [_study_column(result) for result in files.values()]
    labels = list(columns[0]) if columns else []
    head = ["ε = 2⁻¹², 128 × 128 tiles", "Qwen2.5-0.5B, the article's", *map(title, files)]
    return _pages.table(head, [[label, PUBLISHED.get(label, ""), *(c[label] for c in columns)] for label in labels])


def training(files: dict[str, dict[str, Any]]) -> str:
    """What each run of `--run` changed: {"RUN-before": analysis, "RUN-after": analysis}, side by side."""
    heads = []
    for name, result in files.items():
        model, when = model_and_text(name)
        steps = result["record"].get("steps")
        heads.append(f"{TITLES.get(model, model)}, {when}" + (f" {steps} steps" if steps else ""))
    columns = [_study_column(result) | _error_cells(result) for result in files.values()]
    rows = [[label, *(column[label] for column in columns)] for label in columns[0]]
    return _pages.table(["ε = 2⁻¹², 128 × 128 tiles", *heads], rows)


def _error_cells(r: dict[str, Any]) -> dict[str, str]:
    """Errors of dE of the filters by entries, and what the library's own work on."""
    at = r["settings"]["exponents"].index(EXPONENT)
    out = {f"{e['method']}: error of dE": _number(e["d_e"][at]["relative"]) for e in r["errors"] if e["method"] != "tile"}
    for t in r["tolerances"]:
        out[f"{t['filter']}, tolerance {t['tolerance']:.0e}: worked on, error of dE"] = (
            f"{_percent(t['kept'])}, {_number(t['d_e']['relative'])}"
        )
    return out


def _study_column(r: dict[str, Any]) -> dict[str, str]:
    s, mass = r["settings"], r["mass"]
    at = s["exponents"].index(EXPONENT)
    epsilon = 2.0**-EXPONENT
    tiles = {(t["order"], t["temperature"]): t for t in r["tiles"]}
    entries = {e["temperature"]: e["share"][at] for e in r["entries"]}
    tile = next(e for e in r["errors"] if e["method"] == "tile")
    rank = next(k for k, p in zip(mass["rank"], mass["probability"], strict=True) if p < epsilon)
    out = {
        "V, D": f"{s['v']}, {s['d']}",
        "tokens": str(s["n_valid"]),
        "mean nll": f"{r['nll']:.2f}",
        "entries with p ≥ ε": _percent(mass["kept_mean"][at] / s["v"]),
        "a token, mean (most)": f"{mass['kept_mean'][at]:.0f} ({mass['kept_max'][at]})",
        "rank at which mean p < ε": str(rank),
        "mass below ε, mean (most)": f"{_percent(mass['mass_below_mean'][at])} ({_percent(mass['mass_below_max'][at])})",
    }
    orders = ("natural", "sorted", "frequency", "random")
    out |= {f"tiles kept, {order} order": _percent(tiles[order, 1.0]["share"][at]) for order in orders}
    for order in ("natural", "sorted", "random"):
        out[f"of them for a label alone, {order}"] = _percent(tiles[order, 1.0]["forced_by_label"][at])
    for temperature in (0.75, 0.5, 0.35):
        share = tiles["sorted", temperature]["share"][at]
        out[f"tiles (sorted), entries at temperature {temperature}"] = (
            f"{_percent(share)}, {_percent(entries[temperature])}"
        )
    d_c = tile["d_c"][at]
    return out | {
        "tile filter: error of dE": _number(tile["d_e"][at]["relative"]),
        "tile filter: error of dC": _number(d_c["relative"]),
        "rows of dC with nothing": _percent(d_c["rows_with_nothing"]),
        "their share of ‖dC‖²": _number(d_c["norm2_in_them"]),
    }


def _of_one(name: str, r: dict[str, Any]) -> str:
    return "\n\n".join([f"### {title(name)}", _errors(r), _tolerances(r), _sums(r)])


def _errors(r: dict[str, Any]) -> str:
    head = ["filter, ε", "worked on", "dE", "worst row", "bias of the sum", "of its bound", "dC", "rows of dC with nothing"]
    rows = []
    for errors in r["errors"]:
        for exponent in SHOWN:
            at = r["settings"]["exponents"].index(exponent)
            e, c = errors["d_e"][at], errors["d_c"][at]
            rows.append([
                f"{errors['method']}, 2^-{exponent}", _percent(errors["kept"][at]), _number(e["relative"]),
                _number(e["worst_row"]), _number(e["bias"]), f"{e['of_bound']:.2f}" if e["of_bound"] else "–",
                _number(c["relative"]), _percent(c["rows_with_nothing"]),
            ])  # fmt: skip
    return _pages.table(head, rows)


def _tolerances(r: dict[str, Any]) -> str:
    of_table: list[tuple[str, Callable[[dict[str, Any]], str]]] = []
    if all("d_c" in t for t in r["tolerances"]):
        of_table = [
            ("dC", lambda t: _number(t["d_c"]["relative"])),
            ("rows of dC with nothing", lambda t: _percent(t["d_c"]["rows_with_nothing"])),
        ]
    head = ["library's filter, tolerance", "ε", "worked on", "redone rows", "dE", "worst row", "bias of the sum"]
    rows = [
        [f"{t['filter']}, {t['tolerance']:.0e}", _number(t["epsilon"]), _percent(t["kept"]), str(t["rows_redone"]),
         *(_number(t["d_e"][key]) for key in ("relative", "worst_row", "bias")), *(value(t) for _, value in of_table)]
        for t in r["tolerances"]
    ]  # fmt: skip
    return _pages.table([*head, *(label for label, _ in of_table)], rows)


def _sums(r: dict[str, Any]) -> str:
    rows = []
    for v in r["variants"]:
        tiles = f"filtered at 2^-{v['exponent']}" if v["filtered"] else "all"
        e, c = v["d_e"], v["d_c"]
        rows.append([v["sums"], tiles, _number(e["relative"]), _number(e["bias"]), _number(c["relative"])])
    return _pages.table(["sums", "tiles", "dE", "bias of the sum", "dC"], rows)


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _number(value: float) -> str:
    return f"{value:.1e}"


def names(folder: Path) -> list[Path]:
    """The analyses in a folder, each at its place."""
    return sorted(folder.glob("*.json"), key=place)


def place(path: Path) -> tuple[str, int, str]:
    """By model, and by text as the tool names them first."""
    order = {"english": 0, "french": 1, "code": 2, "before": 0, "after": 1}
    model, text = model_and_text(path.stem)
    return model, order.get(text, len(order)), text
