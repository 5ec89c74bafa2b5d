"""What is in a compiled program: logits of many tokens, collectives and how often each runs, planned memory.

    report = hlo.scan(compiled.as_text(), vocab=262144, memory=compiled.memory_analysis())
    python -m cutloss.jax.hlo FILE --vocab 262144        # FILE: compiled.as_text(), or XLA's --xla_dump_to

The text does not say what is planned for temporary arrays: that is in compiled.memory_analysis(), and in the file
*-buffer-assignment.txt that --xla_dump_to writes beside it (--buffers).

The command ends with 0 if nothing is wrong, 1 if it found logits or more traffic than allowed, 2 if it cannot tell.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import _hlo_buffers, _hlo_flow
from ._hlo_text import Computation, Instruction, Program, parse

# Tokens of the largest tile of logits that the XLA lowering forms (_tiles.py).
TILE_TOKENS = 2048

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
               "collective-broadcast")
_SMALL = 4096  # below this, multiples of a device's share of the ids are too often something else


@dataclasses.dataclass(frozen=True)
class Loop:
    name: str
    trips: int | None  # None: it depends on data


@dataclasses.dataclass(frozen=True)
class Logits:
    array: str
    tokens: int
    bytes: int
    instruction: str
    computation: str


@dataclasses.dataclass(frozen=True)
class Collective:
    kind: str
    instruction: str
    array: str
    bytes: int  # once: the larger of what goes in and what comes out, on one device
    devices: int | None  # in a group
    loops: tuple[Loop, ...]  # outermost first

    @property
    def times(self) -> int | None:
        trips = [loop.trips for loop in self.loops]
        return None if None in trips else math.prod(trips)

    @property
    def depth(self) -> int:
        """Loops around it that run more than once."""
        return sum(loop.trips != 1 for loop in self.loops)

    @property
    def total_bytes(self) -> int | None:
        return None if self.times is None else self.times * self.bytes


@dataclasses.dataclass(frozen=True)
class Report:
    logits: list[Logits]
    collectives: list[Collective]
    argument_bytes: int
    output_bytes: int
    temp_bytes: int | None
    peak_bytes: int | None

    @property
    def loop_bytes(self) -> int | None:
        """Bytes of all collectives in loops, in one run of the program; None if a loop's trips are unknown."""
        totals = [c.total_bytes for c in self.collectives if c.depth]
        return None if None in totals else sum(totals)

    def to_json(self) -> dict[str, Any]:
        found = dataclasses.asdict(self)
        for row, c in zip(found["collectives"], self.collectives):
            row |= {"times": c.times, "total_bytes": c.total_bytes}
        return found | {"loop_bytes": self.loop_bytes}


def scan(text: str, *, vocab: int, tile_tokens: int = TILE_TOKENS, memory: Any = None) -> Report:
    """Looks through `compiled.as_text()`.

    Logits are arrays with an axis of the vocabulary (whole, a device's share of it, or padded to a multiple of a power
    of two up to 8192; alone or, from 4096 ids on, merged with another axis) and more than
    `tile_tokens` elements for each of its ids, unless they are a parameter of the program, or made of one by layout, cast, slice, gathering or arithmetic with its like
    (a table, its copies, its gradient, an optimizer's moments): see _hlo_flow.py.

    Args:
      vocab: V of the whole model.
      tile_tokens: tokens of the largest tile that is fine.
      memory: `compiled.memory_analysis()`, whose temporary and peak bytes the report then has: the text has neither.

    Raises:
      ValueError: text is not that of a compiled program; vocab or tile_tokens below 1.
    """
    for name, value in (("vocab", vocab), ("tile_tokens", tile_tokens)):
        if value < 1:
            raise ValueError(f"{name}: got {value}, must be at least 1")
    program = parse(text)
    return Report(
        logits=_logits(program, vocab, tile_tokens),
        collectives=list(_collectives(program)),
        argument_bytes=sum(i.bytes for i in program.entry.parameters().values()),
        output_bytes=program.entry.root.bytes,
        temp_bytes=getattr(memory, "temp_size_in_bytes", None),
        peak_bytes=getattr(memory, "peak_memory_in_bytes", None),
    )


# ---------------------------------------------------------------------------------------------------------------- logits


def _logits(program: Program, vocab: int, tile_tokens: int) -> list[Logits]:
    extents = _extents(vocab, program.partitions)
    fused = _hlo_flow.fused(program)
    exempt = _hlo_flow.tables(program)
    found = {}
    for computation in program.computations.values():
        if computation.name in fused:
            continue
        for instruction in computation.instructions.values():
            if instruction.operation in ("tuple", "get-tuple-element", "bitcast", "while", "conditional", "call"):
                continue  # names for what others made
            for k, array in enumerate(instruction.arrays):
                tokens = max((array.elements // e for e in extents if any(_holds(d, e) for d in array.dims)), default=0)
                if tokens > tile_tokens and (computation.name, instruction.name, k) not in exempt:
                    found.setdefault(str(array), Logits(str(array), tokens, array.bytes, instruction.name,
                                                        computation.name))
    return sorted(found.values(), key=lambda one: -one.bytes)


def _extents(vocab: int, partitions: int) -> set[int]:
    shares = {-(-vocab // k) for k in range(1, partitions + 1) if partitions % k == 0}
    return shares | {-(-share // 2**k) * 2**k for share in shares if share >= _SMALL for k in range(14)}


def _holds(extent: int, vocab: int) -> bool:
    """Whether an axis is of ids, or of ids and something else."""
    return extent == vocab or (vocab >= _SMALL and extent > vocab and extent % vocab == 0)


# ----------------------------------------------------------------------------------------------------------- collectives


def _collectives(program: Program) -> Iterator[Collective]:
    for computation, instruction, loops in executed(program, program.entry, ()):
        kind = instruction.operation.removesuffix("-start")
        if kind not in COLLECTIVES:
            continue
        devices = _group_size(instruction)
        if devices == 1:
            continue
        made = instruction.arrays
        taken = [a for name in instruction.operands for a in computation.instructions[name].arrays]
        if instruction.operation.endswith("-start") and kind != "all-reduce":
            made = made[len(taken) :]  # what goes in comes first
        if computation.name.startswith("all-reduce-scatter"):
            kind = "reduce-scatter"  # how XLA for TPU writes it
        most = max(taken, made, key=lambda arrays: sum(a.bytes for a in arrays))
        yield Collective(kind, instruction.name, " ".join(map(str, most)), sum(a.bytes for a in most), devices, loops)


def executed(program: Program, computation: Computation,
              loops: tuple[Loop, ...]) -> Iterator[tuple[Computation, Instruction, tuple[Loop, ...]]]:
    for instruction in computation.instructions.values():
        yield computation, instruction, loops
        inside = loops
        if instruction.operation == "while":
            inside += (Loop(instruction.name, _trips(program, computation, instruction)),)
        for key, names in instruction.called.items():
            if key == "to_apply" and instruction.operation != "call":
                continue  # how two numbers are reduced
            for name in names:
                if name in program.computations:
                    yield from executed(program, program.computations[name], inside)


def _group_size(instruction: Instruction) -> int | None:
    if found := re.search(r"replica_groups=\{\{([0-9,]*)\}", instruction.rest):
        return len(found[1].split(","))
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]<=", instruction.rest):
        return int(found[1])
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\] *\{([^}]*)\}", instruction.rest):
        sizes = dict(re.findall(r"'([^']*)'=(\d+)", found[1]))
        axes = re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", found[2])  # an axis, or a factor of one
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    return None


def _trips(program: Program, computation: Computation, loop: Instruction) -> int | None:
    """As XLA noted it; else from a condition `counter < limit` of constants, where each trip adds 1, as JAX's do."""
    if found := re.search(r'known_trip_count":\{"n":"(\d+)"', loop.rest):
        return int(found[1])
    condition = program.computations[loop.called["condition"][0]]
    root = condition.root
    if root.operation != "compare" or "direction=LT" not in root.rest:
        return None
    body = program.computations[loop.called["body"][0]]
    begin, limit = (_constant(condition, name, computation, loop, body) for name in root.operands)
    return None if begin is None or limit is None else max(0, limit - begin)


def _constant(condition: Computation, name: str, outside: Computation, loop: Instruction,
              body: Computation) -> int | None:
    """The value in the first trip, if it is a constant. A limit carried along must come out of the body unchanged."""
    instruction = _behind(condition, name)
    if instruction.operation == "get-tuple-element":
        index = _index(instruction)
        start = _behind(outside, loop.operands[0])
        if start.operation != "tuple":
            return None
        counter = _behind(condition, condition.root.operands[0])
        if instruction is not counter and not _unchanged(body, index):
            return None
        if instruction is counter and not _counts(body, index):
            return None
        instruction = _behind(outside, start.operands[index])
    found = re.match(r"(-?\d+)\)", instruction.rest)
    return int(found[1]) if instruction.operation == "constant" and found else None


def _index(instruction: Instruction) -> int:
    return int(re.search(r"index=(\d+)", instruction.rest)[1])


def _behind(computation: Computation, name: str) -> Instruction:
    instruction = computation.instructions[name]
    while instruction.operation in ("copy", "bitcast", "copy-done", "copy-start", "convert", "reshape"):
        instruction = computation.instructions[instruction.operands[0]]
    return instruction


def _unchanged(body: Computation, index: int) -> bool:
    if body.root.operation != "tuple":
        return False
    carried = _behind(body, body.root.operands[index])
    return carried.operation == "get-tuple-element" and _index(carried) == index


def _counts(body: Computation, index: int) -> bool:
    if body.root.operation != "tuple":
        return False
    carried = _behind(body, body.root.operands[index])
    if carried.operation != "add":
        return False
    terms = [_behind(body, name) for name in carried.operands]
    one = any(t.operation == "constant" and re.match(r"1\)", t.rest) for t in terms)
    return one and any(t.operation == "get-tuple-element" and _index(t) == index for t in terms)


# --------------------------------------------------------------------------------------------------------------- command


def _size(bytes: int | None) -> str:
    if bytes is None:
        return "unknown"
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if bytes >= scale:
            return f"{bytes / scale:.1f} {unit}"
    return f"{bytes} B"


def table(report: Report, tile_tokens: int = TILE_TOKENS) -> str:
    """The report for people."""
    lines = [f"arguments {_size(report.argument_bytes)}, outputs {_size(report.output_bytes)} a device, "
             f"temporary {_size(report.temp_bytes)}, peak {_size(report.peak_bytes)}"]
    if report.temp_bytes is None:
        lines.append("(what is planned for temporary arrays is not in a program's text: --buffers, or memory_analysis())")
    if report.collectives:
        lines.append(f"\n{'collective':<20} {'devices':>7} {'once':>10} {'times':>8} {'in all':>10}  array, loops")
    for c in sorted(report.collectives, key=lambda c: -(c.total_bytes or 1 << 62)):
        loops = " > ".join(f"{loop.name} x {loop.trips or 'unknown'}" for loop in c.loops)
        lines.append(f"{c.kind:<20} {c.devices or '?':>7} {_size(c.bytes):>10} {c.times or 'unknown':>8} "
                     f"{_size(c.total_bytes):>10}  {c.array[:60]}{', ' + loops if loops else ''}")
    if report.collectives:
        lines.append(f"in loops: {_size(report.loop_bytes)} a run")
    lines.append("")
    for one in report.logits:
        lines.append(f"LOGITS of {one.tokens} tokens: {one.array}, {_size(one.bytes)}, {one.instruction} in "
                     f"{one.computation}")
    if not report.logits:
        lines.append(f"no array has logits of more than {tile_tokens} tokens")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m cutloss.jax.hlo", description=__doc__.splitlines()[0])
    parser.add_argument("file", help="text of a compiled program: compiled.as_text()")
    parser.add_argument("--vocab", type=int, required=True, help="vocabulary of the whole model")
    parser.add_argument("--tile-tokens", type=int, default=TILE_TOKENS, help="tokens of a tile (default %(default)s)")
    parser.add_argument("--buffers", metavar="FILE", help="*-buffer-assignment.txt of the same program, for its temporary "
                        "bytes (the peak is in compiled.memory_analysis() alone)")
    parser.add_argument("--max-loop-bytes", type=int, help="fail if collectives in loops move more in a run")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args(arguments)
    memory, reading = None, options.buffers
    try:
        if options.buffers is not None:
            memory = _hlo_buffers.parse(Path(options.buffers).read_text())
        reading = options.file
        report = scan(Path(options.file).read_text(), vocab=options.vocab, tile_tokens=options.tile_tokens, memory=memory)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        print(f"error: {reading}: {error}", file=sys.stderr)
        return 2
    print(json.dumps(report.to_json(), indent=1) if options.json else table(report, options.tile_tokens))
    if options.max_loop_bytes is not None and report.collectives:
        if report.loop_bytes is None:
            print("error: a collective is in a loop whose trips depend on data: its traffic is unknown", file=sys.stderr)
            return 2
        if report.loop_bytes > options.max_loop_bytes:
            print(f"error: collectives in loops move {report.loop_bytes} bytes, {options.max_loop_bytes} are allowed",
                  file=sys.stderr)
            return 1
    return 1 if report.logits else 0


if __name__ == "__main__":
    sys.exit(main())
