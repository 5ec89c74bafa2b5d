"""Where downloads and conversions are kept."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def cache_dir() -> Path:
    """Returns the folder for downloads and conversions: `$CUTLOSS_CACHE`, else `cutloss` in the user's cache folder."""
    if override := os.environ.get("CUTLOSS_CACHE"):
        return Path(override)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cutloss"


def cached_folder(name: str, build: Callable[[Path], None]) -> Path:
    """Returns the folder `name` of the cache, filled by `build(folder)` at the first call.

    It appears by one rename, so an interrupted build leaves nothing that a later call would take for a finished one.
    """
    target = cache_dir() / name
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=name + ".", dir=target.parent))
    try:
        build(building)
        try:
            building.rename(target)
        except OSError:
            if not target.is_dir():  # not a race with another process that finished first
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return target
