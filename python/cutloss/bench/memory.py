"""Whether a measurement fits into memory: one that does not would end in swap, or be killed."""

from __future__ import annotations

from pathlib import Path

from .cases import HEADS, Shape, Variant

LIBRARIES = 512 << 20  # a process with torch or XLA, before any array
OURS = 512 << 20  # most that a plan takes without a budget


def needed(shape: Shape, dtype: str, head: str, way: Variant) -> int:
    """Bytes of the process that measures this, not less than it takes."""
    item = 4 if dtype == "f32" else 2
    inputs = (shape.n + shape.v) * shape.d
    gradients = (0, shape.n, shape.n + shape.v)[HEADS.index(head)] * shape.d * item
    reading = inputs * (4 + (item if item < 4 else 0))
    return LIBRARIES + max(reading, inputs * item * (1 if way.ours else 2) + 2 * gradients + extra(shape, item, way))


def extra(shape: Shape, item: int, way: Variant) -> int:
    """What this way allocates beside inputs and gradients, at most."""
    n, v, d = shape.n, shape.v, shape.d
    if way.impl == "torch_dense":
        return 3 * n * v * item  # logits, their log-softmax, their gradients
    if way.impl == "optax_dense":
        return 3 * n * v * 4
    if way.impl == "torch_chunk_loop":
        return 3 * -(-n // way.options["chunks"]) * v * item
    if way.impl == "torch_linear_cross_entropy":
        chunk = way.options.get("batch_chunk_size", n // max(1, v // d) + 1)
        return 16 * chunk * v + (10 if item < 4 else 4) * v * d  # its documentation; float32 copies of a bf16 table
    if way.impl == "jax_cce":
        return 2 * v * d * 4 + 16 * n * way.options["chunk_size"]  # float32 and padded copies of the table
    return OURS


def available(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that a process may still take: of the system, or of the container if that is less."""
    free = next(int(line.split()[1]) for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:"))
    try:
        limit = int((cgroup / "memory.max").read_text())  # "max" is no number
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        left = limit - int((cgroup / "memory.current").read_text()) + int(stat.get("inactive_file", 0))
    except (OSError, ValueError):
        return free << 10
    return min(free << 10, max(left, 0))


def refusal(shape: Shape, dtype: str, head: str, way: Variant) -> str | None:
    """Why this is not measured here, if it does not fit."""
    need, left = needed(shape, dtype, head, way), available()
    if need <= left:
        return None
    return f"needs about {need / 2**30:.1f} GiB, {left / 2**30:.1f} GiB are free; close something or give a smaller --n"
