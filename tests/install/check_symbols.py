"""check_symbols.py LIBRARY: the C functions of a shared library are those of symbols.txt, no more and no fewer.

A name that goes is a program that no longer starts; a name that comes is a promise, to be made on purpose.
"""

import pathlib
import subprocess
import sys

listed = set((pathlib.Path(__file__).parent / "symbols.txt").read_text().split())
dump = subprocess.run(["nm", "-D", "--defined-only", sys.argv[1]], check=True, capture_output=True, text=True).stdout
exported = {line.split()[-1].split("@")[0] for line in dump.splitlines()}
exported = {name for name in exported if not name.startswith(("_Z", "__", "_init", "_fini"))}
if exported != listed:
    sys.exit(f"exported but not in symbols.txt: {sorted(exported - listed)}; in it but not exported: "
             f"{sorted(listed - exported)}")
print(f"{len(listed)} C symbols, as listed")
