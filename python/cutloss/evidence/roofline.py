"""An estimate of a step's time from its compiled program: FLOP, bytes of main memory and of the links, loops counted in full.

It is an estimate, and says so: each instruction of the program reads its operands and writes its result once, in main
memory unless XLA placed them on the chip; everything overlaps with everything; peaks are reached. No step is faster.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from .points import CHIPS, Point

_NAMES_ONLY = ("tuple", "get-tuple-element", "bitcast", "parameter", "constant", "while", "conditional", "call", "after-all")


def estimate(text: str, point: Point, collectives: Any) -> dict[str, Any]:
    """Returns FLOP and bytes of one step on one chip, and the seconds they take at the chip's peaks."""
    from cutloss.jax import _hlo_flow, hlo

    program = hlo.parse(text)
    inside = _hlo_flow.fused(program) | _started(program)
    flop = moved = unknown = 0
    for computation, instruction, trips in executed(program):
        if trips is None:
            unknown += 1
            trips = 1
        flop += trips * _flop(program, computation, instruction)
        if computation.name not in inside:
            moved += trips * _main_memory(program, computation, instruction)
    links = sum(one.total_bytes or 0 for one in collectives)
    _, _, peak_flop, peak_bytes, peak_links = CHIPS[point.chip]
    parts = {"flop": flop / peak_flop, "memory": moved / peak_bytes, "links": links / peak_links}
    return {
        "is_estimate": True,
        "flop": flop,
        "memory_bytes": moved,
        "link_bytes": links,
        "seconds": max(parts.values()),
        "bound_by": max(parts, key=parts.get),
        "loops_of_unknown_length": unknown,
    }


def executed(program: Any) -> Iterator[tuple[Any, Any, int | None]]:
    """(computation, instruction, how often it runs) of all that is executed; what is inside a fusion belongs to it."""
    from cutloss.jax import hlo

    for computation, instruction, loops in hlo.executed(program, program.entry, ()):
        trips = [loop.trips for loop in loops]
        yield computation, instruction, None if None in trips else math.prod(trips)


def _started(program: Any) -> set[str]:
    """Computations that an instruction starts and another waits for: what they move is counted at the start."""
    return {name for computation in program.computations.values() for one in computation.instructions.values()
            if one.operation.endswith("-start") for name in one.called.get("calls", ())}  # fmt: skip


def _flop(program: Any, computation: Any, instruction: Any) -> int:
    """Of products; all else is small beside them. hlo.executed also walks what is inside fusions."""
    if instruction.operation == "dot":
        return 2 * instruction.arrays[0].elements * _contracted(computation, instruction)
    if instruction.operation == "convolution":
        return 2 * instruction.arrays[0].elements * _taps(computation, instruction)
    return 0


def _operand(computation: Any, instruction: Any, index: int) -> Any:
    found = computation.instructions.get(instruction.operands[index]) if len(instruction.operands) > index else None
    return found.arrays[0] if found is not None and found.arrays else None


def _contracted(computation: Any, instruction: Any) -> int:
    left = _operand(computation, instruction, 0)
    found = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.rest)
    if left is None or found is None:
        return 0
    return math.prod(left.dims[int(d)] for d in found[1].split(",") if d)


def _taps(computation: Any, instruction: Any) -> int:
    """Products in one element of a convolution's result. XLA for TPU writes products of matrices as convolutions; batch
    dimensions are then a window with one tap that is not padding, and are not counted."""
    kernel = _operand(computation, instruction, 1)
    labels = re.search(r"dim_labels=\w+_(\w+)->", instruction.rest)
    if kernel is None or labels is None or len(labels[1]) != len(kernel.dims):
        return 0
    window = re.search(r"window=\{([^}]*)\}", instruction.rest)
    sizes = [int(n) for n in re.search(r"size=([\dx]+)", window[1])[1].split("x")] if window else []
    pads = re.search(r"pad=([\d_x\-]+)", window[1]) if window else None
    dilated = re.search(r"lhs_dilate=([\dx]+)", window[1]) if window else None
    taps = kernel.dims[labels[1].index("i")]
    for k, size in enumerate(sizes):
        as_batch = (pads is not None and pads[1].split("x")[k].startswith(f"{size - 1}_")) or (
            dilated is not None and int(dilated[1].split("x")[k]) > 1
        )
        taps *= 1 if as_batch and size > 1 else size
    return taps


def _main_memory(program: Any, computation: Any, instruction: Any) -> int:
    """Bytes an instruction moves in main memory. Of an array that is only sliced or gathered from, what is taken counts,
    and of one that is updated in place, what is put in: a loop over the tiles of a table does not read all of it each
    time."""
    operation = instruction.operation
    if operation in _NAMES_ONLY or operation.endswith("-done") or 'custom_call_target="ConcatBitcast"' in instruction.rest:
        return 0
    if operation.endswith("-start"):  # (to, from) or (from, to), and what it waits for: of each end no more than is copied
        ends = instruction.parts[:2]
        return min(sum(a.bytes for a in end) for end in ends) * sum(all(_in_main(a) for a in end) for end in ends)
    inside = program.computations.get(instruction.called.get("calls", [""])[0]) if operation == "fusion" else None
    total = _written(computation, instruction, inside)
    for index, name in enumerate(instruction.operands):
        operand = computation.instructions.get(name)
        if operand is None or not all(_in_main(a) for a in operand.arrays):
            continue
        if inside is None:
            total += _taken(instruction, index, operand.bytes)
        else:
            parameter = inside.parameters().get(index)
            total += operand.bytes if parameter is None else _taken_inside(inside, parameter, operand.bytes)
    return total


def _in_main(array: Any) -> bool:
    return array.space == 0


def _written(computation: Any, instruction: Any, inside: Any) -> int:
    root, where = (instruction, computation) if inside is None else (_behind(inside, inside.root), inside)
    several = root.operation == "tuple"
    roots = [_behind(where, where.instructions[name]) for name in root.operands] if several else [root]
    parts = instruction.parts if several else [instruction.arrays]
    return sum(_put(where, one) for part, one in zip(parts, roots, strict=False) if all(_in_main(a) for a in part))


def _put(computation: Any, root: Any) -> int:
    if root.operation == "dynamic-update-slice" and root.operands[1] in computation.instructions:
        return computation.instructions[root.operands[1]].bytes
    return root.bytes


def _behind(computation: Any, instruction: Any) -> Any:
    """What an instruction is another name of."""
    while instruction.operation == "bitcast" and instruction.operands[0] in computation.instructions:
        instruction = computation.instructions[instruction.operands[0]]
    return instruction


def _taken(instruction: Any, index: int, whole: int) -> int:
    if index == 0 and instruction.operation in ("dynamic-slice", "gather", "slice"):
        return min(whole, instruction.bytes)
    if index == 0 and instruction.operation == "dynamic-update-slice":
        return 0
    return whole


def _taken_inside(inside: Any, value: Any, whole: int) -> int:
    taken = 0
    for user in inside.instructions.values():
        if value.name in user.operands:
            names = user.operation == "bitcast"
            taken += _taken_inside(inside, user, whole) if names else _taken(user, user.operands.index(value.name), whole)
    return min(whole, taken)
