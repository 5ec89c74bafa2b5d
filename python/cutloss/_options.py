"""What options of the commands mean. A bad one is argparse's error, with what is wanted."""

from __future__ import annotations

import argparse

from . import _check


def size(text: str) -> int:
    """Bytes, such as 16GiB."""
    try:
        return _check.budget(text)
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def count(text: str) -> int:
    """A whole number from 1 on."""
    try:
        found = int(text)
    except ValueError:
        found = 0
    if found < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from 1 on")
    return found


def numbers(text: str) -> tuple[int, ...]:
    """A list such as 1,2,4."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected whole numbers from 1 on, such as 1,2,4")
    return found
