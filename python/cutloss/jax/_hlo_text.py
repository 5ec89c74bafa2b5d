"""Reads the text of a compiled program (`compiled.as_text()`) into computations and instructions."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

WIDTH = {"pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2, "s32": 4, "u32": 4,
         "f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8, "c128": 16, "token": 0, "opaque": 0}

_ARRAY = re.compile(r"\b([a-z]+[0-9]*[a-z0-9]*)\[([0-9,<=]*)\](?:\{[^{}]*?(?:S\((\d+)\))?\})?")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_OPERATION = re.compile(r" ?([a-z][\w\-]*)\(")
_NAME = re.compile(r"%([\w.\-]+)|(?<![\w.\-])([A-Za-z_][\w\-]*\.[\w.\-]+|[A-Za-z_][\w.\-]*)(?=\s*(?:,|$))")
_CALLED = re.compile(r"\b(calls|body|condition|to_apply|branch_computations|true_computation|false_computation|"
                     r"called_computations)=(\{[^}]*\}|%?[\w.\-]+)")


@dataclasses.dataclass(frozen=True)
class Array:
    dtype: str
    dims: tuple[int, ...]
    space: int = dataclasses.field(default=0, compare=False)  # of memory, from the layout: 0 is main memory

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        return math.ceil(self.elements * WIDTH.get(self.dtype, 1))

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclasses.dataclass
class Instruction:
    name: str
    operation: str
    parts: list[list[Array]]  # arrays of each element of a tuple, or of the one array
    is_tuple: bool
    operands: list[str]
    called: dict[str, list[str]]
    rest: str  # operands' text and attributes
    root: bool

    @property
    def arrays(self) -> list[Array]:
        return [a for part in self.parts for a in part]

    @property
    def bytes(self) -> int:
        return sum(a.bytes for a in self.arrays)


@dataclasses.dataclass
class Computation:
    name: str
    instructions: dict[str, Instruction]

    @property
    def root(self) -> Instruction:
        return next((i for i in self.instructions.values() if i.root), list(self.instructions.values())[-1])

    def parameters(self) -> dict[int, Instruction]:
        return {int(i.rest.split(")")[0]): i for i in self.instructions.values() if i.operation == "parameter"}


@dataclasses.dataclass
class Program:
    header: str
    entry: Computation
    computations: dict[str, Computation]

    @property
    def partitions(self) -> int:
        found = re.search(r"num_partitions=(\d+)", self.header)
        return int(found[1]) if found else 1


def parse(text: str) -> Program:
    """Raises ValueError if this is not the text of a compiled program."""
    lines = text.splitlines()
    header = next((line for line in lines if line.startswith("HloModule")), None)
    if header is None:
        hint = (" (this is StableHLO, what comes before compiling: use jax.jit(f).lower(...).compile().as_text())"
                if "stablehlo." in text or "module @" in text else "")
        raise ValueError(f"no line begins with HloModule: not the text of a compiled program{hint}")
    computations: dict[str, Computation] = {}
    entry = current = None
    for line in lines:
        if current is None:
            if found := _HEADER.match(line):
                current = Computation(found[2], {})
                computations[current.name] = current
                entry = current if found[1] else entry
        elif line.startswith("}"):
            current = None
        elif found := _INSTRUCTION.match(line):
            instruction = _instruction(found[2], bool(found[1]), line[found.end() :])
            current.instructions[instruction.name] = instruction
    if entry is None or not entry.instructions:
        raise ValueError("no ENTRY computation: the text of the program is cut off")
    return Program(header, entry, computations)


def _instruction(name: str, root: bool, text: str) -> Instruction:
    if text.startswith("("):
        end = _closing(text, 0) + 1
        parts = [_arrays(part) for part in _split(text[1 : end - 1])]
    else:
        end = text.index(" ")
        parts = [_arrays(text[:end])]
    found = _OPERATION.match(text, end)
    if not found:
        raise ValueError(f"cannot read the instruction {name!r}: {text[:80]}")
    close = _closing(text, found.end() - 1)
    inside, attributes = text[found.end() : close], text[close + 1 :]
    operands = [a or b for a, b in _NAME.findall(re.sub(r"/\*.*?\*/", "", inside))] if found[1] != "constant" else []
    called: dict[str, list[str]] = {}
    for key, value in _CALLED.findall(attributes):
        called.setdefault(key, []).extend(v.strip().lstrip("%") for v in value.strip("{}").split(","))
    return Instruction(name, found[1], parts, text.startswith("("), operands, called, inside + ")" + attributes, root)


def _arrays(text: str) -> list[Array]:
    return [Array(kind, tuple(int(d.lstrip("<=")) for d in dims.split(",") if d), int(space or 0))
            for kind, dims, space in _ARRAY.findall(text)]


def _closing(text: str, start: int) -> int:
    depth = 0
    for at in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if not depth:
            return at
    raise ValueError(f"a bracket is not closed: {text[start : start + 80]}")


def _split(text: str) -> Iterator[str]:
    """The elements of a tuple's type: at commas outside all brackets."""
    depth, begin = 0, 0
    for at, c in enumerate(text):
        depth += (c in "([{") - (c in ")]}")
        if c == "," and not depth:
            yield text[begin:at]
            begin = at + 1
    yield text[begin:]
