"""Runs a program with the patch: python -m cutloss.tunix [-m MODULE | SCRIPT] ARGUMENTS...

    python -m cutloss.tunix -m tunix.cli.peft_main configs/sft.yaml

CUTLOSS_AUTOPATCH=0 runs it without, and the other CUTLOSS_ variables choose how.
"""

from __future__ import annotations

import os
import runpy
import sys


def main() -> None:
    arguments = sys.argv[1:]
    module = bool(arguments) and arguments[0] == "-m"
    program = arguments[module:]
    if not program or program[0].startswith("-"):
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    os.environ.setdefault("CUTLOSS_AUTOPATCH", "1")
    from .auto import autopatch

    autopatch()
    sys.argv = program
    if module:
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(program[0])))
        runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    main()
