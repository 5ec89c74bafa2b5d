"""Points: their keys, their commands, and what cannot be one."""

import made
import pytest

from cutloss.evidence import cli, options, points, sweeps
from cutloss.evidence.points import Point, PointError

SOME = [
    made.point(),
    made.point(8, 256, arm="default", remat="DECODER", rank=64, fsdp=2, tp=2, split=False),
    made.point(4, 128, arm="scheme", tiles=(128, 8192), dtype="float32", chip="v6e"),
]


@pytest.mark.parametrize("point", SOME, ids=lambda p: p.key)
def test_the_command_of_a_point_makes_the_point(point):
    given = cli.parser().parse_args(point.command.split()[1:])
    choice = {name: getattr(given, name) for name in ("arm", "batch", "context", "remat", "tiles")}
    assert options.point_of(given, **choice) == point
    assert Point.from_json(point.to_json()) == point


def test_every_field_is_in_the_key():
    base = made.point(8, 512, arm="scheme")
    changes = {"model": "gemma3-1b", "arm": "cutloss", "batch": 16, "context": 256, "rank": 8, "remat": "BLOCK", "chip": "v6e",
               "fsdp": 4, "tp": 4, "dtype": "float32", "tiles": (64, 4096), "split": False}  # fmt: skip
    assert set(changes) == set(base.to_json())
    keys = [base.key, *(base.with_(**{name: value}).key for name, value in changes.items())]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    "change", [{"model": "gpt"}, {"arm": "x"}, {"batch": 0}, {"context": 1}, {"fsdp": 3}, {"fsdp": 16}, {"remat": "ALL"},
               {"arm": "default", "tiles": (1, 2)}, {"tiles": (0, 2)}, {"chip": "v3"}, {"rank": 0}]  # fmt: skip
)
def test_impossible_points_are_named(change):
    name = "tiles" if "tiles" in change else next(iter(change))
    with pytest.raises(PointError, match=rf"^{name}"):
        made.point().with_(**change)


@pytest.mark.parametrize("name", sweeps.FIXED)
def test_sweeps_have_no_point_twice_and_only_asked_arms(name):
    found = sweeps.points(name)
    assert found and len({p.key for p in found}) == len(found)
    assert {p.arm for p in sweeps.points(name, ("cutloss",))} == {"cutloss"}
    assert {p.remat for p in sweeps.points(name, None, ("BLOCK",))} == {"BLOCK"}


def test_published_points_are_in_the_pressure_sweep():
    keys = {(p.batch, p.context) for p in sweeps.points("pressure")}
    assert {(b, c) for b in (16, 32, 64) for c in (512, 1024, 2048, 4096)} <= keys


def test_rows_that_do_not_divide_are_not_split():
    assert made.point(8, fsdp=4).rows_are_split and not made.point(6, fsdp=4).rows_are_split


def test_smallest_topology_with_enough_chips():
    assert [points.topology(made.point(8, fsdp=n)) for n in (1, 2, 4, 8)] == ["v5e:2x2", "v5e:2x2", "v5e:2x2", "v5e:2x4"]


@pytest.mark.parametrize("arguments", [["--time-budget", "soon"], ["--timeout", "0"], ["--host-memory", "much"], ["--arms", "x"]])
def test_bad_options_are_refused_before_anything_starts(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.parser().parse_args(["pressure", *arguments])
    assert stopped.value.code == 2 and arguments[0] in capsys.readouterr().err
