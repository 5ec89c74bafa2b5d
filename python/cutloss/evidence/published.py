"""The published study's figures, to stand beside ours: facts with their source, in one data file."""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import Any


@functools.cache
def load() -> dict[str, Any]:
    return json.loads(resources.files(__package__).joinpath("published.json").read_text())


def table(name: str) -> list[dict[str, Any]]:
    """The rows of one published table; each says which of the study's files it is from."""
    return load()["tables"][name]


def planned() -> dict[tuple, dict[str, Any]]:
    """Planned memory by (model, mesh, batch, context, rank, arm)."""
    return {(r["model"], r["mesh"], r["batch"], r["context"], r["rank"], r["arm"]): r for r in table("planned")}


def frontier() -> dict[tuple, int | None]:
    """The largest context that ran by (model, mesh, batch, arm)."""
    return {(r["model"], r["mesh"], r["batch"], r["arm"]): r["context"] for r in table("frontier")}
