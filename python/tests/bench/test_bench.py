"""The parts of the bench that decide what is reported: the check, the table, the file of results."""

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from cutloss.bench import __main__ as bench
from cutloss.bench import cases, inputs, memory, reference, report, runner, store

TOKENS, VOCAB, HIDDEN = 70, 5000, 24
EXACT = cases.MODES["auto"][0]
MACHINE = {"cpu": "Test CPU", "threads": 2, "target": "avx2"}


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.default_rng(1)
    e = rng.normal(size=(TOKENS, HIDDEN)).astype(np.float32)
    c = rng.normal(size=(VOCAB, HIDDEN)).astype(np.float32)
    return e, c, rng.integers(0, VOCAB, TOKENS)


@pytest.fixture(scope="module")
def dense(arrays):
    """(loss, dE, dC) in float64, by the definition."""
    e, c, labels = arrays[0].astype(float), arrays[1].astype(float), arrays[2]
    z = e @ c.T
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    loss = -np.log(p[np.arange(TOKENS), labels]).mean()
    p[np.arange(TOKENS), labels] -= 1
    return loss, p @ c / TOKENS, p.T @ e / TOKENS


@pytest.fixture(scope="module")
def want(arrays):
    return reference.compute(*arrays)


def result_of(dense, want, **changes):
    """What a worker returns; a change of None leaves an array out."""
    loss, d_e, d_c = dense
    arrays = {"loss": loss, "d_e": d_e.astype("f4"), "d_c": d_c[want.vocab_rows].astype("f4"), **changes}
    return {"seconds": [2.0, 1.0, 3.0], "seconds_median": 2.0, "extra_bytes": 2**20,
            "arrays": {name: array for name, array in arrays.items() if array is not None}}


SHAPE = cases.Shape("test", TOKENS, VOCAB, HIDDEN)


# ---------------------------------------------------------------------------------------------------------- the check


def test_reference_is_the_definition(dense, want):
    assert want.loss == pytest.approx(dense[0], rel=1e-12)
    np.testing.assert_allclose(want.d_e, dense[1][want.rows], rtol=1e-10, atol=1e-14)
    np.testing.assert_allclose(want.d_c, dense[2][want.vocab_rows], rtol=1e-10, atol=1e-16)


def test_sample_has_labels_and_other_words(arrays, want):
    labels = set(arrays[2].tolist())
    assert len(want.rows) == reference.SAMPLED
    assert {v in labels for v in want.vocab_rows.tolist()} == {True, False}


def test_reference_survives_its_file(want, tmp_path):
    want.save(tmp_path / "r.npz")
    again = reference.Reference.load(tmp_path / "r.npz")
    assert again.loss == want.loss and again.norms == want.norms
    np.testing.assert_array_equal(again.d_c, want.d_c)


def test_right_results_are_right(dense, want):
    assert runner.judge(result_of(dense, want), want, SHAPE, "f32", EXACT)["status"] == "ok"


@pytest.mark.parametrize(
    "name, change",
    [
        ("loss", lambda x: x * 1.001),
        ("loss", lambda x: np.float64("nan")),
        ("d_e", lambda x: x * np.float32(1.01)),
        ("d_e", lambda x: x * np.where(np.arange(TOKENS) == 0, 3, 1)[:, None]),  # one row in 64
        ("d_e", np.zeros_like),
        ("d_c", lambda x: -x),
        ("d_c", lambda x: x * np.float32("nan")),
    ],
)
def test_wrong_results_are_wrong_and_have_no_speed(dense, want, name, change):
    right = result_of(dense, want)
    judged = runner.judge(result_of(dense, want, **{name: change(right["arrays"][name])}), want, SHAPE, "f32", EXACT)
    assert judged["status"] == "wrong"
    assert any(text.startswith(name) for text in judged["wrong"])
    cells = report.row({**point("x"), **judged}, None)
    assert cells[1].startswith("wrong: ") and cells[2:6] == ("",) * 4 and cells[-1] == ""


def test_bf16_sums_in_bf16_are_wrong(dense, want):
    """What PyTorch 2.13 gives by itself on CPU for bf16: a loss off by 15 %."""
    peer = cases.PEERS["torch-auto"][0]
    off = {factor: result_of(dense, want, loss=dense[0] * factor) for factor in (1 + 2**-9, 0.85)}
    # A peer may round its logits and its loss to bf16; ours is not to, whatever the inputs.
    assert runner.judge(dict(off[1 + 2**-9]), want, SHAPE, "bf16", peer)["status"] == "ok"
    assert runner.judge(dict(off[1 + 2**-9]), want, SHAPE, "bf16", EXACT)["status"] == "wrong"
    assert runner.judge(off[0.85], want, SHAPE, "bf16", peer)["status"] == "wrong"


def test_the_loss_alone_needs_no_gradients(dense, want):
    alone = runner.judge(result_of(dense, want, d_e=None, d_c=None), want, SHAPE, "f32", EXACT)
    assert alone["status"] == "ok" and list(alone["errors"]) == ["loss"]


def test_a_filter_beyond_its_error_is_coarse(dense, want):
    way = cases.MODES["unbiased"][0]
    off = {error: result_of(dense, want, d_e=(dense[1] * (1 + error)).astype("f4")) for error in (9e-4, 2e-3, 1.0)}
    assert [runner.judge(off[error], want, SHAPE, "f32", way)["status"] for error in off] == ["ok", "coarse", "wrong"]
    wrong_loss = result_of(dense, want, loss=dense[0] * 1.001)
    assert runner.judge(wrong_loss, want, SHAPE, "f32", way)["status"] == "wrong", "a filter does not touch the loss"
    nothing = result_of(dense, want, d_e=dense[1] * np.nan)
    assert runner.judge(nothing, want, SHAPE, "f32", way)["status"] == "wrong"


@pytest.fixture(scope="module")
def job(arrays, want, tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    for name, array in zip(("e", "c", "labels"), arrays):
        np.save(folder / f"{name}.npy", array)
    paths = {name: str(folder / f"{name}.npy") for name in ("e", "c", "labels")}
    return {"impl": "cutloss", "options": {"mode": "auto"}, "dtype": "f32", "threads": 1, "reps": 2, "least_reps": 1,
            "most_seconds": 60, "vocab_rows": want.vocab_rows.tolist(), **paths}


@pytest.mark.parametrize("head, modes, names", [("loss", ["loss"], ["loss"]), ("frozen", ["stream"], ["loss", "d_e"]),
                                                ("trainable", ["chunk", "recompute"], ["loss", "d_e", "d_c"])])
def test_a_worker_measures_and_is_right(job, want, head, modes, names):
    result = runner.run_worker(Path(sys.executable), {**job, "head": head}, 300)
    result = runner.judge(result, want, SHAPE, "f32", EXACT)
    assert result["status"] == "ok", result
    assert len(result["seconds"]) == 2 and result["mode"] in modes and list(result["errors"]) == names


def test_a_worker_that_fails_says_why(job, tmp_path):
    job = {**job, "head": "frozen"}
    failed = runner.run_worker(Path(sys.executable), {**job, "options": {"mode": "fastest"}}, 300)
    assert failed["status"] == "failed" and "fastest" in failed["reason"]
    assert "none" in runner.run_worker(tmp_path / "none", job, 100)["reason"]
    assert "more than 0 s" in runner.run_worker(Path(sys.executable), job, 0.01)["reason"]


def test_the_reference_s_file_is_what_was_computed(job, want):
    paths = {name: Path(job[name]) for name in ("e", "c", "labels")}
    np.testing.assert_array_equal(inputs.reference_of(paths, "f32").d_e, want.d_e)


# ------------------------------------------------------------------------------------------------ what is not measured


def test_what_does_not_fit_is_refused(tmp_path):
    meminfo, cgroup = tmp_path / "meminfo", tmp_path / "cgroup"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:    3145728 kB\n")
    assert memory.available(meminfo, cgroup) == 3 << 30
    cgroup.mkdir()
    (cgroup / "memory.current").write_text(f"{3 << 29}\n")
    (cgroup / "memory.stat").write_text(f"anon 7\ninactive_file {1 << 29}\n")
    for limit, left in (("max", 3 << 30), (str(2 << 30), 1 << 30), (str(1 << 20), 0)):
        (cgroup / "memory.max").write_text(limit + "\n")
        assert memory.available(meminfo, cgroup) == left, limit
    huge = cases.Shape("huge", 10**6, 10**6, 64)
    assert "GiB" in memory.refusal(huge, "f32", "frozen", cases.PEERS["torch-dense"][0])
    assert memory.refusal(cases.QUICK, "f32", "frozen", EXACT) is None


@pytest.mark.parametrize("way", [way for ways in (*cases.PEERS.values(), *cases.MODES.values()) for way in ways],
                         ids=lambda way: way.name)
def test_every_way_has_a_size(way):
    """The dense loss at the real head took 6.2 GB beside 0.7 GB of inputs; nothing else comes near."""
    sizes = [memory.needed(cases.SHAPES["gemma3-270m-real"], "f32", head, way) for head in cases.HEADS]
    assert sizes == sorted(sizes)
    dense = "dense" in way.name
    assert (7e9 if dense else 1e9) < sizes[1] < (1e10 if dense else 7e9)


def test_missing_peers_are_named_once_and_left_out(tmp_path, capsys):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')  # the standard library alone
    python.chmod(0o755)
    assert runner.missing_packages(python, ["torch-dense", "torch-loop"]) == {"torch": ["torch-dense", "torch-loop"]}
    assert list(runner.missing_packages(tmp_path / "none", list(cases.PEERS))) == ["jax_cce", "optax", "torch"]
    options = bench.parser().parse_args(["--peer-python", str(python)])
    note = bench.leave_out_missing(options)
    assert options.peers == [] and "make bench-peers" in note and "cutloss[peers]" in note


# ---------------------------------------------------------------------------------------------------------- the table


def point(name, seconds=1.0, *, ours=False, family=None, status="ok", commit="c1", **more):
    return {"shape": "s", "n": 1, "v": 2, "d": 3, "dtype": "f32", "head": "frozen", "threads": 2, "name": name,
            "family": family or name, "options": {}, "ours": ours, "commit": commit, "worker": "w1",
            "status": status, "seconds": [seconds], "seconds_median": seconds, "extra_bytes": 3 * 2**20,
            "errors": {"d_e": 1e-6},
            "wrong": [], "flops": 5e9, "peak_gflops": 10, "reason": "no reason", **more}


def test_ratio_is_to_the_fastest_right_peer():
    points = [point("cutloss", 2.0, ours=True), point("wrong one", 0.1, status="wrong", wrong=["loss off by 1"]),
              point("slow", 8.0), point("fast", 3.0), point("broken", status="failed")]
    (section,) = report.sections({"points": points})
    rows = section.rows
    assert [row[0] for row in rows] == ["cutloss", "fast", "slow", "wrong one", "broken"]
    assert [row[-1] for row in rows] == ["1.50 x", "1.00 x", "0.38 x", "", ""]
    assert rows[0][3:7] == ("2", "25 %", "", "3")
    assert "0.1" not in rows[3][1]
    text = report.text_table(rows)
    assert "wrong: loss off by 1" in text and "failed: no reason" in text
    assert report.markdown_table(rows).count("\n") == len(rows) + 1


def test_a_family_is_its_fastest_right_member():
    points = [point("a 1", 1.0, family="a", status="wrong"), point("a 2", 3.0, family="a"),
              point("a 3", 2.0, family="a")]
    assert [p["name"] for p in report.chosen(points)] == ["a 3"]


def test_coarse_filters_have_a_speed_and_no_ratio():
    points = [point("cutloss loss", 2.0, ours=True, head="loss"), point("cutloss", 1.0, ours=True, status="coarse"),
              point("peer", 4.0)]
    _, section = report.sections({"points": points})
    assert section.rows[0][5] == "0.50" and section.rows[0][-1] == "coarse"
    assert section.rows[1][5] == "2.00", "u is the time of our loss alone"


def test_quartiles():
    assert report.quartiles([1, 2, 3, 4, 5]) == (2, 4)
    assert report.quartiles([7]) == (7, 7)


def test_pictures_need_no_right_peer(tmp_path):
    pytest.importorskip("matplotlib")
    data = {"machine": MACHINE, "points": [point("cutloss", ours=True), point("x", status="failed", extra_bytes=None)]}
    assert [path.name for path in report.plot(data, tmp_path)] == ["s.png"]
    assert (tmp_path / "s.png").stat().st_size > 1000


def test_rows_can_be_told_apart():
    real = cases.SHAPES["gemma3-270m-real"]
    ways = cases.variants(real, list(cases.MODES), list(cases.PEERS))
    assert len({way.name for way in ways}) == len(ways)
    assert len({(way.impl, json.dumps(way.options)) for way in ways}) == len(ways)
    quick = [way.name for way in cases.one_of_each(ways)]
    assert "cutloss certified 2^-20" in quick and "cutloss unbiased 2^-14" in quick
    assert len(quick) == 5 + 2 + len(cases.PEERS)
    flat = cases.variants(cases.QUICK, list(cases.MODES), [])
    assert sum(way.error is not None for way in flat) == 2
    for head in cases.HEADS:
        assert sum(way.ours and head in way.heads for way in ways) >= 1


# ------------------------------------------------------------------------------------------------- the file of results


def test_finished_points_are_not_repeated(tmp_path):
    results = store.Store(tmp_path / "r.json", MACHINE)
    results.add(point("cutloss", ours=True))
    results.add(point("peer"))
    results.add(point("broken", status="failed"))
    again = store.Store(tmp_path / "r.json", MACHINE)
    assert again.find(point("cutloss", ours=True)) and again.find(point("peer"))
    assert not again.find(point("broken")), "what failed is tried again"
    assert not again.find({**point("peer"), "dtype": "bf16"})
    assert not again.find({**point("peer"), "options": {"chunk": 1}})
    assert not again.find({**point("peer"), "worker": "w2"}), "measured in another way"
    # Another commit changes ours and not the peers.
    assert not again.find(point("cutloss", ours=True, commit="c2")) and again.find(point("peer", commit="c2"))
    again.add(point("cutloss", 9.0, ours=True, commit="c2"))
    assert [p["commit"] for p in again.points if p["ours"]] == ["c2"]
    assert [f.name for f in tmp_path.iterdir()] == ["r.json"], "a temporary file stayed"


def test_foreign_and_broken_files_are_refused(tmp_path):
    path = tmp_path / "r.json"
    store.Store(path, MACHINE).add(point("peer"))
    with pytest.raises(store.ForeignResults, match="Test CPU.*Other CPU.*--out"):
        store.Store(path, {**MACHINE, "cpu": "Other CPU"})
    whole = path.read_text()
    for bad in ("", "[]", "7", whole[: len(whole) // 2], json.dumps({**json.loads(whole), "format": 2})):
        path.write_text(bad)
        with pytest.raises(store.ForeignResults):
            store.Store(path, MACHINE)


# ------------------------------------------------------------------------------------------------------------ the page

PAGE = Path(__file__).parents[3] / "docs" / "benchmarks.md"


def test_the_page_is_made_from_the_kept_results(tmp_path):
    files = {f"docs/bench/{f.name}": store.read(f) for f in sorted((PAGE.parent / "bench").glob("*.json"))}
    page = PAGE.read_text()
    assert report.render(page, files) == page, "run python -m cutloss.bench --render docs/benchmarks.md"


def test_render_replaces_only_the_tables(tmp_path):
    page = tmp_path / "docs" / "page.md"
    (page.parent / "bench").mkdir(parents=True)
    page.write_text("before\n<!-- tables: begin -->\nold\n<!-- tables: end -->\nafter\n")
    store.Store(page.parent / "bench" / "cpu.json", MACHINE).add(point("cutloss", ours=True))
    assert bench.main(["--render", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert "| cutloss | 1.000 |" in text and "docs/bench/cpu.json" in text and "Test CPU" in text
    with pytest.raises(ValueError, match="tables: begin"):
        report.render("no place", {})


def test_bad_usage(capsys):
    for arguments in (["--shapes", "gpt9"], ["--peers", "torch"], ["--reps", "0"], ["--modes", "fast"],
                      ["--timeout", "nan"], ["--heads", "none"]):
        with pytest.raises(SystemExit) as stop:
            bench.main(arguments)
        assert stop.value.code == 2
    assert "gpt9" in capsys.readouterr().err


def test_flops_are_the_dense_loss_s():
    shape = dataclasses.replace(SHAPE, n=2, v=3, d=5)
    assert [shape.flops(head) for head in cases.HEADS] == [60, 120, 180]


def test_all_of_it_and_it_goes_on_where_it_was(tmp_path, capsys):
    """One tiny run of the command; the second measures only what is new."""
    arguments = ["--quick", "--peers", "", "--n", "32", "--heads", "loss", "--reps", "1", "--work", str(tmp_path),
                 "--json"]
    assert bench.main(arguments) == 0
    first = json.loads(capsys.readouterr().out)
    assert [p["status"] for p in first["points"]] == ["ok"]
    (point,) = first["points"]
    assert point["mode"] == "loss" and point["peak_gflops"] > 0 and point["n"] == 32 and first["machine"]["cpu"]
    assert bench.main([*arguments[:-1], "--modes", "loss,stream", "--heads", "loss,frozen"]) == 0
    captured = capsys.readouterr()
    assert "[1/1] quick, f32, frozen, cutloss stream" in captured.err and "cutloss stream " in captured.out
    again = json.loads((tmp_path / "quick.json").read_text())
    assert again["points"][0] == point and len(again["points"]) == 2
