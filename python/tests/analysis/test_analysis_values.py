"""`cutloss.analysis.analyze` against the whole N x V matrix in float64."""

import contextlib
import json
import math
import os
import pty
import subprocess

import ml_dtypes
import numpy as np
import pytest
from tool import BAD_USAGE, TOOL, needs_tool, refused, run

from cutloss.analysis import AnalysisError, analyze

pytestmark = needs_tool

N, V, D = 45, 333, 21
EXPONENTS = [4, 8, 12]
SMALL = {"tile": "16x50", "exponents": "4,8,12", "threads": 2}
FINE = {"tile": "4x10", "exponents": "2,4,6", "what": ["shares"]}  # some tiles are kept, some are not


def arrays(seed, dtype=np.float32):
    """Multiples of 1/8 below 2: every dot product is exact in f32, and both sides see the same logits."""
    rng = np.random.default_rng(seed)
    e = (rng.integers(-9, 10, (N, D)) / 8).astype(dtype)
    c = (rng.integers(-8, 9, (V, D)) / 8).astype(dtype)
    return e, c, rng.integers(0, V, N)


def dense(e, c, labels, softcap=None, scale=1.0):
    """(p, G, slope), [N, V] each."""
    z = scale * e.astype(np.float64) @ c.astype(np.float64).T
    slope = np.full_like(z, scale)
    if softcap:
        z = softcap * np.tanh(z / softcap)
        slope = scale * (1 - (z / softcap) ** 2)
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    g = p.copy()
    g[np.arange(len(labels)), labels] -= 1
    return p, g, slope


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("softcap", [None, 6.0])
def test_shares_mass_and_errors_are_those_of_the_dense_matrix(dtype, softcap):
    e, c, labels = arrays(1, dtype)
    result = analyze(e, c, labels, softcap=softcap, logit_scale=0.75, what=["mass", "shares", "d_e", "d_c"], **SMALL)
    p, g, slope = dense(e, c, labels, softcap, 0.75)
    is_label = np.arange(V) == labels[:, None]
    assert result["nll"] == pytest.approx(-np.log(p[is_label]).mean(), rel=1e-12)
    drop = next(errors for errors in result["errors"] if errors["method"] == "drop")
    full = {"d_e": (g * slope) @ c.astype(np.float64), "d_c": (g * slope).T @ e.astype(np.float64)}
    for j, k in enumerate(EXPONENTS):
        reaches = np.abs(g) >= 2.0**-k
        assert result["entries"][0]["share"][j] == pytest.approx(reaches.mean(), abs=1e-12)
        assert result["entries"][0]["rows"][j] == pytest.approx(reaches.any(0).mean(), abs=1e-12)
        dropped = (p < 2.0**-k) & ~is_label
        assert result["mass"]["mass_below_mean"][j] == pytest.approx((p * dropped).sum(1).mean(), abs=1e-12)
        lost = np.where(dropped, g * slope, 0)
        for gradient, error in (("d_e", lost @ c.astype(np.float64)), ("d_c", lost.T @ e.astype(np.float64))):
            exact = np.linalg.norm(error) / np.linalg.norm(full[gradient])
            assert drop[gradient][j]["relative"] == pytest.approx(exact, rel=1e-9, abs=1e-15)


def test_a_given_order_and_the_same_vocabulary_renamed_agree():
    e, c, labels = arrays(2)
    order = np.random.default_rng(3).permutation(V)
    given = analyze(e, c, labels, orders=["given"], order=order, **FINE)
    place = np.argsort(order)
    renamed = analyze(e, c[order], place[labels], orders=["natural"], **FINE)
    natural = analyze(e, c, labels, orders=["natural"], **FINE)
    assert given["tiles"][0]["share"] == renamed["tiles"][0]["share"] != natural["tiles"][0]["share"]
    assert given["entries"] == renamed["entries"] == natural["entries"]


def test_the_frequency_order_takes_given_counts():
    e, c, labels = arrays(4)
    counts = np.random.default_rng(5).permutation(V)
    by_counts = analyze(e, c, labels, orders=["frequency"], counts=counts, **FINE)
    order = np.argsort(-counts)
    given = analyze(e, c, labels, orders=["given", "natural"], order=order, **FINE)
    assert by_counts["tiles"][0]["share"] == given["tiles"][0]["share"] != given["tiles"][1]["share"]


def test_the_transposed_layout_is_the_same_head():
    e, c, labels = arrays(6)
    plain = analyze(e, c, labels, what=["d_e"], **SMALL)
    turned = analyze(e, np.ascontiguousarray(c.T), labels, head_layout="dv", what=["d_e"], **SMALL)
    assert plain["errors"] == turned["errors"]


def test_a_temperature_is_a_scale_of_the_logits():
    e, c, labels = arrays(7)
    hot = analyze(e, c, labels, temperatures=[0.5], what=["temperature"], **SMALL)
    scaled = analyze(e, c, labels, logit_scale=2.0, what=["shares"], **SMALL)
    assert [entry["temperature"] for entry in hot["entries"]] == [1, 0.5]
    assert hot["entries"][1]["share"] == scaled["entries"][0]["share"]


def test_sections_are_only_those_asked_for():
    result = analyze(*arrays(8), what=["mass"], **SMALL)
    assert set(result) == {"settings", "nll", "mass"}
    everything = analyze(*arrays(8), tolerances=[1e-2], **SMALL)
    assert {"entries", "tiles", "errors", "variants", "tolerances", "maps"} <= set(everything)
    assert np.shape(everything["maps"][0]["log2_largest"]) == (math.ceil(N / 16), math.ceil(V / 50))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"what": ["masses"]}, ["--what", "masses", "mass, shares"]),
        ({"tile": "128"}, ["--tile", "128", "TOKENSxIDS"]),
        ({"tile": "0x8"}, ["tile_tokens is 0", "[1, 4096]"]),
        ({"exponents": "12,8"}, ["exponents must rise", "8 after 12"]),
        ({"exponents": "0:70"}, ["--exponents", "[1, 60]"]),
        ({"orders": ["given"]}, ["--orders given needs --order FILE"]),
        ({"orders": ["up"]}, ["--orders", "up", "natural, sorted"]),
        ({"counts": [1, 2]}, ["--counts", f"[{V}]", "[2]"]),
        ({"order": np.zeros(V, int)}, ["order", "0"]),
        ({"temperatures": [-1]}, ["temperatures has -1"]),
        ({"tolerances": [2]}, ["tolerances has 2", "(0, 1)"]),
        ({"sample_tokens": -1}, ["sample_tokens is -1"]),
    ],
)
def test_a_wrong_option_is_named_with_its_limit(change, words):
    with pytest.raises(AnalysisError) as error:
        analyze(*arrays(9), **{**SMALL, **change})
    for word in words:
        assert word in str(error.value)


def test_wrong_arrays_are_named():
    e, c, labels = arrays(10)
    with pytest.raises(AnalysisError, match="hidden is float64; it must be float32"):
        analyze(e.astype(np.float64), c, labels)
    with pytest.raises(AnalysisError, match=r"labels\[2\] is 333, outside \[0, 333\)"):
        analyze(e, c, np.where(np.arange(N) == 2, V, labels))
    e[3, 0] = np.inf
    with pytest.raises(AnalysisError, match="logits of row 3 are not finite"):
        analyze(e, c, labels)
    with pytest.raises(AnalysisError, match="nowhere.npy: No such file"):
        analyze("nowhere.npy", c, labels)


def test_the_tool_prints_tables_and_writes_json(tmp_path):
    for name, array in zip(("e", "c", "y"), arrays(11), strict=True):
        np.save(tmp_path / f"{name}.npy", array)
    files = [part for option, name in (("--hidden", "e"), ("--table", "c"), ("--labels", "y"))
             for part in (option, tmp_path / f"{name}.npy")]  # fmt: skip
    shown = run("analyze", *files, "--sample-tokens", 40)
    assert shown.returncode == 0, shown.stderr
    assert shown.stderr == ""  # progress is for terminals
    for words in ("40 of 45: a sample", "Softmax mass by rank", "temperature 0.35", "Errors of dE", "Errors of dC",
                  "variants, emulated", "by tolerance"):  # fmt: skip
        assert words in shown.stdout
    printed = run("analyze", *files, "--what", "mass", "--json")
    done = run("analyze", *files, "--what", "mass", "--json", tmp_path / "out.json")
    assert (done.returncode, done.stdout) == (0, "")
    assert json.loads(printed.stdout) == json.loads((tmp_path / "out.json").read_text())
    refused(BAD_USAGE, "analyze", *files, "--json", tmp_path / "no" / "out.json", words=["--json", "No such file"])


def test_a_terminal_is_told_nothing_or_keeps_the_progress(tmp_path):
    for name, array in zip(("e", "c", "y"), arrays(12), strict=True):
        np.save(tmp_path / f"{name}.npy", array)
    ours, theirs = pty.openpty()
    files = ["--hidden", tmp_path / "e.npy", "--table", tmp_path / "c.npy", "--labels", tmp_path / "y.npy"]
    options = ["--tile", "16x50", "--what", "mass,d_e", "--json", tmp_path / "out.json"]
    done = subprocess.run([TOOL, "analyze", *files, *options], stderr=theirs, check=False)
    os.close(theirs)
    shown = ""  # some 20 short lines: less than a terminal holds before it is read
    with contextlib.suppress(OSError):  # how the end of a terminal is told
        while part := os.read(ours, 4096):
            shown += part.decode()
    os.close(ours)
    assert done.returncode == 0
    for stage in ("softmax", "shares", "errors of dE"):
        told = [float(part.split()[-1].rstrip("%")) for part in shown.split("\r\x1b[K") if part.startswith(stage)]
        assert told == [0, 33, 67, 100], (stage, shown)  # three tiles of tokens
    assert shown.endswith("\r\x1b[K"), "the line is left behind"
