"""Records and points for the tests, without a compiler."""

from cutloss.evidence import process
from cutloss.evidence.points import Point

GIB = 2**30


def point(batch=16, context=512, arm="cutloss", **more):
    return Point(more.pop("model", "gemma3-270m"), arm, batch, context, **more)


def ok(of, total=4.5 * GIB):
    total = int(total)
    planned = {"arguments": GIB, "outputs": GIB // 2, "aliased": 0, "temporary": total - GIB, "code": 0,
               "peak": total - GIB // 2, "total": total}  # fmt: skip
    hlo = {"logits": [], "collectives": [], "collective_counts": {"all-gather": 3}, "collective_bytes": 2**20, "loop_bytes": 0}
    estimate = {"is_estimate": True, "flop": 10**13, "memory_bytes": 10**11, "link_bytes": 0, "seconds": 0.12,
                "bound_by": "memory", "loops_of_unknown_length": 0}  # fmt: skip
    largest = [{"bytes": GIB, "count": 2, "array": "bf16[16,512,640]", "of": "layers/mlp"}]
    return process.record(of, {"outcome": "ok", "message": "", "seconds": {"total": 1.0}, "planned": planned, "hlo": hlo,
                               "estimate": estimate, "largest": largest})  # fmt: skip


def refused(of, used=20.33 * GIB):
    return process.record(of, {"outcome": "out-of-memory", "message": "Used 20.33G of 15.75G hbm.", "seconds": {"total": 1.0},
                               "needed": {"used_bytes": int(used), "limit_bytes": int(15.75 * GIB)}, "largest": []})  # fmt: skip


def outcome(of, name):
    return process.record(of, {"outcome": name, "message": "it stopped", "seconds": {"total": 1.0}})
