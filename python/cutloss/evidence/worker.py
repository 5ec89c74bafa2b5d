"""Compiles one point, in a process of its own: a compilation that dies or grows takes nothing else with it.

Started by process.py as `python -m cutloss.evidence.worker POINT RESULT PARENT`; writes a record's fields to the file
RESULT, whole or not at all.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from . import buffers

# No metadata server and no other host; and no lock, since nothing here touches a device.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_MIN_LOG_LEVEL": "3",
}

_USED = re.compile(r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def end_with(parent: int) -> None:
    """Makes the kernel kill this process when its parent dies: a killed sweep leaves no compiler behind."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes
    import signal

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it died before that
        os._exit(1)


def plan(point: Any, dump: Path, early_result: Any = None) -> dict[str, Any]:
    """Returns what a record says of the point's compilation, about which XLA writes into the folder `dump`.

    If it is clear before the end that the step fits, `early_result` is called with it, from another thread.
    """
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {buffers.FLAGS.format(folder=dump)}".strip()
    from . import early, facts, step

    def fields(text: str, written: dict[str, Any], lowered: Any, memory: Any = None) -> dict[str, Any]:
        found = facts.of(text, written, lowered.vocab, point, memory)
        return {"outcome": "ok", "message": "", "seconds": lowered.seconds, "compiled_to_the_end": memory is not None, **found}

    lowered = step.lower(point)
    if early_result is not None:
        early.watch(dump, point, lambda text, written: early_result(fields(text, written, lowered)))
    try:
        compiled = lowered.program.compile()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return with_written(refusal(str(error)), dump)
    text = compiled.as_text()
    return fields(text, buffers.of(dump, text), lowered, compiled.memory_analysis())


def with_written(found: dict[str, Any], dump: Path) -> dict[str, Any]:
    """A refusal with the total of the memory report, and with its buffers where the message lists none."""
    written = buffers.of(dump)
    needed = found["needed"] | ({"total_bytes": written["total_bytes"]} if "total_bytes" in written else {})
    return {**found, "needed": needed, "largest": found["largest"] or written["largest"]}


def is_out_of_memory(error: Exception) -> bool:
    return "RESOURCE_EXHAUSTED" in str(error) or bool(_USED.search(str(error)))


def refusal(text: str) -> dict[str, Any]:
    """The fields of a program that does not fit, from the compiler's message."""
    found = _USED.search(text)
    needed = {} if found is None else {"used_bytes": _bytes(found[1], found[2]), "limit_bytes": _bytes(found[3], found[4])}
    return {
        "outcome": "out-of-memory",
        "message": shortened(text),
        "seconds": {},
        "needed": needed,
        "largest": largest_allocations(text),
    }


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * _UNITS[unit])


def shortened(text: str, limit: int = 2000) -> str:
    """The message without the paths of this machine, and not all of its stack traces."""
    text = re.sub(r"(?<![\w)\]])/(?:[\w.+\-]+/)+", "", text)
    return text if len(text) <= limit else text[: limit - 4] + " ..."


def largest_allocations(text: str, most: int = 12) -> list[dict[str, Any]]:
    """The compiler's list of the largest allocations, biggest first."""
    found = []
    for block in re.split(r"\n\s*\d+\. Size: ", text)[1:]:
        size = re.match(r"([\d.]+)([KMGT]?)", block)
        shape = re.search(r"Shape: (\S+)", block)
        label = re.search(r"XLA label: (.*)", block)
        name = re.search(r"op_name=\"([^\"]*)\"|Operator: op_name=\"([^\"]*)\"", block)
        found.append(
            {
                "bytes": _bytes(size[1], size[2]) if size else 0,
                "array": shape[1].split("{")[0] if shape else "",
                "of": (name[1] or name[2]) if name else (label[1][:80] if label else ""),
            }
        )
    return sorted(found, key=lambda one: -one["bytes"])[:most]


def main() -> None:
    end_with(int(sys.argv[3]))
    from .points import Point

    place = Path(sys.argv[2])

    def write(result: dict[str, Any]) -> None:
        building = place.with_suffix(".part")
        building.write_text(json.dumps(result))
        building.rename(place)

    def write_and_end(result: dict[str, Any]) -> None:
        write(result)
        os._exit(0)  # the compiler goes on in the main thread

    whole = os.environ.get("CUTLOSS_EVIDENCE_WHOLE") == "1"
    write(plan(Point.from_json(json.loads(sys.argv[1])), place.parent / "dump", None if whole else write_and_end))


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    main()
