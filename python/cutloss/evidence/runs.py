"""Tables of what was run: parity, quality, answers, several processes."""

from __future__ import annotations

from . import published
from .cells import GIB, Record, Table


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
