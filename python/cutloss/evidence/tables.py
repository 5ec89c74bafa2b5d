"""Tables from records, each beside what was published. A table is columns, rows of cells, and what to know about it."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import published
from .points import Point

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
    """

    name: str
    title: str
    columns: list[str]
    rows: list[list[Any]]
    note: str = ""
    command: str = ""
    figure: str | None = None
    data: Any = field(default=None, repr=False)

    def write_csv(self, path: Path) -> None:
        with path.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(self.columns)
            writer.writerows([["" if cell is None else cell for cell in row] for row in self.rows])


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


# ---- planned memory ----------------------------------------------------------------------------------------------------


def planned(found: list[tuple[Point, Record]], name: str, title: str, command: str, note: str = "") -> Table:
    """A row for each shape, a column for each arm, the published ones first."""
    known = published.planned()
    shapes = sorted({(p.model, p.chip, p.mesh, p.batch, p.context, p.rank) for p, _ in found})
    arms = sorted({column_of(p) for p, _ in found}, key=_order)
    cells = {((p.model, p.chip, p.mesh, p.batch, p.context, p.rank), column_of(p)): record for p, record in found}
    columns = ["model", "chip", "mesh", "batch", "context", "rank", "published default", "published CCE", *arms]
    rows = []
    for shape in shapes:
        model, chip, mesh, *rest = shape
        theirs = [known.get((model, mesh, *rest, arm)) if chip == "v5e" else None for arm in ("default", "cce")]
        rows.append([*shape, *map(_published_cell, theirs), *(gib(cells.get((shape, arm))) for arm in arms)])
    return Table(name, title, columns, rows, note, command, "bars")


def _published_cell(row: Record | None) -> str | float | None:
    return None if row is None else row["gib"] if row["fits"] else f"did not fit ({row['gib']:.2f})"


def _order(column: str) -> tuple:
    arms = ("default", "scheme", "scheme-large", "cutloss")
    arm = column.split(",")[0]
    return (arms.index(arm) if arm in arms else 9, column)


def validation(found: list[tuple[Point, Record]]) -> Table:
    """The default arm beside what was published for it, where both are known and the batch was treated alike."""
    known, rows = published.planned(), []
    for point, record in found:
        alike = point.chips == 1 or not point.split
        theirs = known.get((point.model, point.mesh, point.batch, point.context, point.rank, "default"))
        plain = point.arm == "default" and point.remat == "NONE" and point.chip == "v5e" and alike
        if not plain or theirs is None or not theirs["fits"] or record["outcome"] != "ok":
            continue
        ours = record["planned"]["total"] / GIB
        rows.append([point.model, point.mesh, point.batch, point.context, point.rank, theirs["gib"], round(ours, 2),
                     f"{100 * (ours / theirs['gib'] - 1):+.1f} %"])  # fmt: skip
    columns = ["model", "mesh", "batch", "context", "rank", "published", "ours", "difference"]
    return Table("validation", "The method: Tunix's own loss, published and planned here", columns, sorted(rows),
                 "GiB a chip. The published figures are of runs on TPUs, ours of the same compiler on a CPU.",
                 "cutloss-evidence pressure --arms default")  # fmt: skip


# ---- frontier ----------------------------------------------------------------------------------------------------------


def frontier(found: list[tuple[Point, Record]]) -> Table:
    """The largest context that fits for each batch, from all points there are; what is between two tries is not known."""
    known = published.frontier()
    groups: dict[tuple, dict[tuple, list]] = {}
    for point, record in found:
        usual = point.rank == 16 and point.tiles is None and record["outcome"] in ("ok", "out-of-memory")
        if usual:
            row = groups.setdefault((point.model, point.chip, point.mesh, point.batch), {})
            row.setdefault(column_of(point), []).append((point.context, record["outcome"] == "ok"))
    arms = sorted({arm for row in groups.values() for arm in row}, key=_order)
    rows = []
    for key in sorted(groups):
        model, chip, mesh, batch = key
        theirs = [known.get((model, mesh, batch, arm)) if chip == "v5e" else None for arm in ("default", "cce")]
        rows.append([*key, *theirs, *(bracket(groups[key].get(arm, [])) for arm in arms)])
    columns = ["model", "chip", "mesh", "batch", "published default", "published CCE", *arms]
    note = ("Tokens of a row. '2048 < 4096': 2048 fits and 4096 does not, nothing between was tried; '2048 +': nothing "
            "larger was tried.")  # fmt: skip
    return Table("frontier", "The largest context that fits, by batch", columns, rows, note,
                 "cutloss-evidence frontier --batches 8,16,32,64,128 --remats NONE,BLOCK", "frontier", groups)  # fmt: skip


def bracket(tries: list[tuple[int, bool]]) -> str | None:
    """What tries of (context, fits) say: the largest below every refusal, and the smallest refusal."""
    if not tries:
        return None
    unfit = min((context for context, fits in tries if not fits), default=None)
    fit = max((context for context, fits in tries if fits and (unfit is None or context < unfit)), default=None)
    if fit is None:
        return f"none < {unfit}"
    return f"{fit} +" if unfit is None else f"{fit} < {unfit}"


def boundaries(found: list[tuple[Point, Record]]) -> Table:
    """Where the published chunked loss ended, and the most tokens a step that fit with cutloss here."""
    theirs: dict[tuple, dict[bool, list[tuple[int, int, float]]]] = {}
    for row in published.table("planned"):
        if row["arm"] == "cce" and row["rank"] == 16:
            ends = theirs.setdefault((row["model"], row["mesh"]), {True: [], False: []})
            ends[row["fits"]].append((row["batch"], row["context"], row["gib"]))
    ours: dict[tuple, list[tuple[Point, Record]]] = {}
    for point, record in found:
        if point.arm == "cutloss" and point.chip == "v5e" and record["outcome"] == "ok":
            ours.setdefault((point.model, point.mesh), []).append((point, record))
    rows = []
    for key in sorted(ours.keys() & theirs.keys()):
        fit, refused = theirs[key][True], theirs[key][False]
        most = max(fit, key=_tokens, default=None)
        least = min(refused, key=_tokens, default=None)
        for remat in sorted({point.remat for point, _ in ours[key]}):
            point, record = max(((p, r) for p, r in ours[key] if p.remat == remat), key=lambda pair: pair[0].tokens)
            rows.append([*key, _end(most), _end(least), remat, f"{point.batch} x {point.context}", gib(record),
                         round(point.tokens / (most[0] * most[1]), 2) if most else None])  # fmt: skip
    columns = ["model", "mesh", "published, most tokens that ran", "published, fewest that did not", "remat",
               "cutloss, most tokens that fit", "GiB", "times the published tokens"]  # fmt: skip
    note = "Of the shapes in the records, which need not be the last that fit. Rows split over the chips wherever they divide."
    return Table("boundaries", "The published boundaries, answered again", columns, rows, note, "cutloss-evidence transfer")


def _tokens(end: tuple[int, int, float]) -> int:
    return end[0] * end[1]


def _end(end: tuple[int, int, float] | None) -> str | None:
    return None if end is None else f"{end[0]} x {end[1]}: {end[2]:.2f} GiB"


# ---- programs ----------------------------------------------------------------------------------------------------------


def collectives(found: list[tuple[Point, Record]]) -> Table:
    rows = []
    for point, record in found:
        if record["outcome"] != "ok" or point.chips == 1:
            continue
        facts = record["hlo"]
        counts = facts["collective_counts"]
        rows.append([point.model, point.mesh, point.batch, point.context, column_of(point), *(
            counts.get(kind, 0) for kind in ("all-gather", "all-reduce", "reduce-scatter")),
            _mib(facts["collective_bytes"]), _mib(facts["loop_bytes"]), len(facts["logits"])])  # fmt: skip
    columns = ["model", "mesh", "batch", "context", "arm", "all-gathers", "all-reduces", "reduce-scatters",
               "MiB a step", "of that in loops", "arrays of logits"]  # fmt: skip
    note = ("Of one chip and one step, with every loop counted as often as it runs. The published counts are of the text of "
            "several programs together and count a loop's body once; they cannot be compared number by number.")  # fmt: skip
    return Table("hlo", "Collectives in the compiled steps", columns, sorted(rows), note, "cutloss-evidence hlo")


def _mib(count: int | None) -> float | None:
    return None if count is None else round(count / 2**20, 1)


def estimates(found: list[tuple[Point, Record]]) -> Table:
    rows = []
    for point, record in found:
        if record["outcome"] == "ok" and "estimate" in record:
            one = record["estimate"]
            rows.append([point.model, point.mesh, point.batch, point.context, column_of(point), round(one["flop"] / 1e12, 2),
                         round(one["memory_bytes"] / GIB, 1), _mib(one["link_bytes"]), round(1e3 * one["seconds"], 1),
                         one["bound_by"]])  # fmt: skip
    columns = ["model", "mesh", "batch", "context", "arm", "TFLOP", "GiB of HBM", "MiB of links", "ms, at least", "bound by"]
    note = ("An estimate from the compiled program, not a measurement: products, and bytes that instructions read and write, "
            "with every loop in full, over the chip's peaks, as if all overlapped. It ranks arms; it predicts no time.")  # fmt: skip
    return Table("estimate", "What a step has to do (estimate)", columns, sorted(rows), note, "cutloss-evidence pressure")


def walls(found: list[tuple[Point, Record]], most: int = 4) -> Table:
    """What takes the memory at the peak, of the largest shape of each model and arm that was compiled."""
    largest: dict[tuple, tuple[Point, Record]] = {}
    for point, record in found:
        if record.get("largest"):
            key = (point.model, point.mesh, column_of(point))
            if key not in largest or point.tokens > largest[key][0].tokens:
                largest[key] = (point, record)
    rows = []
    for (model, mesh, arm), (point, record) in sorted(largest.items()):
        for one in record["largest"][:most]:
            rows.append([model, mesh, arm, f"{point.batch} x {point.context}", record["outcome"], round(one["bytes"] / GIB, 2),
                         one.get("count", 1), one["array"], one["of"]])  # fmt: skip
    columns = ["model", "mesh", "arm", "shape", "outcome", "GiB", "buffers", "array", "of"]
    note = "Buffers that are alive when a step's temporaries are largest, or the compiler's own list where it did not fit."
    return Table("walls", "The next wall: what is largest at the peak", columns, rows, note, "cutloss-evidence frontier")


def chunks(found: list[tuple[Point, Record]]) -> Table:
    known = {(r["mesh"], r["batch"], r["context"], *r["tiles"]): r for r in published.table("chunks")}
    rows = []
    for point, record in found:
        if point.arm == "default" or not (point.tiles or (point.batch, point.context, point.remat) == (16, 512, "NONE")):
            continue
        theirs = known.get((point.mesh, point.batch, point.context, *(point.tiles or ())), {})
        seconds = record.get("estimate", {}).get("seconds")
        rows.append([point.model, point.mesh, point.batch, point.context, point.arm, "own" if point.tiles is None else
                     "x".join(map(str, point.tiles)), theirs.get("gib"), gib(record), theirs.get("step_seconds"),
                     None if seconds is None else round(seconds, 4)])  # fmt: skip
    columns = ["model", "mesh", "batch", "context", "arm", "tiles", "published GiB", "GiB", "published s a step (run)",
               "s a step, at least (estimate)"]  # fmt: skip
    return Table("chunks", "Tile sizes", columns, sorted(rows, key=str), "", "cutloss-evidence chunks")


# ---- runs --------------------------------------------------------------------------------------------------------------


def parity(records: list[Record]) -> Table:
    rows = []
    for one in records:
        if one["kind"] == "parity":
            a, b = one["losses"]["default"], one["losses"]["cutloss"]
            rows.append([one["key"].split(" step ")[0].removeprefix("parity "), one["step"], round(a, 6), round(b, 6),
                         f"{b - a:+.1e}", f"{1 - one['cosine']:.1e}", f"{one['relative_difference']:.1e}"])  # fmt: skip
    rows.sort(key=lambda row: (row[0], row[1]))
    columns = ["run", "step", "loss, Tunix's", "loss, cutloss", "difference", "1 - cosine of gradients", "difference of gradients"]
    note = "Real training on a CPU: both losses and adapter gradients of every step, at the same weights."
    return Table("parity", "Parity on the real model, step by step", columns, rows, note, "cutloss-evidence parity", "parity")


def quality(records: list[Record]) -> Table:
    rows = []
    for one in records:
        if one["kind"] == "quality" and one["outcome"] == "ok":
            score = one.get("quality") or {}
            cells = [score.get(when, {}).get(kind) for kind in ("bleu", "chrf") for when in ("before", "after")]
            last = one["evaluated"][-1][1] if one["evaluated"] else None
            rows.append([one["arm"], one["batch"], one["context"], one["steps"], round(one["losses"][0], 4),
                         round(one["losses"][-1], 4), last and round(last, 4), *(c and round(c, 2) for c in cells),
                         round(one["step_seconds"], 2), round(one["peak_rss_bytes"] / GIB, 2)])  # fmt: skip
    columns = ["arm", "batch", "context", "steps", "first loss", "last loss", "held-out loss", "BLEU before", "BLEU after",
               "chrF before", "chrF after", "s a step", "peak GiB of the process"]  # fmt: skip
    theirs = "; ".join(
        f"{r['arm']} {r['batch']} x {r['context']}, {r['steps']} steps: held-out loss {r['eval_loss']}, BLEU {r['bleu']}, "
        f"chrF {r['chrf']}" for r in published.table("quality")  # fmt: skip
    )
    note = f"Real training on a CPU, on other texts and for fewer steps than published. Published: {theirs}."
    return Table("quality", "Training with each loss", columns, rows, note, "cutloss-evidence quality", "quality",
                 [one for one in records if one["kind"] == "quality"])  # fmt: skip


def samples(records: list[Record]) -> Table:
    """Answers of the trained models side by side."""
    found = {one["arm"]: one["answers"]["after"] for one in records if one["kind"] == "quality" and one.get("answers")}
    arms = [arm for arm in ("default", "cutloss", "capacity") if arm in found]
    rows = []
    for several in zip(*(found[arm] for arm in arms), strict=False):
        rows.append([several[0]["source"], several[0]["reference"], *(one["answer"] for one in several)])
    return Table("samples", "Answers to held-out texts", ["source", "reference", *arms], rows, "Greedy, after training.",
                 "cutloss-evidence quality")  # fmt: skip


def multihost(records: list[Record]) -> Table:
    rows = [[one["key"].removeprefix("multihost "), one["outcome"], one["message"]] for one in records
            if one["kind"] == "multihost"]  # fmt: skip
    return Table("multihost", "Several processes as hosts", ["processes x devices", "outcome", ""], rows,
                 "jax.distributed with gloo on one machine; the published smoke runs were on 4 and 8 hosts of TPUs.",
                 "cutloss-evidence multihost")  # fmt: skip


def all_of(records: list[Record]) -> list[Table]:
    """Every table that has a row."""
    found = plans(records)
    plain = [(p, r) for p, r in found if p.tiles is None]
    small = [(p, r) for p, r in plain if p.model == "gemma3-270m" and p.chips == 1 and p.rank == 16 and p.chip == "v5e"]
    made = [
        validation(plain),
        planned(small, "pressure", "Planned memory of Gemma 3 270M on one chip", "cutloss-evidence pressure",
                "GiB a chip, all bytes that are planned. The chip has 15.75."),
        frontier(plain),
        boundaries(plain),
        planned([(p, r) for p, r in plain if p.rank != 16], "rank", "Ranks of the adapters", "cutloss-evidence rank"),
        chunks(found),
        planned([(p, r) for p, r in plain if p.model == "gemma3-270m" and p.chips > 1], "mesh", "Four chips",
                "cutloss-evidence mesh",
                "The published meshes computed every row on every chip ('whole batch a chip'); split rows are Tunix's way."),
        collectives(found),
        planned([(p, r) for p, r in plain if p.model != "gemma3-270m"], "transfer", "Other models",
                "cutloss-evidence transfer"),
        planned([(p, r) for p, r in plain if p.chip != "v5e"], "other-chips", "Other chips", "cutloss-evidence v6e"),
        walls(plain),
        estimates(plain),
        parity(records),
        quality(records),
        samples(records),
        multihost(records),
    ]  # fmt: skip
    return [table for table in made if table.rows]
