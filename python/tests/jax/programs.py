"""Looking into lowered programs."""

from __future__ import annotations

import math
import re


def shapes(text: str) -> set[tuple[int, ...]]:
    """Shapes of all arrays in StableHLO (tensor<2x3xf32>) or HLO (f32[2,3]) text."""
    found = {tuple(map(int, m[1].split("x")[:-1])) for m in re.finditer(r"tensor<((?:\d+x)+[a-z]\w*)>", text)}
    return found | {tuple(map(int, m[1].split(","))) for m in re.finditer(r"\b[a-z]\w*\[(\d+(?:,\d+)*)\]", text)}


def results(text: str, shape: tuple[int, ...]) -> int:
    """Number of StableHLO operations that make an array of this shape; a loop that only passes one on is none."""
    wanted = "tensor<" + "x".join(map(str, shape)) + "x"
    operations = [line for line in text.splitlines() if " = " in line and "stablehlo.while" not in line]
    return sum(wanted in re.split(r"->|:", line)[-1] for line in operations)


def most_elements(text: str) -> int:
    return max(math.prod(s) for s in shapes(text))


def is_product(instruction) -> bool:
    """Of matrices, in compiled HLO; XLA for CPU hands some to a library."""
    return instruction.operation == "dot" or (instruction.operation == "custom-call" and "matmul" in instruction.rest)


def outside_branches(program, computation):
    """Instructions of compiled HLO that run whatever a conditional says."""
    for instruction in computation.instructions.values():
        yield instruction
        if instruction.operation != "conditional":
            for name in (name for names in instruction.called.values() for name in names):
                if name in program.computations:
                    yield from outside_branches(program, program.computations[name])
