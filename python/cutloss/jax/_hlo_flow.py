"""Which arrays of a compiled program are a parameter, or of a parameter's kind.

Two arrays are of one kind if one is made of the other by layout, cast, slicing, padding or gathering, if one is updated in
place to become the other, if they are added or multiplied element by element, or if a loop, branch or call passes one
on as the other. The kinds that hold a parameter of the program, or a result of a parameter's shape (its gradient),
are those of tables, activations and optimizer states. A matrix product begins a new kind: that of logits holds none of them.
"""

from __future__ import annotations

from collections.abc import Iterator

from ._hlo_text import Computation, Instruction, Program

Node = tuple[str, str, int]  # computation, instruction, number of the array among the instruction's

# The result is of its first operand's kind, whatever its size.
_OF_FIRST = {"slice", "dynamic-slice", "dynamic-update-slice", "pad", "all-gather", "all-to-all", "collective-permute",
             "reduce-scatter", "scatter", "concatenate", "copy", "copy-done", "bitcast", "bitcast-convert", "reshape",
             "transpose", "convert", "reverse", "optimization-barrier", "all-gather-done", "all-reduce-done"}
# These begin new kinds, even if an operand happens to have as many elements.
_NEW = {"dot", "convolution", "gather", "broadcast", "iota", "constant", "reduce", "reduce-window", "rng",
        "rng-bit-generator", "parameter", "sort", "select-and-scatter", "partition-id", "replica-id"}


class _Kinds:
    def __init__(self) -> None:
        self.parent: dict[Node, Node] = {}

    def find(self, node: Node) -> Node:
        self.parent.setdefault(node, node)
        while self.parent[node] != node:
            self.parent[node] = self.parent[self.parent[node]]
            node = self.parent[node]
        return node

    def join(self, a: list[Node], b: list[Node]) -> None:
        for one, other in zip(a, b):
            self.parent[self.find(one)] = self.find(other)


def tables(program: Program) -> set[Node]:
    """All arrays of a parameter's kind."""
    kinds = _Kinds()
    for computation in program.computations.values():
        for instruction in computation.instructions.values():
            for a, b in _same(program, computation, instruction):
                kinds.join(a, b)
    entry = program.entry
    parameters = [(i, k) for i in entry.parameters().values() for k in range(len(i.arrays))]
    shapes = {i.arrays[k].dims for i, k in parameters}
    ends = [(entry.name, i.name, k) for i, k in parameters]
    ends += [(entry.name, entry.root.name, k) for k, a in enumerate(entry.root.arrays) if a.dims in shapes]
    exempt = {kinds.find(node) for node in ends}
    return {node for node in list(kinds.parent) if kinds.find(node) in exempt}


def fused(program: Program) -> set[str]:
    """Computations whose arrays are never in memory: those of fusions, and how two numbers are reduced."""
    found = set()
    for computation in program.computations.values():
        for instruction in computation.instructions.values():
            if instruction.operation == "fusion":
                found |= set(instruction.called.get("calls", ()))
            elif instruction.operation != "call":
                found |= set(instruction.called.get("to_apply", ()))
    return found


def _nodes(computation: Computation, instruction: Instruction) -> list[Node]:
    return [(computation.name, instruction.name, k) for k in range(len(instruction.arrays))]


def _same(program: Program, computation: Computation,
          instruction: Instruction) -> Iterator[tuple[list[Node], list[Node]]]:
    here = _nodes(computation, instruction)
    operands = [computation.instructions[name] for name in instruction.operands if name in computation.instructions]
    operation = instruction.operation
    called = [program.computations[n] for names in instruction.called.values() for n in names
              if n in program.computations]

    if operation == "tuple":
        yield here, [node for one in operands for node in _nodes(computation, one)]
    elif operation == "get-tuple-element":
        index = int(instruction.rest.split("index=")[1].split(",")[0].split()[0])
        before = sum(len(part) for part in operands[0].parts[:index])
        yield here, _nodes(computation, operands[0])[before:]
    elif operation == "while":
        yield here, _nodes(computation, operands[0])
        for inner in called:
            yield here, _nodes(inner, inner.parameters()[0])
        body = program.computations[instruction.called["body"][0]]
        yield here, _nodes(body, body.root)
    elif operation == "conditional":
        for one, inner in zip(operands[1:], called):
            yield _nodes(computation, one), _nodes(inner, inner.parameters()[0])
        for inner in called:
            yield here, _nodes(inner, inner.root)
    elif operation in ("fusion", "call", "async-start") and called:
        for k, parameter in called[0].parameters().items():
            yield _nodes(computation, operands[k]), _nodes(called[0], parameter)
        if operation != "async-start":
            yield here, _nodes(called[0], called[0].root)
        else:
            yield here[sum(len(one.arrays) for one in operands) :], _nodes(called[0], called[0].root)
    elif operation == "async-done":
        yield here, _nodes(computation, operands[0])[-len(here) :]
    elif operation in ("copy-start", "all-gather-start", "collective-permute-start"):
        source = _nodes(computation, operands[0])
        for node in here[:2]:
            yield [node], source
    elif operation in _OF_FIRST:
        yield here, _nodes(computation, operands[0])
        if operation == "dynamic-update-slice":  # zeros at first, where gathered tiles of a table are put together
            yield here, _nodes(computation, operands[1])
    elif operation not in _NEW:
        for one in operands:
            for node, array in zip(_nodes(computation, one), one.arrays):
                for mine, made in zip(here, instruction.arrays):
                    if array.elements == made.elements:
                        yield [mine], [node]
