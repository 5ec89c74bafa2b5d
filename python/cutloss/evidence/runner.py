"""Goes through points: each once, in its own process, its record written as soon as it is done."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from . import process, records, search
from .points import Point

Plan = Callable[[Point], dict[str, Any]]
T = TypeVar("T")


class OutOfTime(Exception):
    """The time budget is used up; what is finished is in the file of records."""


class Runner:
    """
    Args:
        store: the open records.
        plan: makes a point's record; process.run in a sweep, something quick in tests.
        time_budget: seconds after which no further point is begun; None: no limit.
        retry: whether to do again points that neither fitted nor were refused for memory.
        report: called with (event, point, record or None): "begin", "done" or "known"; by one thread at a time.
        jobs: how many points are in work at once.
        stop: set when the sweep is interrupted; `plan` is to end then.
    """

    def __init__(
        self,
        store: records.Records,
        plan: Plan,
        time_budget: float | None = None,
        retry: bool = False,
        report: Callable[[str, Point, dict[str, Any] | None], None] = lambda *_: None,
        jobs: int = 1,
        stop: threading.Event | None = None,
    ) -> None:
        self._store, self._plan, self._retry, self._report = store, plan, retry, report
        self._jobs, self._stop, self._lock = jobs, stop or threading.Event(), threading.Lock()
        self._end = None if time_budget is None else time.monotonic() + time_budget
        self._tried: set[str] = set()

    def known(self, point: Point) -> dict[str, Any] | None:
        """The record that makes doing the point unnecessary."""
        found = self._store.find(point.key)
        again = self._retry and point.key not in self._tried and found and found["outcome"] not in records.FINAL
        return None if again else found

    def record(self, point: Point) -> dict[str, Any]:
        """The point's record, from the file or made now; raises OutOfTime."""
        with self._lock:
            found = self.known(point)
            if found is not None:
                self._report("known", point, found)
                return found
            if self._end is not None and time.monotonic() >= self._end:
                raise OutOfTime
            self._report("begin", point, None)
            self._tried.add(point.key)
        made = self._plan(point)
        with self._lock:
            self._store.add(made)
            self._report("done", point, made)
        return made

    def all(self, points: Iterable[Point]) -> list[dict[str, Any]]:
        """The records of points, none of which is given twice, in their order."""
        return self.together(functools.partial(self.record, point) for point in points)

    def together(self, tasks: Iterable[Callable[[], T]]) -> list[T]:
        """Runs as many tasks at once as there are jobs; returns their results in order, or raises what the first raised.

        No other is begun then. Those in work are finished if time ran out, and stopped if the sweep is interrupted.
        """
        with ThreadPoolExecutor(self._jobs) as pool:
            begun = [pool.submit(task) for task in tasks]
            try:
                for one in wait(begun, return_when=FIRST_EXCEPTION).done:
                    one.result()
                return [one.result() for one in begun]
            except BaseException as error:
                if not isinstance(error, OutOfTime):
                    self._stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

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


def process_plan(timeout: float, host_bytes: int | None, stop: threading.Event) -> Plan:
    return lambda point: process.run(point, timeout, host_bytes, stop=stop)
