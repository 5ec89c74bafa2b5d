"""Tables of what is in the compiled steps: what the memory is of, collectives, what a step has to do at least."""

from __future__ import annotations

import re
from collections import Counter

from . import published
from .cells import GIB, Record, Table, column_of, gib
from .points import Point


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
    """Beside the seconds that the published runs took, where the step is the same or the scheme's."""
    known, rows = published.planned(), []
    for point, record in found:
        if record["outcome"] == "ok" and "estimate" in record:
            one = record["estimate"]
            theirs = {} if point.chips > 1 and point.split or point.chip != "v5e" or point.remat != "NONE" else known.get(
                (point.model, point.mesh, point.batch, point.context, point.rank, _PUBLISHED_ARM.get(point.arm)), {})  # fmt: skip
            ran = theirs.get("step_seconds")
            rows.append([point.model, point.chip, point.mesh, point.batch, point.context, column_of(point),
                         round(one["flop"] / 1e12, 2), round(one["memory_bytes"] / GIB, 1), _mib(one["link_bytes"]),
                         round(1e3 * one["seconds"], 1), one["bound_by"], ran and round(1e3 * ran, 1)])  # fmt: skip
    columns = ["model", "chip", "mesh", "batch", "context", "arm", "TFLOP", "GiB of HBM", "MiB of links", "ms (estimate)",
               "bound by", "published ms (run)"]  # fmt: skip
    note = ("An estimate from the compiled program, not a measurement: products, and bytes that instructions read and write, "
            "with every loop in full, over the chip's peaks, as if all overlapped.")  # fmt: skip
    return Table("estimate", "What a step has to do (estimate)", columns, sorted(rows, key=str), note, "cutloss-evidence pressure")


_PUBLISHED_ARM = {"default": "default", "scheme": "cce"}


# ---- memory by kind ----------------------------------------------------------------------------------------------------

# In this order: attention has a softmax too, and its layers' names have all of them in front.
_KINDS = (
    ("attention", re.compile(r"attention|attn|rope|BTNS|BTNH|BTKGH")),
    ("MLP", re.compile(r"feed_forward|mlp|gate_proj|up_proj|down_proj")),
    ("loss", re.compile(r"decode|lm_head|softmax|cross_entropy|one_hot|_compiled|cutloss|baseline")),
    ("norms, layers' inputs", re.compile(r"norm|layers|embedder_encode|embedding")),
)
KINDS = tuple(kind for kind, _ in _KINDS)


def by_kind(record: Record) -> dict[str, int]:
    """Bytes of the largest temporaries at the peak, by the part of the model they are of.

    A buffer without a part's name, which XLA's own copies are, is of what another of the same array is of; else of
    "other".
    """
    named = {one["array"]: kind for one in reversed(record["largest"]) if (kind := _kind(one["of"]))}
    found: Counter[str] = Counter()
    for one in record["largest"]:
        found[_kind(one["of"]) or named.get(one["array"], "other")] += one["bytes"]
    return dict(found)


def _kind(of: str) -> str | None:
    return next((kind for kind, names in _KINDS if names.search(of)), None)


def _largest(found: list[tuple[Point, Record]]) -> list[tuple[Point, Record]]:
    """Of each model, mesh and arm the shape of most tokens that fits, and that of fewest that does not."""
    ends: dict[tuple, tuple[Point, Record]] = {}
    for point, record in found:
        if record["outcome"] in ("ok", "out-of-memory") and point.rank == 16:
            key = (point.model, point.chip, point.mesh, column_of(point), record["outcome"])
            sign = 1 if record["outcome"] == "ok" else -1
            if key not in ends or sign * point.tokens > sign * ends[key][0].tokens:
                ends[key] = (point, record)
    return [ends[key] for key in sorted(ends)]


def walls(found: list[tuple[Point, Record]]) -> Table:
    """What the memory is of, by kind, and so what has to shrink next."""
    rows = []
    for point, record in _largest(found):
        if not record.get("largest"):
            continue
        planned, kinds = record.get("planned"), by_kind(record)
        fixed = planned and planned["arguments"] + planned["aliased"]
        rest = planned and planned["temporary"] - sum(kinds.get(kind, 0) for kind in KINDS)
        parts = {"weights": fixed or 0, **{kind: kinds.get(kind, 0) for kind in KINDS}}
        rows.append([point.model, point.chip, point.mesh, f"{point.batch} x {point.context}", column_of(point), gib(record),
                     _gib(fixed), _gib(planned and planned["outputs"]), *(_gib(kinds.get(kind, 0)) for kind in KINDS),
                     _gib(rest), max(parts, key=parts.get)])  # fmt: skip
    columns = ["model", "chip", "mesh", "shape", "arm", "total", "weights, adapters, moments", "outputs", *KINDS, "other",
               "most"]  # fmt: skip
    note = ("GiB a chip, of each arm the largest shape that fits and the smallest that does not, of those in the records. "
            "From the compiler's buffer assignment: outputs are what it writes beside its arguments (the step's frozen "
            "weights, which it counts again), the kinds are the dozen largest arrays alive at the peak, and other is what "
            "is left of the temporaries: smaller arrays, and gaps. Where a step did not fit, only its largest buffers are "
            "known.")  # fmt: skip
    return Table("walls", "The next wall: what the memory is of", columns, rows, note, "cutloss-evidence frontier")


def _gib(count: int | None) -> float | None:
    return None if count is None else round(count / GIB, 2)


def buffers(found: list[tuple[Point, Record]], most: int = 4) -> Table:
    rows = []
    for point, record in _largest(found):
        for one in record.get("largest", [])[:most]:
            rows.append([point.model, point.chip, point.mesh, f"{point.batch} x {point.context}", column_of(point),
                         record["outcome"], _gib(one["bytes"]), one.get("count", 1), one["array"], one["of"]])  # fmt: skip
    columns = ["model", "chip", "mesh", "shape", "arm", "outcome", "GiB", "buffers", "array", "of"]
    note = "Alive when a step's temporaries are largest, or the compiler's own list where it did not fit."
    return Table("buffers", "The largest buffers one by one", columns, rows, note, "cutloss-evidence frontier")


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
