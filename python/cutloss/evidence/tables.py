"""The tables of the report, from records alone, each beside what was published."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from . import programs, published, runs, sweeps
from .cells import NOT_RUN, Record, Table, column_of, gib, plans
from .points import Point

# ---- planned memory ----------------------------------------------------------------------------------------------------


def planned(
    found: list[tuple[Point, Record]], wanted: Iterable[Point], name: str, title: str, command: str, note: str = ""
) -> Table:
    """A row for each shape of the records and of the points that are wanted, a column for each arm, the published first."""
    known = published.planned()
    cells = {(_shape(p), column_of(p)): gib(record) for p, record in found}
    cells = {(_shape(p), column_of(p)): NOT_RUN for p in wanted} | cells
    shapes, arms = sorted({shape for shape, _ in cells}), sorted({arm for _, arm in cells}, key=_order)
    columns = ["model", "chip", "mesh", "batch", "context", "rank", "published default", "published CCE", *arms]
    compared = [("default", "default"), ("cutloss", "cce")]
    columns += [f"{ours} to published" for ours, _ in compared]
    rows = []
    for shape in shapes if found else ():
        model, chip, mesh, *rest = shape
        theirs = {arm: known.get((model, mesh, *rest, arm)) if chip == "v5e" else None for arm in ("default", "cce")}
        rows.append([*shape, *map(_published_cell, theirs.values()), *(cells.get((shape, arm)) for arm in arms),
                     *(_percent(cells.get((shape, ours)), theirs[arm]) for ours, arm in compared)])  # fmt: skip
    return Table(name, title, columns, rows, note, command, "bars", series=["published default", "published CCE", *arms])


def _shape(point: Point) -> tuple[str, str, str, int, int, int]:
    return point.model, point.chip, point.mesh, point.batch, point.context, point.rank


def _percent(ours: Any, theirs: Record | None) -> str | None:
    both = isinstance(ours, float) and theirs is not None and theirs["fits"]
    return f"{round(100 * (ours / theirs['gib'] - 1), 1) + 0.0:+.1f} %" if both else None


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
        ours = gib(record)
        rows.append([point.model, point.mesh, point.batch, point.context, point.rank, theirs["gib"], ours, _percent(ours, theirs)])
    columns = ["model", "mesh", "batch", "context", "rank", "published", "ours", "difference"]
    return Table("validation", "The method: Tunix's own loss, published and planned here", columns, sorted(rows),
                 "GiB a chip. The published figures are of runs on TPUs, ours of the same compiler on a CPU.",
                 "cutloss-evidence pressure --arms default")  # fmt: skip


# ---- frontier ----------------------------------------------------------------------------------------------------------


def frontier(found: list[tuple[Point, Record]]) -> Table:
    """The largest context that fits for each batch, from all points there are; what is between two tries is not known."""
    known = published.frontier()
    groups: dict[tuple, dict[str, list]] = {}
    for point, record in found:
        usual = point.rank == 16 and point.tiles is None and record["outcome"] in ("ok", "out-of-memory")
        if usual:
            row = groups.setdefault((point.model, point.chip, point.mesh, point.batch), {})
            row.setdefault(column_of(point), []).append((point.context, record["outcome"] == "ok"))
    arms = sorted({arm for row in groups.values() for arm in row}, key=_order)
    swept = {key[:3] for key in groups}
    keys = groups.keys() | {(model, "v5e", mesh, batch) for model, mesh, batch, _ in known if (model, "v5e", mesh) in swept}
    rows = []
    for key in sorted(keys):
        model, chip, mesh, batch = key
        theirs = [known.get((model, mesh, batch, arm)) if chip == "v5e" else None for arm in ("default", "cce")]
        tries = groups.get(key, {})
        reached = [reach(tries[arm]) for arm in tries if arm.startswith("cutloss")]
        rows.append([*key, *theirs, *(bracket(tries.get(arm, [])) or NOT_RUN for arm in arms), _times(reached, theirs[1])])
    columns = ["model", "chip", "mesh", "batch", "published default", "published CCE", *arms, "cutloss, times published CCE"]
    note = ("Tokens of a row. '2048 < 4096': 2048 fits and 4096 does not, nothing between was tried; '2048 +': nothing "
            "larger was tried. The last column is of the largest that fits in any column of cutloss.")  # fmt: skip
    return Table("frontier", "The largest context that fits, by batch", columns, rows, note,
                 "cutloss-evidence frontier --batches 8,16,32,64,128 --remats NONE,BLOCK", "frontier", groups)  # fmt: skip


def reach(tries: list[tuple[int, bool]]) -> tuple[int | None, int | None]:
    """(the largest context that fits below every refusal, the smallest refusal) of tries of (context, fits)."""
    unfit = min((context for context, fits in tries if not fits), default=None)
    return max((context for context, fits in tries if fits and (unfit is None or context < unfit)), default=None), unfit


def _times(reached: list[tuple[int | None, int | None]], theirs: int | None) -> str | None:
    """How many times as far; nothing where it is less only because no more was tried."""
    most = max((fit for fit, _ in reached if fit), default=None)
    if most is None or not theirs:
        return None
    ended = all(unfit is not None for fit, unfit in reached if fit == most)
    return f"{most / theirs:g}" if ended else f"{most / theirs:g} at least" if most >= theirs else None


def bracket(tries: list[tuple[int, bool]]) -> str | None:
    if not tries:
        return None
    fit, unfit = reach(tries)
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
        if point.arm == "cutloss" and point.chip == "v5e" and record["outcome"] in ("ok", "out-of-memory"):
            ours.setdefault((point.model, point.mesh, point.remat), []).append((point, record))
    rows = []
    for key in sorted(ours):
        if key[:2] not in theirs:
            continue
        ends = theirs[key[:2]]
        most, least = max(ends[True], key=_tokens, default=None), min(ends[False], key=_tokens, default=None)
        mine = {fits: [(p.batch, p.context, gib(r)) for p, r in ours[key] if (r["outcome"] == "ok") == fits] for fits in ends}
        last = max(mine[True], key=_tokens, default=None)
        first = min((end for end in mine[False] if last is None or _tokens(end) > _tokens(last)), key=_tokens, default=None)
        times = round(_tokens(last) / _tokens(most), 2) if last and most else None
        rows.append([*key, _end(most), _end(least), _end(last), _end(first), times if first or times and times >= 1 else None])
    columns = ["model", "mesh", "remat", "published, most tokens that ran", "published, fewest that did not",
               "cutloss, most tokens that fit", "cutloss, fewest above that did not", "times the published tokens"]  # fmt: skip
    note = "Of the shapes in the records, which need not be the last that fit. Rows split over the chips wherever they divide."
    return Table("boundaries", "The published boundaries, answered again", columns, rows, note, "cutloss-evidence transfer")


End = tuple[int, int, float | str]  # batch, context, GiB


def _tokens(end: End) -> int:
    return end[0] * end[1]


def _end(end: End | None) -> str | None:
    return None if end is None else f"{end[0]} x {end[1]}: " + (f"{end[2]:.2f} GiB" if isinstance(end[2], float) else end[2])


# ---- all ---------------------------------------------------------------------------------------------------------------


def coverage(records: list[Record]) -> Table:
    """How much of each sweep the records have, and what runs the rest."""
    known = {one["key"]: one["outcome"] for one in records if one["kind"] == "plan"}
    rows = []
    for name in sweeps.FIXED:
        points = sweeps.points(name)
        found = [known[point.key] for point in points if point.key in known]
        fit, refused = found.count("ok"), found.count("out-of-memory")
        rest = f"cutloss-evidence {name}" if fit + refused < len(points) else None
        rows.append([name, sweeps.ABOUT[name], len(points), fit, refused, len(found) - fit - refused, rest])
    columns = ["sweep", "of", "points", "fit", "do not fit", "given up", "the rest is run by"]
    note = "Sweeps share points: each is planned once. Points of bisections and of single plans are in the tables as well."
    return Table("coverage", "What was run, and what runs the rest", columns, rows, note, "cutloss-evidence pressure --list")


def all_of(records: list[Record]) -> list[Table]:
    """Every table of which something was run; the rows of a sweep's points that were not say so."""
    found = plans(records)
    plain = [(p, r) for p, r in found if p.tiles is None]

    def table(name: str, title: str, of: Callable[[Point], bool], made_by: tuple[str, ...], note: str = "") -> Table:
        wanted = [point for sweep in made_by for point in sweeps.points(sweep) if of(point)]
        return planned([(p, r) for p, r in plain if of(p)], wanted, name, title, f"cutloss-evidence {made_by[0]}", note)

    def one_chip(p: Point) -> bool:
        return p.model == "gemma3-270m" and p.chips == 1 and p.rank == 16 and p.chip == "v5e"

    made = [
        validation(plain),
        table("pressure", "Planned memory of Gemma 3 270M on one chip", one_chip, ("pressure", "targets", "small"),
              "GiB a chip, all bytes that are planned. The chip has 15.75."),
        frontier(plain),
        boundaries(plain),
        programs.walls(plain),
        table("mesh", "Four chips", lambda p: p.model == "gemma3-270m" and p.chips > 1, ("mesh", "hlo", "small"),
              "The published meshes computed every row on every chip ('whole batch a chip'); split rows are Tunix's way."),
        programs.collectives(plain),
        table("transfer", "Other models", lambda p: p.model != "gemma3-270m", ("transfer", "published-batches")),
        table("rank", "Ranks of the adapters", lambda p: p.rank != 16, ("rank",)),
        programs.chunks(found),
        table("other-chips", "Other chips", lambda p: p.chip != "v5e", ("v6e",)),
        programs.estimates(plain),
        runs.parity(records),
        runs.quality(records),
        runs.samples(records),
        runs.multihost(records),
        programs.buffers(plain),
        coverage(records),
    ]  # fmt: skip
    return [table for table in made if table.rows]
