"""What the command's options mean: sizes, times, lists. A bad one is argparse's error, with what is wanted."""

from __future__ import annotations

import argparse
import re

from .._options import count, size
from . import points

_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}


def duration(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if not found or float(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; expected seconds, or a number with s, m or h, such as 90m")
    return float(found[1]) * _SECONDS[found[2]]


def tiles(text: str) -> tuple[int, int]:
    try:
        return points.tiles(text)
    except points.PointError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def one_or_more(known) -> object:
    def read(text: str) -> tuple[str, ...]:
        found = tuple(text.split(","))
        wrong = [name for name in found if name not in known]
        if wrong:
            raise argparse.ArgumentTypeError(f"{wrong[0]!r} is not one of {', '.join(known)}")
        return found

    return read


def add_point(command: argparse.ArgumentParser, shape: bool = True) -> None:
    """The options that make a point; without `shape` those of a family of points."""
    command.add_argument("--model", required=shape, default="gemma3-270m", metavar="NAME",
                         help=", ".join(points.MODELS) + "; tiny-gemma3, ... for tests")  # fmt: skip
    if shape:
        command.add_argument("--arm", required=True, choices=tuple(points.ARMS))
        command.add_argument("--batch", type=int, required=True, help="rows, over all chips")
        command.add_argument("--context", type=int, required=True, help="tokens of a row")
        command.add_argument("--remat", default="NONE", choices=points.REMATS)
        command.add_argument("--tiles", type=tiles, metavar="TOKENSxIDS", help="of the arm, over its own choice")
    command.add_argument("--rank", type=int, default=16, help="of the adapters (default %(default)s)")
    command.add_argument("--chip", default="v5e", choices=tuple(points.CHIPS))
    command.add_argument("--fsdp", type=int, default=1)
    command.add_argument("--tp", type=int, default=1)
    command.add_argument("--dtype", default="bfloat16", choices=points.DTYPES, help="of the weights")
    command.add_argument("--whole-batch", action="store_true", help="every chip computes all rows, as published meshes did")


def add_run(command: argparse.ArgumentParser) -> None:
    """The options of all that make records."""
    command.add_argument("--out", default="evidence/records.jsonl", metavar="FILE", help="records (default %(default)s)")
    command.add_argument("--timeout", type=duration, default=3600.0, metavar="TIME", help="of a point (default 1h)")
    command.add_argument("--host-memory", type=size, metavar="BYTES", help="of this machine, for a point, such as 16GiB")
    command.add_argument("--time-budget", type=duration, metavar="TIME", help="begin no point after this, such as 90m")
    command.add_argument("--jobs", type=count, default=1, metavar="N",
                         help="points in work at once, about 2 GiB each for a 270M model (default 1)")  # fmt: skip
    command.add_argument("--retry", action="store_true", help="do again points that failed or were given up")
    command.add_argument("--json", action="store_true", help="records as JSON lines on stdout")


def point_of(options: argparse.Namespace, **changes) -> points.Point:
    names = ("model", "rank", "chip", "fsdp", "tp", "dtype")
    found = {name: getattr(options, name) for name in names} | {"split": not options.whole_batch}
    return points.Point(**found, **changes)
