"""cutloss plan --costs: the cost model as the tool shows it."""

import itertools
import re
from pathlib import Path

import pytest
from tool import BAD_USAGE, needs_tool, refused, run, run_json

pytestmark = needs_tool

GEMMA = ("--n", 8192, "--v", 256000, "--d", 2304, "--dtype", "bf16")
UNIT = 2 * 8192 * 256000 * 2304


def rows(*options):
    table = run_json("plan", "--costs", *options)
    return table, {(row["mode"], row["d_e"], row["d_c"], row["filter"]): row for row in table["rows"]}


@pytest.mark.parametrize("machine", ["v5e", "a100", "h100"])
def test_known_machines_and_units(machine):
    table, by = rows(*GEMMA, "--machine", machine)
    assert table["machine"]["name"] == machine
    assert not table["machine"]["measured_kernels"]
    units = {("loss", False, False): 1, ("stream", True, False): 2, ("chunk", True, True): 3,
             ("recompute", True, True): 4, ("dense", False, False): 1, ("dense", True, False): 2, ("dense", True, True): 3}
    for key, u in units.items():
        row = by[(*key, "none")]
        assert row["flops"] == u * UNIT
        assert row["seconds"] >= u * UNIT / table["machine"]["bf16_flops"] * (1 - 1e-12)
        assert row["seconds"] == pytest.approx(
            sum(max(s["compute_seconds"], s["memory_seconds"]) for s in row["stages"]), rel=1e-12)
        assert row["bytes"] == sum(s["bytes"] for s in row["stages"])
    # The dense loss moves each f32 logit (7.8 GiB of them) 7 times in all; we move the table and the gradients.
    assert by["dense", True, True, "none"]["bytes"] > 7 * 4 * 8192 * 256000 * 0.99
    assert by["recompute", True, True, "none"]["bytes"] < 20 * 256000 * 2304 * 2


def test_shares_are_what_filters_cost_by():
    def flops(filter_, mode, kept, redone=0):
        _, by = rows(*GEMMA, "--machine", "a100", "--kept-share", kept, "--redone-share", redone, "--filter", filter_,
                     "--epsilon", 1e-5)
        assert {key[3] for key in by} == {filter_}
        return by[mode, True, True, filter_]["flops"] / UNIT

    assert flops("tile", "recompute", 0) == pytest.approx(3)
    assert flops("tile", "recompute", 1) == pytest.approx(5)
    assert flops("unbiased", "sparse", 0.01) == pytest.approx(1.02)
    assert flops("certified", "sparse", 0.01, 0.5) == pytest.approx(1 - 0.5 * 0.97 + 0.01 + 1.5)


def test_described_machine(tmp_path):
    box = tmp_path / "box.txt"
    box.write_text("name = box\nf32_flops = 1e12\nbandwidth = 1e11\ncache_bytes = 3e7\n")
    table, by = rows("--n", 512, "--v", 32768, "--d", 640, "--machine", box)
    assert table["machine"]["name"] == "box"
    loss = by["loss", False, False, "none"]
    assert loss["bound"] == "compute"
    assert loss["seconds"] == pytest.approx(2 * 512 * 32768 * 640 / 1e12)
    box.write_text(box.read_text().replace("1e11", "1e8"))
    _, by = rows("--n", 512, "--v", 32768, "--d", 640, "--machine", box)
    assert by["loss", False, False, "none"]["bound"] == "memory"
    box.write_text(box.read_text() + "threads = 2\n")
    table, slower = rows("--n", 512, "--v", 32768, "--d", 640, "--machine", box)
    assert table["machine"]["measured_kernels"]
    for key, row in slower.items():
        # On a CPU a kept row is at hand as its tile passes by.
        assert row["seconds"] > by[key]["seconds"] * 0.999 or key[0] == "sparse", key
        assert ("plan" in row) == (row["mode"] != "dense")


def test_measures_this_machine_and_itself():
    table, by = rows("--n", 64, "--v", 1500, "--d", 32, "--logit-scale", 3, "--measure", "--reps", 1, "--filter", "unbiased",
                     "--epsilon", 0.01)
    assert table["machine"]["f32_flops"] > 1e8
    assert table["machine"]["bandwidth"] > 1e8
    assert set(by) == {("sparse", True, False, "unbiased"), ("sparse", True, True, "unbiased")}
    for row in by.values():
        assert row["measured_seconds"] > 0
        assert 64 / (64 * 1500) <= row["kept_share"] < 1  # labels at least
        assert row["redone_share"] == 0
    both = by["sparse", True, True, "unbiased"]
    assert both["flops"] == pytest.approx(2 * 64 * 1500 * 32 * (1 + 2 * both["kept_share"]))


def test_table_names_what_does_not_fit():
    result = run("plan", "--costs", *GEMMA, "--machine", "a100")
    assert result.returncode == 0
    assert "lower bound" in result.stdout
    assert "data sheet" in result.stdout
    small = run("plan", "--costs", "--n", 64, "--v", 5000, "--d", 32, "--budget", "300KB", "--mode", "chunk",
                "--measure")
    assert small.returncode == 0, small.stderr
    assert re.search(r"^no chunk: budget is 300000 bytes", small.stdout, re.MULTILINE)
    assert "measured / predicted" in small.stdout


def test_keep_rate_is_inferred_from_times_as_the_page_says():
    for times, share in (((46, 314, 100), 54 / 268), ((46, 314, 115), 69 / 268)):
        assert run_json("plan", "--infer-kept", *times)["kept_share"] == pytest.approx(share, rel=1e-12)
    assert run_json("plan", "--infer-kept", 46, 314, 100, "--kept-share", 0.49)["time"] == pytest.approx(177.32)
    printed = run("plan", "--infer-kept", 46, 314, 100, "--kept-share", 0.49).stdout
    page = Path(__file__).resolve().parents[2] / "docs" / "cost-model.md"
    if page.exists():
        for line in printed.strip().splitlines():
            assert line in page.read_text()


@pytest.mark.parametrize(("options", "words"), [
    (["--machine", "nowhere"], ["nowhere", "here, v5e, a100, h100"]),
    (["--machine", "a100", "--measure"], ["--measure", "a100"]),
    (["--n", "0"], ["--n 0", "at least 1"]),
    (["--d", "0"], ["hidden"]),
])
def test_refuses(options, words):
    refused(BAD_USAGE, "plan", "--costs", *options, words=words)


def test_refuses_shares_and_times_that_cannot_be():
    for option, value in itertools.product(("--kept-share", "--redone-share"), ("-0.1", "1.1", "nan")):
        result = run("plan", "--costs", "--machine", "a100", option, value)
        assert result.returncode == BAD_USAGE
        assert "[0, 1]" in result.stderr
    for times, word in (((46, 314, 40), "40"), ((46, 40, 41), "40"), ((0, 314, 100), "314"), ((46, 314, 400), "400")):
        assert word in refused(BAD_USAGE, "plan", "--infer-kept", *times)
