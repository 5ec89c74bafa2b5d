"""The largest size that fits, with as few tries as a bisection needs. Pure: what fits is the caller's to find out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Found:
    """
    Attributes:
        largest: the largest size that fits with all that were tried below it, or None if the smallest does not.
        smallest_unfit: the smallest size that was tried and does not fit, or None if all fit.
        tries: sizes in the order they were tried; none twice.
    """

    largest: int | None
    smallest_unfit: int | None
    tries: tuple[int, ...]


def most_tries(least: int, most: int, step: int) -> int:
    """The number of tries `largest` needs at worst: doublings up to `most`, then halvings down to `step`."""
    doublings = 1 + math.ceil(math.log2(most / least)) if most > least else 1
    return doublings + max(0, math.ceil(math.log2(max(1, (most - least) / step))))


def largest(fits: Callable[[int], bool], least: int, most: int, step: int) -> Found:
    """Returns the largest of least, 2 least, 4 least, ... and the multiples of `step` between them that fits.

    Goes up by doubling until one does not fit, then bisects between the last two. Each size is tried once, at most
    `most_tries` in all. Sizes above one that does not fit are not tried.

    Raises:
        ValueError: least, most or step is not positive, or most is below least.
    """
    if least < 1 or step < 1 or most < least:
        raise ValueError(f"sizes from {least} to {most} in steps of {step}: each must be 1 or more, and most not below least")
    tries: list[int] = []

    def tried(size: int) -> bool:
        tries.append(size)
        return bool(fits(size))

    good, bad, size = None, None, least
    while bad is None:
        if not tried(size):
            bad = size
        else:
            good = size
            if size == most:
                break
            size = min(2 * size, most)
    while good is not None and bad is not None and bad - good > step:
        middle = (good + bad) // 2 // step * step
        if middle <= good:
            middle = good + step
        if tried(middle):
            good = middle
        else:
            bad = middle
    return Found(good, bad, tuple(tries))
