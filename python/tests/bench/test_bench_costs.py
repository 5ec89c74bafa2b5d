"""The cost model beside measured runs: `python -m cutloss.bench.costs`."""

import json
from pathlib import Path

import pytest
from tool import needs_tool, run_json

from cutloss import _pages
from cutloss.bench import costs, store

ROOT = Path(__file__).resolve().parents[3]
PAGE, RESULTS = ROOT / "docs" / "cost-model.md", ROOT / "docs" / "bench" / "epyc-avx2.json"

pytestmark = needs_tool


def point(**other):
    return {"shape": "a", "n": 512, "v": 32768, "d": 640, "dtype": "f32", "head": "frozen", "threads": 2, "mode": "sparse",
            "name": "cutloss certified 2^-20", "options": {"filter": "certified", "epsilon": 2.0**-20}, "ours": True,
            "status": "ok", "peak_gflops": 100.0, "seconds_median": 1.0,
            "filter_report": {"rows": 512, "rows_redone": 128, "kept_entries": 384 * 32768 * 0.25}, **other}  # fmt: skip


@pytest.fixture(scope="module")
def target():
    return run_json("info")["target"]


def test_the_prediction_is_of_another_mode_peak_or_share(target, tmp_path):
    machine = costs.Machine(2e10, 2.0**25)
    box = tmp_path / "box"
    box.write_text("name = box\nf32_flops = 1e11\nbandwidth = 2e10\ncache_bytes = 33554432\nthreads = 2\n")
    table = run_json("plan", "--costs", "--machine", box, "--n", 512, "--v", 32768, "--d", 640, "--filter", "certified",
                     "--epsilon", 2.0**-20, "--kept-share", 0.25, "--redone-share", 0.25,
                     env={"CUTLOSS_TUNING_FILE": "none"})  # fmt: skip
    wanted = {row["d_c"]: row["seconds"] for row in table["rows"]}
    assert costs.predict(point(), machine, target) == pytest.approx(wanted[False], rel=1e-12)
    assert costs.predict(point(head="trainable"), machine, target) == pytest.approx(wanted[True], rel=1e-12)
    fast = costs.predict(point(peak_gflops=200.0), costs.Machine(4e10, 2.0**25), target)
    assert fast == pytest.approx(wanted[False] / 2, rel=1e-12)
    loss = point(head="loss", mode="loss", options={"mode": "loss"}, filter_report=None)
    assert 2 * 512 * 32768 * 640 / 1e11 < costs.predict(loss, machine, target) < wanted[False]


def test_what_is_not_ours_or_not_timed_is_counted(target):
    data = {"machine": {"target": target}, "points": [
        point(), point(status="coarse"), point(status="wrong"), point(ours=False)]}  # fmt: skip
    machine = costs.Machine(2e10, 2.0**25)
    predicted = costs.predict(point(), machine, target)
    data["points"][0]["seconds_median"] = 1.19 * predicted
    data["points"][1]["seconds_median"] = 0.79 * predicted
    found = costs.checks(data, machine)
    assert [round(check.ratio, 2) for check in found] == [1.19, 0.79]
    text = costs.tables(found)
    assert text.startswith("Of these 2 runs 1 are within 20 %")
    assert text.count("| certified 2^-20 | 25 % | 100 |") == 2


def test_the_page_has_other_numbers_than_its_command_gives(target, tmp_path, capsys):
    if not PAGE.exists():
        pytest.skip("the documentation is not here")
    command = next(line.split() for line in PAGE.read_text().splitlines() if "cutloss.bench.costs" in line)
    if store.read(RESULTS)["machine"]["target"] not in run_json("info")["targets"]:
        pytest.skip("this machine has not the kernels of the one that was measured")
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text())
    options = [str(ROOT / word) if word.startswith("docs/bench") else word for word in command[3:-1]]
    assert costs.main([*options, str(page)]) == 0, capsys.readouterr().err
    assert page.read_text() == PAGE.read_text(), " ".join(command)


def test_wrong_files_are_named(tmp_path, capsys):
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps({"format": 99}))
    options = ["--bandwidth", "2e10", "--cache", "32MiB"]
    assert costs.main([str(bad), *options]) == 2
    assert "bad.json" in capsys.readouterr().err
    if RESULTS.exists():
        (tmp_path / "page.md").write_text("no place")
        data = json.loads(RESULTS.read_text())
        data["points"] = []
        bad.write_text(json.dumps(data))
        assert costs.main([str(bad), *options, "--render", str(tmp_path / "page.md")]) == 2
        assert _pages.marks("check")[0] in capsys.readouterr().err
