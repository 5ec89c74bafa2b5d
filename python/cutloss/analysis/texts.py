"""Texts that are on most machines: what programs say in English, the same in French, and Python's own source."""

from __future__ import annotations

import sysconfig
from pathlib import Path

KINDS = ("english", "french", "code")

# Modules that people wrote for people to read, without tables of data.
MODULES = ("argparse.py", "tempfile.py", "textwrap.py", "json/decoder.py", "asyncio/tasks.py", "heapq.py", "zipfile.py")


def read(kind: str, characters: int) -> tuple[str, str]:
    """Returns about so many characters of a kind of text, or of a UTF-8 file, and a line that says whence.

    The lines of "english" and "french" are each other's translations.
    """
    if kind in ("english", "french"):
        from cutloss.sft import data

        pairs, whence = data.load(None)
        # Sentences: short strings are column heads and names of options.
        lines = [pair.source if kind == "english" else pair.target for pair in pairs if len(pair.source) >= 60]
        return "\n".join(lines)[:characters], f"{kind} side of {whence}, those of 60 characters or more"
    if kind == "code":
        library = Path(sysconfig.get_path("stdlib"))
        files = [library / name for name in MODULES if (library / name).is_file()]
        text = "\n".join(file.read_text(encoding="utf-8") for file in files)
        version = sysconfig.get_python_version()
        return text[:characters], f"standard library of Python {version}: {', '.join(f.name for f in files)}"
    path = Path(kind)
    if not path.is_file():
        raise ValueError(f"--text: {kind!r} is neither one of {', '.join(KINDS)} nor a file")
    return path.read_text(encoding="utf-8")[:characters], str(path)
