"""Where downloads and conversions are kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Returns the folder for downloads and conversions: `$CUTLOSS_CACHE`, else `cutloss` in the user's cache folder."""
    if override := os.environ.get("CUTLOSS_CACHE"):
        return Path(override)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cutloss"
