"""The command-line tool, end to end: results against numpy, files, errors and exit codes."""

import os
import resource
import shutil
import stat
import subprocess
import sys

import numpy as np
import pytest
from objective import dense
from tool import BAD_USAGE, NO_MEMORY, TOOL, UNAVAILABLE, inputs, needs_tool, refused, run, run_json

pytestmark = needs_tool


# ------------------------------------------------------------------------------------------------------ results


def test_loss_and_gradients(data):
    folder, arrays = data
    names = ("nll", "lse", "d-e", "d-c")
    outputs = [part for name in names for part in (f"--{name}", folder / f"{name}.npy")]
    result = run_json("loss", *inputs(folder), *outputs)
    want = dense(**arrays)
    assert result["loss"] == pytest.approx(want["nll"].sum() / 36, rel=1e-6)
    assert result["valid_count"] == 36
    assert (result["n"], result["v"], result["d"]) == (37, 101, 19)
    assert result["mode"] in ("chunk", "recompute")
    assert result["seconds"] > 0 and result["extra_bytes"] > 0
    for name in names:
        got, value = np.load(folder / f"{name}.npy"), want[name.replace("-", "_")]
        assert got.dtype == np.float32 and got.shape == value.shape
        np.testing.assert_allclose(got, value, rtol=1e-5, atol=1e-5, err_msg=name)
    assert not np.load(folder / "d-e.npy")[3].any()


@pytest.mark.parametrize("mode", ["chunk", "recompute"])
def test_mode_layout_softcap(data, mode):
    folder, arrays = data
    np.save(folder / "c.npy", arrays["c"].T.copy())
    result = run_json(
        *("loss", *inputs(folder), "--head-layout", "dv", "--softcap", 3, "--mode", mode),
        *("--d-c", folder / "d_c.npy", "--threads", 1, "--reps", 2),
    )
    want = dense(**arrays, softcap=3)
    assert result["mode"] == mode and result["threads"] == 1
    assert result["loss"] == pytest.approx(want["nll"].sum() / 36, rel=1e-6)
    np.testing.assert_allclose(np.load(folder / "d_c.npy"), want["d_c"].T, rtol=1e-5, atol=1e-5)


def test_fortran_order_is_the_same_array(data):
    folder, arrays = data
    plain = run_json("loss", *inputs(folder))["loss"]
    np.save(folder / "c.npy", np.asfortranarray(arrays["c"]))
    np.save(folder / "e.npy", np.asfortranarray(arrays["e"]))
    assert run_json("loss", *inputs(folder))["loss"] == plain


def test_frozen_reductions_and_ignore_index(data):
    folder, arrays = data
    nll = dense(**arrays)["nll"]
    result = run_json("loss", *inputs(folder), "--frozen", "--reduction", "sum")
    assert result["mode"] == "stream"
    assert result["loss"] == pytest.approx(nll.sum(), rel=1e-6)
    result = run_json("loss", *inputs(folder), "--no-gradient", "--reduction", "none")
    assert result["mode"] == "loss"
    np.testing.assert_allclose(result["loss"], nll, rtol=1e-5, atol=1e-5)
    np.save(folder / "labels.npy", np.where(arrays["labels"] == -100, 7, arrays["labels"]))
    result = run_json("loss", *inputs(folder), "--ignore-index", 7)
    assert result["valid_count"] == 37 - (np.load(folder / "labels.npy") == 7).sum()


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "uint32", "uint64"])
def test_labels_of_any_integer_type(data, dtype):
    folder, arrays = data
    labels = np.where(arrays["labels"] < 0, 0, arrays["labels"])
    np.save(folder / "labels.npy", labels.astype(dtype))
    nll = dense(arrays["e"], arrays["c"], labels)["nll"]
    assert run_json("loss", *inputs(folder))["loss"] == pytest.approx(nll.mean(), rel=1e-6)


def test_bfloat16_files(data):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    folder, arrays = data
    e, c = (arrays[name].astype(ml_dtypes.bfloat16) for name in ("e", "c"))
    np.save(folder / "e.npy", e)
    np.save(folder / "c.npy", c)
    result = run_json("loss", *inputs(folder), "--d-e", folder / "d_e.npy")
    want = dense(e, c, arrays["labels"])
    assert result["loss"] == pytest.approx(want["nll"].sum() / 36, rel=1e-5)
    got = np.load(folder / "d_e.npy").view(ml_dtypes.bfloat16).astype(np.float64)
    np.testing.assert_allclose(got, want["d_e"], rtol=2**-8, atol=1e-5)


def test_no_tokens_and_no_labels(data):
    folder, arrays = data
    np.save(folder / "labels.npy", np.full(37, -100))
    result = run_json("loss", *inputs(folder), "--d-c", folder / "d_c.npy")
    assert result["loss"] == 0 and result["valid_count"] == 0
    assert not np.load(folder / "d_c.npy").any()
    np.save(folder / "labels.npy", np.empty(0, np.int64))
    np.save(folder / "e.npy", arrays["e"][:0])
    assert run_json("loss", *inputs(folder))["loss"] == 0


def test_budget(data):
    folder, _ = data
    result = run_json("loss", *inputs(folder), "--budget", "1MiB")
    assert result["extra_bytes"] <= 2**20
    refused(NO_MEMORY, "loss", *inputs(folder), "--budget", 10, words=["budget", "10", "smallest"])


def test_info_plan_bench():
    info = run_json("info")
    assert info["target"] == info["targets"][0] and info["threads"] >= 1
    last = info["targets"][-1]
    forced = run_json("info", env={"CUTLOSS_TARGET": last})
    assert forced["target"] == last and "CUTLOSS_TARGET" in forced["target_reason"]
    plan = run_json("plan", "--n", 64, "--v", 1000, "--d", 32, "--target", last)
    assert plan["target"] == last
    assert "not chunk" in run("plan", "--n", 64, "--v", 1000, "--d", 32, "--mode", "recompute").stdout
    for target in info["targets"]:
        bench = run_json("bench", "--n", 33, "--v", 257, "--d", 17, "--reps", 2, "--target", target)
        assert bench["plan"]["target"] == target
        assert bench["gflops"] > 0 and bench["peak_gflops"] > 0
        assert bench["errors"]["d_c"] < 1e-4
    assert "GFLOP/s" in run("bench", "--n", 8, "--v", 100, "--d", 8, "--dtype", "bf16", "--head-layout", "dv").stdout


def test_check_passes_on_every_target():
    result = run_json("check", "--cases", 25, "--seed", 11)
    assert result["failures"] == [] and result["runs"] >= 25
    assert {by["target"] for by in result["by"]} == set(run_json("info")["targets"])
    assert {by["mode"] for by in result["by"]} == {"loss", "stream", "chunk", "recompute", "sparse"}
    result = run_json("check", "--cases", 5, "--mode", "sparse")
    assert result["failures"] == [] and {by["mode"] for by in result["by"]} == {"sparse"}
    assert "0 failed" in run("check", "--cases", 2, "--n", 3, "--v", 5, "--d", 7, "--mode", "chunk").stdout


# ------------------------------------------------------------------------------------------------------- errors


def test_bad_arrays(data):
    folder, arrays = data
    loss = ["loss", *inputs(folder)]

    def with_file(name, array, *args, words):
        np.save(folder / "other.npy", array)
        refused(BAD_USAGE, "loss", *inputs(folder, **{name: folder / "other.npy"}), *args, words=words)

    with_file("e", arrays["e"][:, :-1], words=["--e [37, 18]", "--c [101, 19]", "disagree on D"])
    with_file("e", arrays["e"][0], words=["--e", "[19]"])
    with_file("c", arrays["c"].T.copy(), words=["disagree on D", "dv"])
    with_file("c", arrays["c"][:0], words=["vocab (V) is 0"])
    with_file("labels", arrays["labels"][:-1], words=["[37, 19]", "[36]", "disagree on N"])
    with_file("labels", arrays["labels"][:, None], words=["--labels must be [N]", "[37, 1]"])
    with_file("labels", arrays["labels"].astype(np.float32), words=["integers"])
    with_file("labels", arrays["labels"] > 0, words=["bool"])
    with_file("e", arrays["e"].astype(np.float64), words=["float64"])
    with_file("e", arrays["e"].astype(">f4"), words=["big-endian"])
    with_file("e", arrays["e"].astype(np.int32), words=["--e is int32; it must be float32"])
    bad_label = arrays["labels"].copy()
    bad_label[5] = 101
    with_file("labels", bad_label, words=["labels[5] is 101"])
    np.save(folder / "labels.npy", bad_label)
    assert run_json(*loss, "--nan-labels")["loss"] is None


def test_bad_files(data):
    folder, _ = data
    (folder / "cut.npy").write_bytes((folder / "e.npy").read_bytes()[:-1])
    (folder / "text.npy").write_text("hello")
    for name, word in [("cut.npy", "truncated"), ("text.npy", "not a .npy file"), ("none.npy", "No such file")]:
        refused(BAD_USAGE, "loss", *inputs(folder, e=folder / name), words=["--e", name, word])
    refused(BAD_USAGE, "loss", *inputs(folder, e=folder), words=["not a regular file"])
    refused(BAD_USAGE, "loss", *inputs(folder), "--nll", folder / "no" / "x.npy", words=["cannot write", "x.npy"])


def test_an_output_never_replaces_an_input_or_another_output(data):
    folder, _ = data
    before = (folder / "e.npy").read_bytes()
    again = folder / "x" / ".." / "e.npy"
    refused(BAD_USAGE, "loss", *inputs(folder), "--d-e", again, words=["--e and --d-e name the same file"])
    out = folder / "o.npy"
    refused(BAD_USAGE, "loss", *inputs(folder), "--nll", out, "--lse", out, words=["--nll and --lse"])
    assert (folder / "e.npy").read_bytes() == before and not out.exists()


def test_bad_usage(data):
    folder, _ = data
    loss = ["loss", *inputs(folder)]
    refused(BAD_USAGE, "loss", words=["--e", "required", "cutloss loss --help"])
    refused(BAD_USAGE, *loss, "--mode", "fastest", words=["--mode", "fastest", "recompute"])
    refused(BAD_USAGE, *loss, "--mode", "stream", words=["mode", "stream", "chunk"])
    refused(BAD_USAGE, *loss, "--softcap", "0", words=["softcap"])
    refused(BAD_USAGE, *loss, "--softcap", "nan", words=["softcap"])
    refused(BAD_USAGE, *loss, "--budget", "64 furlongs", words=["--budget", "64 furlongs", "64MiB"])
    refused(BAD_USAGE, *loss, "--reps", "0", words=["--reps"])
    refused(BAD_USAGE, *loss, "--threads", "-1", words=["threads is -1"])
    refused(BAD_USAGE, *loss, "--frozen", "--d-c", folder / "x.npy", words=["--d-c", "--frozen"])
    refused(BAD_USAGE, "plan", "--n", "-5", words=["-5"])
    refused(BAD_USAGE, "plan", "--v", "0", words=["vocab (V) is 0"])
    for number in ("9223372036854775808", "99999999999999999999", "-99999999999999999999"):
        refused(BAD_USAGE, "plan", "--n", number, words=["--n", number, "does not fit 64 bits"])
    refused(BAD_USAGE, "check", "--seed", "18446744073709551616", words=["does not fit 64 bits"])
    refused(BAD_USAGE, "check", "--seed", "-1", words=["--seed", "-1", "negative"])
    refused(BAD_USAGE, "plan", "--n", str(2**60), words=["2^46"])
    assert run().returncode == BAD_USAGE


def test_output_that_cannot_be_written_is_a_success(data):
    folder, _ = data
    for line in (["info"], ["info", "--json"], ["--help"], ["loss", "--help"], ["plan"], ["check", "--cases", "1"],
                 ["loss", *inputs(folder)]):
        with open("/dev/full", "w") as full:
            result = subprocess.run([TOOL, *map(str, line)], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        assert result.returncode == BAD_USAGE, line
        assert result.stderr == "cutloss: error: cannot write to standard output: No space left on device\n"


def test_a_file_too_large_to_map_is_bad_usage(data):
    folder, _ = data
    np.lib.format.open_memmap(folder / "huge.npy", mode="w+", dtype=np.float32, shape=(2**31, 1)).flush()  # sparse
    result = subprocess.run([TOOL, "loss", *inputs(folder, e=folder / "huge.npy")], capture_output=True, text=True,
                            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (2**32, 2**32)), check=False)
    assert result.returncode == NO_MEMORY, result.stderr
    assert "huge.npy: cannot map 8589934720 bytes: Cannot allocate memory" in result.stderr


def test_targets(data):
    folder, _ = data
    for command in (["check"], ["plan"], ["bench"], ["loss", *inputs(folder)]):
        refused(UNAVAILABLE, *command, "--target", "cray1", words=["cray1", run_json("info")["targets"][0]])
    refused(UNAVAILABLE, "info", env={"CUTLOSS_TARGET": "cray1"}, words=["cray1"])


def test_out_of_memory_is_an_error(data):
    refused(NO_MEMORY, "bench", "--n", 1, "--v", 2**40, "--d", 16, words=["memory"])


def test_help_teaches():
    result = run("--help")
    assert result.returncode == 0
    for word in ("Examples:", "Exit codes:", "info", "plan", "check", "bench", "loss"):
        assert word in result.stdout
    for command in ("plan", "check", "bench", "loss"):
        assert "Examples:" in run(command, "--help").stdout
    assert run("--version").stdout.strip().count(".") == 2


# ------------------------------------------------------------------------------------------ external subcommands


def make_program(path, body):
    path.write_text(f"#!{sys.executable}\n{body}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_external_subcommand(tmp_path):
    make_program(tmp_path / "cutloss-greet", "import sys; print(sys.argv[1:]); sys.exit(7)")
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    result = run("greet", "--name", "a b", "--json", env=path)
    assert result.stdout == "['--name', 'a b', '--json']\n"
    assert result.returncode == 7
    refused(BAD_USAGE, "greeet", env=path, words=["cutloss-greeet", "did you mean greet?"])
    refused(BAD_USAGE, "chekc", words=["did you mean check?"])
    refused(BAD_USAGE, "../cutloss-greet", env=path, words=["no subcommand"])
    # The current directory is not searched, and a file that cannot be run is no program.
    refused(BAD_USAGE, "greet", cwd=tmp_path, env={"PATH": f":.:{os.environ['PATH']}"}, words=["no subcommand"])
    (tmp_path / "cutloss-greet").chmod(0o644)
    refused(BAD_USAGE, "greet", env=path, words=["no subcommand"])


def test_external_subcommand_beside_the_tool(tmp_path):
    tool = tmp_path / "cutloss"
    shutil.copy(os.path.realpath(TOOL), tool)
    make_program(tmp_path / "cutloss-near", "print('near')")
    result = subprocess.run([tool, "near"], capture_output=True, text=True, check=True, env={"PATH": "/nonexistent"})
    assert result.stdout == "near\n"
