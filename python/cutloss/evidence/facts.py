"""What a compiled step says of itself: planned bytes by kind, what is alive at the peak, logits, traffic, an estimate."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

from . import buffers, roofline
from .points import Point


def of(compiled: Any, vocab: int, point: Point, dump: Path) -> dict[str, Any]:
    """Returns the fields of a record that come from the compiled step, and from what XLA wrote about it."""
    from cutloss.jax import hlo

    memory = compiled.memory_analysis()
    text = compiled.as_text()
    report = hlo.scan(text, vocab=vocab, memory=memory)
    written = buffers.of(dump, text)
    return {
        "planned": planned(memory, written),
        "largest": written["largest"],
        "hlo": hlo_facts(report),
        "estimate": roofline.estimate(text, point, report.collectives),
    }


def planned(memory: Any, written: dict[str, Any]) -> dict[str, Any]:
    """Bytes on one chip. `total` is what the compiler's own memory report calls total bytes, the figure of the published
    tables; without a report, nearly the same: the peak, with the outputs beside it."""
    found = {
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
        "aliased": memory.alias_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "code": memory.generated_code_size_in_bytes,
        "peak": memory.peak_memory_in_bytes,
    }
    total = written.get("total_bytes", found["peak"] + found["outputs"])
    return {**found, "total": total, "kinds": written.get("kinds", {})}


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
