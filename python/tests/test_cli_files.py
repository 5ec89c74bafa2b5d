"""The files of cutloss loss: one is not written over another, however they are spelt, and numbers of any type are read."""

import os

import numpy as np
import pytest
from objective import dense, near
from tool import BAD_USAGE, inputs, needs_tool, refused, run, run_json

pytestmark = needs_tool


@pytest.mark.parametrize("other", ["a.npy", "./a.npy", "sub/../a.npy", "sub/link/a.npy", "link.npy", "{here}/a.npy"])
@pytest.mark.parametrize("there", [False, True], ids=["new", "old"])
def test_two_results_become_one_file(data, other, there):
    folder, _ = data
    (folder / "sub").mkdir()
    (folder / "sub" / "link").symlink_to(folder)
    (folder / "link.npy").symlink_to("a.npy")  # leads to nothing unless `there`
    if there:
        (folder / "a.npy").write_text("old")
    said = refused(BAD_USAGE, "loss", *inputs(folder), "--nll", "a.npy", "--lse", other.format(here=folder), cwd=folder)
    assert "--nll and --lse name the same file" in said
    assert (folder / "a.npy").exists() == there and (not there or (folder / "a.npy").read_text() == "old")


def test_a_result_is_written_over_an_input_through_a_link(data):
    folder, arrays = data
    os.link(folder / "e.npy", folder / "hard.npy")
    (folder / "soft.npy").symlink_to("c.npy")
    os.link(folder / "hard.npy", folder / "hard2.npy")
    for words, line in [
        (["--e and --d-e name the same file"], ["--d-e", folder / "hard.npy"]),
        (["--c and --out-rank name the same file"], ["--out-rank", folder / "soft.npy"]),
        (["--labels and --nll name the same file"], ["--nll", f"{folder}/../{folder.name}/labels.npy"]),
    ]:
        refused(BAD_USAGE, "loss", *inputs(folder), *line, words=words)
    (folder / "copy.npy").write_bytes((folder / "e.npy").read_bytes())
    refused(BAD_USAGE, "loss", *inputs(folder, e=folder / "copy.npy"), "--nll", folder / "hard.npy", "--lse",
            folder / "hard2.npy", words=["--nll and --lse name the same file"])
    np.testing.assert_array_equal(np.load(folder / "e.npy"), arrays["e"])
    # Other files are not taken for the same.
    assert run("loss", *inputs(folder), "--nll", folder / "x.npy", "--lse", folder / "X.npy").returncode == 0


@pytest.mark.parametrize("dtype", [np.float64, np.bool_, np.int16])
def test_numbers_of_another_type_are_refused_or_misread(data, dtype):
    folder, arrays = data
    rng = np.random.default_rng(1)
    of_token, of_id = (rng.integers(0, 2, n).astype(dtype) for n in (37, 101))
    np.save(folder / "t.npy", of_token)
    np.save(folder / "w.npy", of_id)
    got = run_json("loss", *inputs(folder), "--token-weights", folder / "t.npy", "--class-weights", folder / "w.npy")
    want = dense(arrays["e"], arrays["c"], arrays["labels"], token_weights=of_token, class_weights=of_id)
    near("loss", got["loss"], want["loss"], want["tol"]["loss"])
    line = ["loss", *inputs(folder), "--lse-cotangent", folder / "t.npy"]
    if dtype is np.bool_:  # a truth value makes sense as a mask only, as in Python
        refused(BAD_USAGE, *line, words=["--lse-cotangent is bool; real numbers are wanted"])
    else:
        run_json(*line)


def test_float64_weights_lose_their_size(data):
    folder, arrays = data
    weights = np.full(37, 1e-3) + np.arange(37) / 7
    np.save(folder / "t.npy", np.asfortranarray(weights))
    got = run_json("loss", *inputs(folder), "--token-weights", folder / "t.npy", "--reduction", "sum")
    want = dense(arrays["e"], arrays["c"], arrays["labels"], token_weights=weights, reduction="sum")
    near("loss", got["loss"], want["loss"], want["tol"]["loss"])


@pytest.mark.parametrize("option", ["labels", "vocab-order"])
@pytest.mark.parametrize("dtype", [np.float64, np.bool_])
def test_ids_that_are_no_integers_are_taken(data, option, dtype):
    folder, _ = data
    np.save(folder / "ids.npy", np.zeros(37 if option == "labels" else 101, dtype))
    said = refused(BAD_USAGE, "loss", *inputs(folder), f"--{option}", folder / "ids.npy") if option != "labels" else \
        refused(BAD_USAGE, "loss", *inputs(folder, labels=folder / "ids.npy"))
    assert f"{option.replace('-', '_')} are {np.dtype(dtype).name}; they must be integers" in said
