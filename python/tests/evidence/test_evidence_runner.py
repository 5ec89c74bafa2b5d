"""Sweeps that are killed, that run out of time, and whose compiler is not monotone. The compiler here is a function."""

import collections
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import made
import pytest

from cutloss.evidence import process, runner, search, sweeps
from cutloss.evidence.records import Records, read


def fake(limit_tokens, calls=None):
    def plan(point):
        if calls is not None:
            calls[point.key] += 1
        return made.ok(point) if point.tokens <= limit_tokens else made.refused(point)

    return plan


KILLED = """
import sys, time
sys.path.insert(0, {folder!r})
import made
from cutloss.evidence import runner, sweeps
from cutloss.evidence.records import Records
from pathlib import Path
def plan(point):
    with open({log!r}, "a") as log:
        log.write(point.key + "\\n")
    time.sleep(0.02)
    return made.ok(point)
with Records(Path({out!r})) as store:
    runner.Runner(store, plan).all(sweeps.points("pressure"))
"""


def test_a_killed_sweep_goes_on_and_repeats_no_finished_point(tmp_path):
    out, log = tmp_path / "records.jsonl", tmp_path / "log"
    program = KILLED.format(folder=str(Path(__file__).parent), log=str(log), out=str(out))
    wanted = [point.key for point in sweeps.points("pressure")]
    kills, finished = 0, []
    for _ in range(50):
        child = subprocess.Popen([sys.executable, "-c", program])
        enough = len(finished) + 13
        while child.poll() is None and len(read(out)) < enough:
            time.sleep(0.005)
        if child.poll() is None:
            os.kill(child.pid, signal.SIGKILL)
            kills += 1
        child.wait()
        finished = [record["key"] for record in read(out)]
        if len(finished) == len(wanted):
            break
    assert kills >= 3 and finished == wanted
    done = collections.Counter(log.read_text().split("\n")[:-1])
    # Only the point that was in work at a kill may have been begun twice.
    assert sum(done.values()) - len(wanted) <= kills


def test_a_second_sweep_does_nothing(tmp_path):
    calls, points = collections.Counter(), sweeps.points("pressure")
    for _ in range(2):
        with Records(tmp_path / "records.jsonl") as store:
            runner.Runner(store, fake(10**4, calls)).all(points)
    assert set(calls.values()) == {1}


def test_failed_points_are_tried_again_only_if_asked(tmp_path):
    calls = collections.Counter()

    def plan(point):
        calls[point.key] += 1
        return made.outcome(point, "timeout") if point.batch == 8 else made.ok(point)

    for retry in (False, False, True):
        with Records(tmp_path / "records.jsonl") as store:
            runner.Runner(store, plan, retry=retry).all([made.point(8), made.point(16), made.point(8)])
    assert calls == {made.point(8).key: 2, made.point(16).key: 1}


def test_the_time_budget_ends_before_a_point_and_keeps_what_is_done(tmp_path):
    def plan(point):
        time.sleep(0.05)
        return made.ok(point)

    with Records(tmp_path / "records.jsonl") as store, pytest.raises(runner.OutOfTime):
        runner.Runner(store, plan, time_budget=0.12).all(sweeps.points("pressure"))
    assert 1 <= len(read(tmp_path / "records.jsonl")) <= 4


@pytest.mark.parametrize("jobs", [1, 3])
def test_several_jobs_are_one(tmp_path, jobs):
    """As many points are in work at once as was asked for, and the records come back in the order of the points."""
    working, most, lock = 0, 0, threading.Lock()
    meet = threading.Barrier(jobs)

    def plan(point):
        nonlocal working, most
        with lock:
            working += 1
            most = max(most, working)
        meet.wait(timeout=30)
        with lock:
            working -= 1
        return made.ok(point)

    points = [made.point(8 * k) for k in range(1, 7)]
    with Records(tmp_path / "records.jsonl") as store:
        found = runner.Runner(store, plan, jobs=jobs).all(points)
    assert most == jobs and [one["key"] for one in found] == [point.key for point in points]
    assert sorted(one["key"] for one in read(tmp_path / "records.jsonl")) == sorted(point.key for point in points)


def test_time_that_runs_out_loses_what_is_in_work(tmp_path):
    begun, stop = threading.Event(), threading.Event()

    def plan(point):
        if point.batch == 8:
            begun.set()
            if stop.wait(0.6):
                raise process.Stopped
        else:
            begun.wait()
            time.sleep(0.3)
        return made.ok(point)

    points = [made.point(8), made.point(16), made.point(32), made.point(64)]
    with Records(tmp_path / "records.jsonl") as store, pytest.raises(runner.OutOfTime):
        runner.Runner(store, plan, time_budget=0.2, jobs=2, stop=stop).all(points)
    assert {one["key"] for one in read(tmp_path / "records.jsonl")} == {made.point(8).key, made.point(16).key}


def test_an_interrupted_sweep_waits_for_its_jobs(tmp_path):
    stop, ended = threading.Event(), []

    def plan(point):
        if point.batch == 8:
            return made.ok(point)
        if point.batch == 32:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        ended.append((point.batch, stop.wait(timeout=30)))
        raise process.Stopped

    with Records(tmp_path / "records.jsonl") as store, pytest.raises(KeyboardInterrupt):
        runner.Runner(store, plan, jobs=2, stop=stop).all([made.point(batch) for batch in (8, 16, 32, 64, 128)])
    assert sorted(ended) == [(16, True), (32, True)]
    assert [one["key"] for one in read(tmp_path / "records.jsonl")] == [made.point(8).key]


def test_the_command_says_how_it_ended(tmp_path, monkeypatch, capsys):
    """What a script sees: 3 where the time budget ended, 0 where all is done, 1 where a point was given up."""
    from cutloss.evidence import cli

    def main(plan, *more):
        monkeypatch.setattr(runner, "process_plan", lambda *_: plan)
        monkeypatch.setattr(cli, "_need_compiler", lambda: None)
        monkeypatch.setattr(cli.signal, "signal", lambda *_: None)
        return cli.main(["small", "--out", str(tmp_path / "records.jsonl"), *more])

    def slow(point):
        time.sleep(0.05)
        return made.ok(point)

    assert main(slow, "--time-budget", "0.12") == 3
    before = len(read(tmp_path / "records.jsonl"))
    assert 1 <= before <= 4 and "the same command goes on" in capsys.readouterr().err
    assert main(lambda point: made.outcome(point, "failed")) == 1
    assert main(made.ok) == 1  # what failed stays so ...
    assert main(made.ok, "--retry") == 0  # ... unless asked
    wanted = len(sweeps.points("small"))
    assert len({record["key"] for record in read(tmp_path / "records.jsonl")}) == wanted
    assert len(read(tmp_path / "records.jsonl")) == before + 2 * (wanted - before)


def frontier(tmp_path, plan, batches=(8, 16, 32, 64), most=16384):
    with Records(tmp_path / "records.jsonl") as store:
        run = runner.Runner(store, plan)
        return runner.frontier(run, made.point(1, 256), batches, 256, most, 256)


def test_frontier_is_refined_between_powers_of_two(tmp_path):
    calls = collections.Counter()
    rows = frontier(tmp_path, fake(16 * 1792, calls))
    assert [(row["batch"], row["largest"]) for row in rows] == [(8, 3584), (16, 1792), (32, 768), (64, 256)]
    assert all(row["smallest_unfit"] == row["largest"] + 256 for row in rows)
    assert max(len(row["tries"]) for row in rows) <= search.most_tries(256, 16384, 256)
    assert set(calls.values()) == {1}


def test_frontier_of_a_compiler_that_is_not_monotone_is(tmp_path):
    """A larger batch that happens to fit where a smaller one was refused must not stand above it in the table."""

    def plan(point):
        lucky = point.batch == 32 and point.context <= 4096
        return made.ok(point) if lucky or point.tokens <= 8192 else made.refused(point)

    largest = [row["largest"] for row in frontier(tmp_path, plan)]
    assert largest == sorted(largest, key=lambda c: -(c or 0)) and largest[:2] == [1024, 512]


def test_frontiers_of_several_jobs_are_mixed_up(tmp_path, monkeypatch, capsys):
    from cutloss.evidence import cli

    monkeypatch.setattr(runner, "process_plan", lambda *_: fake(8192))
    monkeypatch.setattr(cli, "_need_compiler", lambda: None)
    monkeypatch.setattr(cli.signal, "signal", lambda *_: None)
    words = ["--out", str(tmp_path / "records.jsonl"), "--batches", "8,16", "--remats", "NONE,BLOCK", "--jobs", "3", "--json"]
    assert cli.main(["frontier", *words]) == 0
    rows = [row for row in map(json.loads, capsys.readouterr().out.splitlines()) if "largest" in row and "arm" in row]
    assert [(row["arm"], row["remat"], row["batch"], row["largest"]) for row in rows] == [
        (arm, remat, batch, 8192 // batch)
        for arm in ("default", "cutloss") for remat in ("NONE", "BLOCK") for batch in (8, 16)
    ]  # fmt: skip
    with pytest.raises(SystemExit):
        cli.main(["frontier", "--jobs", "0"])
    assert "--jobs: '0': expected a whole number from 1 on" in capsys.readouterr().err


def test_frontier_where_nothing_fits_says_so_and_stops(tmp_path):
    calls = collections.Counter()
    rows = frontier(tmp_path, fake(100, calls))
    assert [row["largest"] for row in rows] == [None] * 4 and len(calls) == 1


def test_a_point_that_was_given_up_does_not_count_as_fitting(tmp_path):
    rows = frontier(tmp_path, lambda p: made.outcome(p, "timeout") if p.context > 512 else made.ok(p), batches=(8,))
    assert rows[0]["largest"] == 512
    assert json.loads((tmp_path / "records.jsonl").read_text().splitlines()[-1])["outcome"] == "timeout"
