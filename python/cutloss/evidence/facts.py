"""What a compiled step says of itself: planned bytes by kind, what is alive at the peak, logits, traffic, an estimate."""

from __future__ import annotations

import collections
from typing import Any

from . import roofline
from .points import Point


def of(text: str, written: dict[str, Any], vocab: int, point: Point, memory: Any = None) -> dict[str, Any]:
    """Returns the fields of a record that come from a program's text and from what XLA wrote about its memory.

    `memory` is the compiled program's `memory_analysis()`, which knows its peak, if it was compiled to the end.
    """
    from cutloss.jax import hlo

    report = hlo.scan(text, vocab=vocab, memory=memory)
    return {
        "planned": planned(written, memory),
        "largest": written["largest"],
        "hlo": hlo_facts(report),
        "estimate": roofline.estimate(text, point, report.collectives),
    }


def planned(written: dict[str, Any], memory: Any = None) -> dict[str, int | None]:
    """Bytes on one chip. `total` is what the compiler's own memory report calls total bytes, the figure of the published
    tables. Outputs in the place of an argument are in `aliased` alone."""
    kinds = written["kinds"]
    return {
        "arguments": kinds.get("parameter", 0),
        "outputs": kinds.get("maybe-live-out", 0),
        "aliased": kinds.get("aliased", 0),
        "temporary": kinds.get("preallocated-temp", 0),
        "peak": getattr(memory, "peak_memory_in_bytes", None),
        "total": written["total_bytes"],
    }


def hlo_facts(report: Any) -> dict[str, Any]:
    """Arrays with a vocabulary's extent, and collectives with how often each runs, alike ones together."""
    together: dict[tuple, dict[str, Any]] = {}
    for one in report.collectives:
        key = (one.kind, one.array, one.devices, one.times)
        row = together.setdefault(
            key,
            {"kind": one.kind, "array": one.array[:120], "devices": one.devices, "trips": one.times,
             "in_loop": bool(one.depth), "count": 0, "bytes": 0},
        )  # fmt: skip
        row["count"] += 1
        row["bytes"] = None if row["bytes"] is None or one.total_bytes is None else row["bytes"] + one.total_bytes
    rows = sorted(together.values(), key=lambda row: -(row["bytes"] or 0))
    by_kind = collections.Counter()
    for row in rows:
        by_kind[row["kind"]] += row["count"]
    return {
        "logits": [{"array": one.array, "tokens": one.tokens, "bytes": one.bytes} for one in report.logits[:12]],
        "collectives": rows[:24],
        "collective_counts": dict(by_kind),
        "collective_bytes": _sum(row["bytes"] for row in rows),
        "loop_bytes": report.loop_bytes,
    }


def _sum(values: Any) -> int | None:
    values = list(values)
    return None if None in values else sum(values)
