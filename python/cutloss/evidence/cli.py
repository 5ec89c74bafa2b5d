"""The command `cutloss-evidence`: what a loss changes in whole train steps, point by point, and the report of it."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from .. import _options
from . import options as opts
from . import points, runner, sweeps
from .points import PointError
from .records import Records, RecordsError

EPILOG = """\
examples
  cutloss-evidence plan --model gemma3-270m --arm cutloss --batch 16 --context 512
  cutloss-evidence pressure --out evidence/records.jsonl --time-budget 2h
  cutloss-evidence frontier --batches 8,16,32 --arms cutloss --remats NONE,BLOCK
  cutloss-evidence report --records evidence/records.jsonl --to docs/evidence

The same command again goes on where it stopped, whatever stopped it; a finished point is never done twice.
exit status: 0 done, 1 a point failed or was given up, 2 an option or file is wrong, 3 the time budget ended first.
"""


class Missing(Exception):
    """Something that a command needs is not installed."""


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="cutloss-evidence", description=__doc__.splitlines()[0], epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    commands = result.add_subparsers(dest="command", required=True, metavar="COMMAND")
    plan = commands.add_parser("plan", help="one point: what its train step plans on each chip")
    opts.add_point(plan)
    opts.add_run(plan)
    frontier = commands.add_parser("frontier", help="the largest context that fits, for each batch")
    opts.add_point(frontier, shape=False)
    opts.add_run(frontier)
    frontier.add_argument("--batches", type=_options.numbers, default=(8, 16, 32, 64, 128), metavar="LIST")
    frontier.add_argument("--least", type=int, default=256, help="smallest context tried (default %(default)s)")
    frontier.add_argument("--most", type=int, default=16384, help="largest context tried (default %(default)s)")
    frontier.add_argument("--step", type=int, default=256, help="of contexts (default %(default)s)")
    _add_choice(frontier)
    for name, about in sweeps.ABOUT.items():
        command = commands.add_parser(name, help=about)
        opts.add_run(command)
        _add_choice(command)
        command.add_argument("--models", type=opts.one_or_more(points.MODELS), metavar="LIST", help="of the sweep's models")
        command.add_argument("--list", action="store_true", help="print the points and which are done, and do none")
    _add_others(commands)
    return result


def _add_choice(command: argparse.ArgumentParser) -> None:
    command.add_argument("--arms", type=opts.one_or_more(points.ARMS), metavar="LIST", help=", ".join(points.ARMS))
    command.add_argument("--remats", type=opts.one_or_more(points.REMATS), metavar="LIST", help=", ".join(points.REMATS))


def _add_others(commands: Any) -> None:
    from . import measured, multihost, parity, quality, report

    for module in (measured, multihost, parity, quality, report):
        module.add(commands)


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    options = parser().parse_args(argv)
    from rich.console import Console

    console = Console(stderr=True)

    def failed(problem: object, status: int) -> int:
        console.print(f"cutloss-evidence: {problem}", style="bold red", highlight=False, markup=False, soft_wrap=True)
        return status

    try:
        if hasattr(options, "run"):
            return options.run(options, console)
        return _sweep(options, console)
    except (PointError, RecordsError, Missing) as error:
        return failed(error, 2)
    except KeyboardInterrupt:
        return failed("stopped; the same command goes on", 130)
    except runner.OutOfTime:
        return failed("the time budget ended; the same command goes on", 3)
    except Exception as error:
        if os.environ.get("CUTLOSS_TRACEBACK") == "1":
            raise
        return failed(f"{type(error).__name__}: {error} (CUTLOSS_TRACEBACK=1 shows where)", 1)


def _sweep(options: argparse.Namespace, console: Any) -> int:
    from .display import Display, frontier_table, records_table

    if getattr(options, "list", False):
        return _list(options)
    found, rows = None, None
    wanted = None if options.command == "frontier" else _points(options)
    _need_compiler()
    with Records(Path(options.out)) as store, Display(console, wanted, store) as display:

        def shown(event: str, point: points.Point, record: dict[str, Any] | None) -> None:
            display.show(event, point, record)
            if options.json and record is not None:
                print(json.dumps(record), flush=True)

        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        stop = threading.Event()
        make = runner.process_plan(options.timeout, options.host_memory, stop)
        run = runner.Runner(store, make, options.time_budget, options.retry, shown, options.jobs, stop)
        if options.command == "frontier":
            rows = _frontier(options, run)
        else:
            found = run.all(wanted)
    if options.json:
        for row in rows or ():
            print(json.dumps(row))
    else:
        console.print(frontier_table(rows) if found is None else records_table(found))
    bad = [record for record in found or () if record["outcome"] not in ("ok", "out-of-memory")]
    return 1 if bad else 0


def _points(options: argparse.Namespace) -> list[points.Point]:
    if options.command == "plan":
        choice = {name: getattr(options, name) for name in ("arm", "batch", "context", "remat", "tiles")}
        return [opts.point_of(options, **choice)]
    found = sweeps.points(options.command, options.arms, options.remats)
    return [point for point in found if options.models is None or point.model in options.models]


def _frontier(options: argparse.Namespace, run: runner.Runner) -> list[dict[str, Any]]:
    def rows(arm: str, remat: str) -> list[dict[str, Any]]:
        at = opts.point_of(options, arm=arm, remat=remat, batch=1, context=options.least)
        found = runner.frontier(run, at, options.batches, options.least, options.most, options.step)
        return [{"arm": arm, "remat": remat, "model": at.model, "mesh": at.mesh, "chip": at.chip, **row} for row in found]

    wanted = itertools.product(options.arms or sweeps.COMPARED, options.remats or ("NONE",))
    return [row for found in run.together(functools.partial(rows, *one) for one in wanted) for row in found]


def _list(options: argparse.Namespace) -> int:
    with Records(Path(options.out), readonly=True) as store:
        for point in _points(options):
            record = store.find(point.key)
            print(f"{record['outcome'] if record else '-':14} {point.key}")
    return 0


def _need_compiler() -> None:
    if importlib.util.find_spec("libtpu") is None:
        raise Missing(
            "libtpu, the compiler for TPUs, is not installed: pip install libtpu==0.0.42.1, or into a folder of its own "
            "(pip install --no-deps --target FOLDER libtpu==0.0.42.1) and PYTHONPATH=FOLDER"
        )


if __name__ == "__main__":
    sys.exit(main())
