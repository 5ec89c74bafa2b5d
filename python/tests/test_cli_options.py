"""cutloss loss with the options of the objective, its metrics and filters: each must reach the kernels."""

import numpy as np
import pytest
from objective import dense, metrics_of, near
from tool import BAD_USAGE, inputs, needs_tool, refused, run, run_json

pytestmark = needs_tool


def objective_files(folder):
    """Arrays for every option that takes one, saved under the option's name."""
    rng = np.random.default_rng(5)
    arrays = {
        "bias": rng.normal(size=101).astype(np.float32),
        "token_weights": np.where(rng.random(37) < 0.2, 0, rng.random(37)).astype(np.float32),
        "class_weights": (rng.random(101) + 0.5).astype(np.float32),
        "lse_cotangent": rng.normal(size=37).astype(np.float32),
        "soft_ids": np.where(rng.random((37, 3)) < 0.2, -100, rng.integers(0, 101, (37, 3))),
        "soft_probabilities": rng.random((37, 3)).astype(np.float32) / 3,
        "vocab_order": rng.permutation(101),
    }
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return arrays


FILES = ("bias", "token_weights", "class_weights", "lse_cotangent")
NUMBERS = {"label_smoothing": 0.2, "z_loss": 0.03, "logit_scale": 0.6, "softcap": 3.0, "shift": 2, "denominator": 7.5,
           "cotangent": -1.5}


@pytest.mark.parametrize("names", [(n,) for n in (*FILES, *NUMBERS, "soft")] + [(*FILES, *NUMBERS), ("soft", "bias", "z_loss")],
                         ids="-".join)
def test_an_option_is_dropped_on_the_way(data, names):
    folder, arrays = data
    files = objective_files(folder)
    options, line = {}, inputs(folder)
    if "soft" in names:
        line = line[:4] + ["--soft-ids", folder / "soft_ids.npy", "--soft-probabilities", folder / "soft_probabilities.npy"]
        options["soft_targets"] = files["soft_ids"], files["soft_probabilities"]
    for name in names:
        if name in FILES:
            line += ["--" + name.replace("_", "-"), folder / f"{name}.npy"]
            options[name] = files[name]
        elif name in NUMBERS:
            line += ["--" + name.replace("_", "-"), NUMBERS[name]]
            options[name] = NUMBERS[name]
    results = ["d_e", "d_c", "nll", "lse"] + (["d_bias"] if "bias" in names else [])
    for name in results:
        line += ["--out-" + name.replace("_", "-"), folder / f"{name}.npy"]
    result = run_json("loss", *line)
    want = dense(arrays["e"], arrays["c"], None if "soft" in names else arrays["labels"], **options)
    near("loss", result["loss"], want["loss"], want["tol"]["loss"])
    assert result["valid_count"] == want["valid_count"]
    for name in results:
        near(name, np.load(folder / f"{name}.npy"), want[name], want["tol"][name] + 1e-30)


@pytest.mark.parametrize("wrt", [("c",), ("bias",), ("e", "bias"), ("c", "e")], ids=",".join)
def test_other_gradients_than_those_asked_for_are_computed(data, wrt):
    folder, arrays = data
    bias = objective_files(folder)["bias"]
    line = [*inputs(folder), "--bias", folder / "bias.npy", "--wrt", ",".join(wrt)]
    files = {name: folder / f"d_{name}.npy" for name in ("e", "c", "bias")}
    result = run_json("loss", *line, *(part for name in wrt for part in (f"--d-{name}", files[name])))
    want = dense(arrays["e"], arrays["c"], arrays["labels"], bias=bias)
    near("loss", result["loss"], want["loss"], want["tol"]["loss"])
    for name in wrt:
        near(f"d_{name}", np.load(files[name]), want[f"d_{name}"], want["tol"][f"d_{name}"] + 1e-30)
    for name in set(files) - set(wrt):
        refused(BAD_USAGE, "loss", *line, f"--d-{name}", files[name], words=[f"--d-{name}", f"--wrt without {name}"])
    modes = {run_json("loss", *line, "--mode", mode)["mode"] for mode in ("chunk", "recompute")}
    assert modes == {"chunk", "recompute"}, "the head's gradients are not computed"


def test_wrt_is_taken_beside_a_flag_that_says_otherwise(data):
    folder, _ = data
    for flag in ("--frozen", "--no-gradient"):
        refused(BAD_USAGE, "loss", *inputs(folder), "--wrt", "c", flag, words=["--wrt", flag])
    refused(BAD_USAGE, "loss", *inputs(folder), "--wrt", "w", words=["--wrt", "w", "bias"])
    refused(BAD_USAGE, "loss", *inputs(folder), "--wrt", "bias", words=["d_bias is wanted, but there is no bias"])
    refused(BAD_USAGE, "loss", *inputs(folder), "--wrt", "c", "--mode", "loss", words=["wanted of c it must be"])


def test_metrics_are_of_other_logits(data):
    folder, arrays = data
    objective_files(folder)
    files = {name: folder / f"out-{name}.npy" for name in (
        "entropy", "argmax", "correct", "rank", "top-k-ids", "top-k-logprobs", "mean-logits")}
    line = [part for name, path in files.items() for part in (f"--out-{name}", path)]
    result = run_json("loss", *inputs(folder), "--no-gradient", "--metrics", "entropy,correct,rank,top_k=4", *line)
    want = dense(arrays["e"], arrays["c"], arrays["labels"])
    m, on = metrics_of(want), want["counts"]
    got = {name: np.load(path) for name, path in files.items()}
    near("entropy", got["entropy"], m["entropy"], 10 * want["tol"]["lse"])
    for name in ("argmax", "correct", "rank"):
        np.testing.assert_array_equal(got[name], m[name], err_msg=name)
    assert got["correct"].dtype == np.bool_
    np.testing.assert_array_equal(got["top-k-ids"][on], m["order"][on, :4])
    assert got["top-k-logprobs"].shape == (37, 4)
    near("mean_logits", got["mean-logits"], m["mean_logits"], 1e-4)
    assert result["metrics"]["entropy"] == pytest.approx(m["entropy"].sum() / 36, rel=1e-5)
    assert result["metrics"]["correct"] == pytest.approx(m["correct"].sum() / 36)
    assert result["metrics"]["rank"] == pytest.approx(m["rank"][on].mean())
    assert "mean entropy" in run("loss", *inputs(folder), "--metrics", "entropy").stdout


@pytest.mark.parametrize("line", [
    ["certified", "--tolerance", 1e-2], ["certified", "--epsilon", 1e-3, "--vocab-order", "learned"],
    ["unbiased", "--tolerance", 1e-2, "--seed", 5], ["tile", "--epsilon", 1e-3]], ids=lambda line: f"{line[0]}{line[1]}")
def test_a_filter_is_not_used_or_not_reported(tmp_path, line):
    rng = np.random.default_rng(3)
    arrays = {"e": rng.normal(size=(40, 32)).astype(np.float32), "c": rng.normal(size=(2000, 32)).astype(np.float32),
              "labels": rng.integers(0, 2000, 40)}
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    result = run_json("loss", *inputs(tmp_path), "--filter", *line, "--d-e", tmp_path / "d_e.npy")
    want, report = dense(**arrays), result["filter_report"]
    assert result["loss"] == pytest.approx(want["loss"], rel=1e-5)
    assert result["filter"] == line[0] and result["mode"] == ("recompute" if line[0] == "tile" else "sparse")
    assert report["rows"] == 40 and report["rows_redone"] <= 40 and 0 < report["kept_entries"] <= 40 * 2000
    error = np.linalg.norm(np.load(tmp_path / "d_e.npy") - want["d_e"], axis=1).max()
    if line[0] == "certified":
        # Beside the certificate, float32's rounding of V + D terms of rows of C.
        slack = 2032 * 2**-24 * np.linalg.norm(arrays["c"], axis=1).max() / 40
        assert 1e-7 < error <= report["error_bound"] + slack and 0 < report["dropped_mass_mean"]
    assert line[0] in run("loss", *inputs(tmp_path), "--filter", *line).stdout
    assert "filter_report" not in run_json("loss", *inputs(tmp_path)), "no filter was asked for"


def test_a_vocabulary_order_is_lost(data):
    folder, arrays = data
    objective_files(folder)
    run_json("loss", *inputs(folder), "--vocab-order", "learned", "--out-vocab-order", folder / "order.npy")
    mean = arrays["c"].astype(np.float64) @ arrays["e"][arrays["labels"] != -100].mean(0)
    assert (np.diff(mean[np.load(folder / "order.npy")]) <= 1e-5).all()
    loss = run_json("loss", *inputs(folder))["loss"]
    for order in (folder / "order.npy", folder / "vocab_order.npy"):
        assert run_json("loss", *inputs(folder), "--vocab-order", order)["loss"] == pytest.approx(loss, rel=1e-6)


def test_float16_files(data):
    folder, arrays = data
    e, c = arrays["e"].astype(np.float16), arrays["c"].astype(np.float16)
    np.save(folder / "e.npy", e)
    np.save(folder / "c.npy", c)
    result = run_json("loss", *inputs(folder), "--d-e", folder / "d_e.npy", "--d-c", folder / "d_c.npy")
    want = dense(e, c, arrays["labels"])
    near("loss", result["loss"], want["loss"], want["tol"]["loss"])
    for name in ("d_e", "d_c"):
        got = np.load(folder / f"{name}.npy")
        assert got.dtype == np.float16
        near(name, got, want[name], want["tol"][name])


def test_accumulation_overwrites_or_adds_once_a_repetition(data):
    folder, arrays = data
    start = np.full((101, 19), 2, np.float32)
    np.save(folder / "start.npy", start)
    run_json("loss", *inputs(folder), "--reps", 3, "--accumulate-d-c", folder / "start.npy", "--d-c", folder / "d_c.npy")
    want = dense(arrays["e"], arrays["c"], arrays["labels"])
    near("d_c", np.load(folder / "d_c.npy"), 2 + want["d_c"], want["tol"]["d_c"] + 2**-22)
    np.save(folder / "start.npy", np.asfortranarray(start))
    refused(BAD_USAGE, "loss", *inputs(folder), "--accumulate-d-c", folder / "start.npy", words=["Fortran order"])
    np.save(folder / "start.npy", start[1:])
    refused(BAD_USAGE, "loss", *inputs(folder), "--accumulate-d-c", folder / "start.npy", words=["[101, 19]", "[100, 19]"])


def test_weights_of_other_types_are_misread(data):
    folder, arrays = data
    weights = np.arange(37) % 3
    for array in (weights.astype(np.int8), weights.astype(np.uint64), weights.astype(np.float16)):
        np.save(folder / "w.npy", array)
        got = run_json("loss", *inputs(folder), "--token-weights", folder / "w.npy")["loss"]
        want = dense(arrays["e"], arrays["c"], arrays["labels"], token_weights=weights)
        near("loss", got, want["loss"], want["tol"]["loss"])


def test_a_bad_option_is_accepted_or_misnamed(data):
    folder, _ = data
    objective_files(folder)
    loss = ["loss", *inputs(folder)]
    for words, line in [
        (["filter", "certified", "neither"], ["--filter", "certified"]),
        (["--filter", "dense", "unbiased"], ["--filter", "dense"]),
        (["epsilon is 2"], ["--filter", "tile", "--epsilon", 2]),
        (["label_smoothing is 1.5"], ["--label-smoothing", 1.5]),
        (["logit_scale is nan"], ["--logit-scale", "nan"]),
        (["softcap is inf"], ["--softcap", "inf"]),
        (["softcap is 1e+39, beyond float32"], ["--softcap", "1e39"]),
        (["shift is 38", "[0, 37]"], ["--shift", 38]),
        (["sequence is 5", "does not divide"], ["--shift", 1, "--sequence", 5]),
        (["denominator is -1"], ["--denominator", -1]),
        (["--metrics", "'perplexity'", "top_k=5"], ["--metrics", "entropy,perplexity"]),
        (["--metrics", "'top_k=0'"], ["--metrics", "top_k=0"]),
        (["--metrics", "'top_k=3' beside top_k=5"], ["--metrics", "top_k=5,top_k=3", "--out-top-k-ids", folder / "x.npy"]),
        (["top_k is 500"], ["--metrics", "top_k=500", "--out-top-k-ids", folder / "x.npy"]),
        (["--out-top-k-ids"], ["--metrics", "top_k=5"]),
        (["--metrics top_k=K"], ["--out-top-k-ids", folder / "x.npy"]),
        (["--out-mean-logits"], ["--metrics", "mean_logits"]),
        (["--bias", "[V] = [101]", "[37]"], ["--bias", folder / "token_weights.npy"]),
        (["--bias is int64"], ["--bias", folder / "vocab_order.npy"]),
        (["--reps", "'0' is no number of 1 or more"], ["--reps", 0]),
        (["--token-weights", "[N] = [37]", "[101]"], ["--token-weights", folder / "bias.npy"]),
        (["--class-weights", "No such file"], ["--class-weights", folder / "nothing.npy"]),
        (["go together"], ["--soft-ids", folder / "soft_ids.npy"]),
        (["--soft-probabilities", "[37, 3]", "[37]"],
         ["--soft-ids", folder / "soft_ids.npy", "--soft-probabilities", folder / "token_weights.npy"]),
        (["labels are given beside soft_targets"],
         ["--soft-ids", folder / "soft_ids.npy", "--soft-probabilities", folder / "soft_probabilities.npy"]),
        (["--soft-ids must be [N, K]"],
         ["--soft-ids", folder / "labels.npy", "--soft-probabilities", folder / "soft_probabilities.npy"]),
        (["--cotangent", "a number"], ["--cotangent", folder / "lse_cotangent.npy"]),
        (["--d-bias", "no --bias"], ["--d-bias", folder / "x.npy"]),
        (["--out-vocab-order needs"], ["--out-vocab-order", folder / "x.npy"]),
        (["--bias and --out-rank name the same file"],
         ["--bias", folder / "bias.npy", "--out-rank", folder / "bias.npy"]),
        (["--seed", "-1", "negative"], ["--seed", -1]),
    ]:
        refused(BAD_USAGE, *loss, *line, words=words)
        assert not (folder / "x.npy").exists()
    refused(BAD_USAGE, *loss[:5], words=["labels are not given, and neither are soft_targets"])
