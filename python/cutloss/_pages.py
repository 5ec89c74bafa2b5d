"""Pages of docs/ with parts that a command makes from its data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def marks(part: str) -> tuple[str, str]:
    return f"<!-- {part}: begin -->", f"<!-- {part}: end -->"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: bool = False) -> str:
    """numbers: all columns but the first are."""
    rule = ["---", *["---:" if numbers else "---"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in (head, rule, *rows))


def put(page: str, part: str, text: str) -> str:
    """The page with `text` between the marks of a part.

    Raises:
        ValueError: the page has no such marks.
    """
    begin, end = marks(part)
    before, found, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found or not found_end:
        raise ValueError(f"the page needs a line {begin} and a line {end}")
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"
