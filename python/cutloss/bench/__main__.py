"""The command `python -m cutloss.bench`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

from . import cases, report, runner, store
from .runner import say

EPILOG = f"""\
what happens
  Each way runs in a process of its own, one after the other, on the same inputs, with the same number of CPUs. Its
  loss and a sample of its gradients are compared with float64; a wrong one is reported as wrong, with its error, and
  has no speed; a filter ("coarse") whose gradients are off by more than 1e-3 is not compared with the peers. GFLOP/s
  count what the dense loss takes (1u, frozen 2u, trainable 3u), whoever does more or less; the peak is what this
  machine reaches with multiply-adds alone, measured before each point. Extra memory is beside inputs and gradients:
  the peak of the resident set less what was resident before.

  Finished points are kept in --out and not measured again; ours are, after a commit. A point that cannot fit into
  memory is refused. Peers need an environment with the extra 'peers' (5 GB; 'make bench-peers' puts it into
  build/peers); those that are missing are named and left out.

names
  --shapes  {", ".join(cases.SHAPES)}
  --heads   {", ".join(cases.HEADS)}: no gradient, dE, dE and dC
  --modes   {", ".join(cases.MODES)}
  --peers   {", ".join(cases.PEERS)}

examples
  python -m cutloss.bench --quick                                          a minute, to see that everything works
  python -m cutloss.bench --shapes gemma3-270m-real --dtypes f32           what is asked most
  python -m cutloss.bench --modes stream,unbiased --peers ''               cutloss alone
  python -m cutloss.bench --report build/bench/peers.json                  tables and pictures again
  python -m cutloss.bench --render docs/benchmarks.md                      the page, from docs/bench/*.json

exit status: 0 all measured and ours right, 1 something of ours was wrong or failed, 2 wrong usage, 130 stopped.
"""


def names(known, default):
    def parse(text: str) -> list[str]:
        chosen = [name for name in text.split(",") if name]
        if unknown := set(chosen) - set(known):
            raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: expected some of {', '.join(known)}")
        return chosen

    return {"type": parse, "default": list(default), "metavar": "LIST"}


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1e6:
        raise argparse.ArgumentTypeError(f"{text} is not in [0, 1e6)")
    return value


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="python -m cutloss.bench", description="Times cutloss and its peers.",
                                     epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = result.add_argument
    add("--quick", action="store_true", help="one small shape, one setting of each: a smoke test")
    add("--shapes", **names(cases.SHAPES, cases.SHAPES), help="default: all")
    add("--modes", **names(cases.MODES, cases.DEFAULT_MODES), help="of cutloss; default: all but auto")
    add("--peers", **names(cases.PEERS, cases.PEERS), help="default: all; '' for none")
    add("--heads", **names(cases.HEADS, cases.HEADS), help="default: all")
    add("--dtypes", **names(cases.DTYPES, ()), help="default: f32,bf16, with --quick f32")
    add("--n", type=positive, help="tokens, instead of each shape's own")
    add("--threads", type=positive, default=len(os.sched_getaffinity(0)), help="default: all CPUs")
    add("--reps", type=positive, default=5, help="timed runs (default %(default)s), fewer if they are slow")
    add("--seconds", type=seconds, default=60, help="after as many, 3 runs are enough (default %(default)s)")
    add("--timeout", type=seconds, default=1800, help="seconds for one process (default %(default)s)")
    add("--peer-python", type=Path, help=f"has the peers (default: {runner.PEER_PYTHON} if it is there, else this one)")
    add("--work", type=Path, default=Path("build/bench"), help="folder for inputs (default %(default)s)")
    add("--out", type=Path, help="file of results (default: WORK/peers.json, with --quick quick.json)")
    add("--again", action="store_true", help="measure finished points again")
    add("--json", action="store_true", help="print the results as JSON, without tables")
    add("--report", type=Path, metavar="FILE", help="only print the tables and draw the pictures of FILE")
    add("--render", type=Path, metavar="PAGE", help="only put the tables of bench/*.json beside PAGE into it")
    return result


def show(path: Path, as_json: bool = False) -> dict:
    """Prints the tables of a file of results, or the file, and draws its pictures beside it."""
    data = store.read(path)
    if as_json:
        print(json.dumps(data, indent=1))
    else:
        print(report.machine_line(data))
        for section in report.sections(data):
            print(f"\n{section.title}\n{report.text_table(section.rows)}")
    try:
        pictures = report.plot(data, path.parent)
    except ImportError as error:
        pictures = []
        say(f"no pictures: {error}; 'pip install matplotlib', then --report {path}")
    say("written: " + ", ".join(map(str, [path, *pictures])))
    return data


def render(page: Path) -> None:
    kept = sorted((page.parent / "bench").glob("*.json"))
    files = {f"{page.parent.name}/bench/{file.name}": store.read(file) for file in kept}
    page.write_text(report.render(page.read_text(), files))


def leave_out_missing(options) -> str:
    """Takes peers that are not installed off the list; says which, and how to get them."""
    default = runner.PEER_PYTHON if runner.PEER_PYTHON.exists() else Path(sys.executable)
    options.peer_python = options.peer_python or default
    missing = runner.missing_packages(options.peer_python, options.peers)
    if not missing:
        return ""
    options.peers = [peer for peer in options.peers if runner.PACKAGES[peer] not in missing]
    what = "; ".join(f"{package} (for {', '.join(peers)})" for package, peers in missing.items())
    return (f"left out, not installed for {options.peer_python}: {what}. To get them (5 GB): make bench-peers, or "
            "pip install 'cutloss[peers]' into an environment of its own and --peer-python ITS/bin/python")


def bench(options) -> int:
    shapes = [cases.QUICK] if options.quick else [cases.SHAPES[name] for name in options.shapes]
    if options.n:
        shapes = [dataclasses.replace(shape, n=options.n) for shape in shapes]
    if options.quick:
        options.reps = min(options.reps, 3)
    options.dtypes = options.dtypes or list(cases.DTYPES[:1] if options.quick else cases.DTYPES)
    if note := leave_out_missing(options):
        say(note)
    path = options.out or options.work / ("quick.json" if options.quick else "peers.json")
    results = store.Store(path, runner.machine(options.threads))
    runner.measure_all(options, shapes, results)
    data = show(path, options.json) if results.points else results.data
    if note:
        say(note)
    return 1 if any(p["ours"] and p["status"] in ("failed", "wrong") for p in data["points"]) else 0


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        if options.render:
            render(options.render)
        elif options.report:
            show(options.report, options.json)
        else:
            return bench(options)
    except KeyboardInterrupt:
        say("\nstopped; what was finished is kept, and the same command goes on from there")
        return 130
    except (OSError, ValueError, RuntimeError, subprocess.SubprocessError) as error:
        say(f"cutloss.bench: {error}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
