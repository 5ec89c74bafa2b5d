"""Goes through points: each once, in its own process, its record written before the next begins."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from . import process, records, search
from .points import Point

Plan = Callable[[Point], dict[str, Any]]


class OutOfTime(Exception):
    """The time budget is used up; what is finished is in the file of records."""


class Runner:
    """
    Args:
        store: the open records.
        plan: makes a point's record; process.run in a sweep, something quick in tests.
        time_budget: seconds after which no further point is begun; None: no limit.
        retry: whether to do again points that neither fitted nor were refused for memory.
        report: called with (event, point, record or None): "begin", "done" or "known".
    """

    def __init__(
        self,
        store: records.Records,
        plan: Plan,
        time_budget: float | None = None,
        retry: bool = False,
        report: Callable[[str, Point, dict[str, Any] | None], None] = lambda *_: None,
    ) -> None:
        self._store, self._plan, self._retry, self._report = store, plan, retry, report
        self._end = None if time_budget is None else time.monotonic() + time_budget
        self._tried: set[str] = set()

    def known(self, point: Point) -> dict[str, Any] | None:
        """The record that makes doing the point unnecessary."""
        found = self._store.find(point.key)
        again = self._retry and point.key not in self._tried and found and found["outcome"] not in records.FINAL
        return None if again else found

    def record(self, point: Point) -> dict[str, Any]:
        """The point's record, from the file or made now; raises OutOfTime."""
        found = self.known(point)
        if found is not None:
            self._report("known", point, found)
            return found
        if self._end is not None and time.monotonic() >= self._end:
            raise OutOfTime
        self._report("begin", point, None)
        self._tried.add(point.key)
        made = self._plan(point)
        self._store.add(made)
        self._report("done", point, made)
        return made

    def all(self, points: Iterable[Point]) -> list[dict[str, Any]]:
        return [self.record(point) for point in points]

    def fits(self, point: Point) -> bool:
        """Whether the step compiled. One that was given up counts as not fitting, and is in the records as what it is."""
        return self.record(point)["outcome"] == "ok"


def frontier(
    runner: Runner, at: Point, batches: Iterable[int], least: int, most: int, step: int
) -> list[dict[str, Any]]:
    """Returns, for each batch in growing order, the largest context whose step fits: {batch, largest, smallest_unfit, ...}.

    A batch is not tried above the largest context of a smaller one, so that no row of the table is above the one before.
    """
    rows, limit = [], most
    for batch in sorted(set(batches)):
        if limit < least:
            rows.append({"batch": batch, "largest": None, "smallest_unfit": least, "tries": []})
            continue
        found = search.largest(lambda n: runner.fits(at.with_(batch=batch, context=n)), least, limit, step)  # noqa: B023
        unfit = found.smallest_unfit if found.smallest_unfit is not None or limit == most else limit + step
        rows.append({"batch": batch, "largest": found.largest, "smallest_unfit": unfit, "tries": list(found.tries)})
        limit = found.largest or 0
    return rows


def process_plan(timeout: float, host_bytes: int | None) -> Plan:
    return lambda point: process.run(point, timeout, host_bytes)
