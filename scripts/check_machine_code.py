#!/usr/bin/env python3
"""Reads the machine code of the hot loops: are all accumulators in registers?

    scripts/check_machine_code.py OBJECT...      (kernels.cc.o among them; needs objdump)

A register tile that spills runs at a third of the speed and gives the same results, so no other test would notice. Fails
if a loop of a product kernel that does its multiply-adds moves a vector to or from the stack, or if a loop is missing.
"""

import re
import subprocess
import sys

# Highway's target: (rows R of kernels.inc, vector register). Others (SSE4, plain C++) have no multiply-add to count.
TARGETS = {"N_AVX2": (6, "ymm"), "N_AVX3": (14, "zmm")}
KERNELS = ("Logits<", "HiddenGradient<", "HeadGradient<", "MultiplyAddChains<")


def functions(objects):
    """Yields (demangled name, [(address, instruction)]) of every function in the object files."""
    listing = subprocess.run(["objdump", "-d", "-C", "--no-show-raw-insn", *objects], check=True, capture_output=True,
                             text=True).stdout
    name, body = None, []
    for line in listing.splitlines():
        if header := re.match(r"^[0-9a-f]+ <(.*)>:$", line):
            if name:
                yield name, body
            name, body = header[1], []
        elif name and (match := re.match(r"^\s*([0-9a-f]+):\t(.*)$", line)):
            body.append((int(match[1], 16), match[2].strip()))
    if name:
        yield name, body


def innermost_loops(body):
    """Yields the instructions of each loop that holds no other loop."""
    jumps = [(at, int(m[1], 16)) for at, text in body if (m := re.match(r"j\w+\s+([0-9a-f]+)", text))]
    loops = [(target, at) for at, target in jumps if target <= at]
    for first, last in loops:
        if not any(first <= f and l <= last and (f, l) != (first, last) for f, l in loops):
            yield [text for at, text in body if first <= at <= last]


def main(objects):
    seen = {target: set() for target in TARGETS}
    faults = []
    for name, body in functions(objects):
        target = next((t for t in TARGETS if f"{t}::" in name), None)
        kernel = next((k for k in KERNELS if f"::{k}" in name), None)
        if target is None or kernel is None:
            continue
        rows, register = TARGETS[target]
        for loop in innermost_loops(body):
            if sum("vfmadd" in text and register in text for text in loop) < 2 * rows:
                continue
            seen[target].add(kernel)
            spills = [t for t in loop if register in t and re.search(r"\(%r[sb]p[,)]", t) and t.startswith("vmov")]
            if spills:
                faults.append(f"{name}: {len(spills)} vector moves to or from the stack in a hot loop: {spills[0]}")
    for target, kernels in seen.items():
        if kernels and (missing := set(KERNELS) - kernels):
            faults.append(f"{target}: no loop of {2 * TARGETS[target][0]} multiply-adds found in {', '.join(sorted(missing))}")
    if not any(seen.values()):
        faults.append("no kernel of AVX2 or AVX-512 in these objects")
    print("\n".join(faults) or f"hot loops keep their accumulators in registers: {', '.join(t for t in seen if seen[t])}")
    return 1 if faults else 0


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1:]))
