"""The demo's parent: what it does with what the arms report. No model is loaded here."""

import json
import os
import subprocess
import sys

import pytest

from cutloss.sft import arm, demo, report, run


def result(name, losses, digest="d"):
    made = report.ArmResult(name, data={"digest": digest, "source": "s"}, losses=losses, seconds=[2.0] * len(losses))
    made.compile_seconds, made.planned_bytes, made.peak_rss_bytes = 1.0, 2**30, 2**31
    return made


def test_disagreeing_losses_are_a_failure():
    assert demo.compare([result("default", [3.0, 2.0]), result("cutloss", [3.0, 2.00005])]) is None
    assert "differ by 2.0e-04" in demo.compare([result("default", [3.0, 2.0]), result("cutloss", [3.0, 2.0002])])
    assert demo.compare([result("default", [3.0]), result("cutloss", [float("nan")])])


def test_arms_on_different_batches_are_not_compared():
    assert "same batches" in demo.compare([result("default", [3.0], "a"), result("cutloss", [3.0], "b")])


def test_csv_and_plot_are_written(tmp_path):
    results = [result("default", [3.0, 2.0]), result("cutloss", [3.0, 2.0])]
    report.write_csv(results, tmp_path / "summary.csv")
    report.plot(results, tmp_path / "plot.png")
    lines = (tmp_path / "summary.csv").read_text().splitlines()
    assert len(lines) == 3 and lines[0].startswith("arm,steps,first_loss,last_loss")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def fake_arm(tmp_path, monkeypatch, body):
    """Puts a script in the place of cutloss.sft.arm; `emit` in it writes events as the real one does."""
    script = tmp_path / "fake.py"
    script.write_text(
        "import json, os, sys\n"
        "settings = json.loads(sys.argv[-1])\n"
        "events = os.fdopen(settings['events_fd'], 'w', buffering=1)\n"
        "def emit(event, **fields): print(json.dumps({'arm': settings['arm'], 'event': event, **fields}), file=events)\n"
        + body
    )
    real = subprocess.Popen

    def popen(command, **kwargs):
        return real([sys.executable, str(script), command[-1]], **kwargs)

    monkeypatch.setattr(demo.subprocess, "Popen", popen)
    monkeypatch.setattr(demo, "_prepare_weights", lambda: "weights")


GOOD = """
print("chatter on stdout")
emit("data", digest="d", source="two pairs", training=2, held_out=0, dropped=0)
emit("compiled", seconds=1.5, planned_bytes=2**30, logit_arrays={})
for n in range(settings["config"]["train"]["steps"]): emit("step", step=n + 1, loss=3.0 - n + (SHIFT if settings["arm"] == "cutloss" else 0), seconds=0.5)
emit("trained", peak_rss_bytes=2**31)
emit("generated", source="s", reference="r", before="b", after="a")
"""


def test_agreeing_run_leaves_its_files_and_a_second_run_replaces_them(tmp_path, monkeypatch, capsys):
    fake_arm(tmp_path, monkeypatch, GOOD.replace("SHIFT", "1e-6"))
    out = tmp_path / "out"
    for steps in (3, 2):
        assert demo.main(["--steps", str(steps), "--out", str(out), "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert shown["ok"] and [len(a["losses"]) for a in shown["arms"]] == [steps, steps]
    events = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert sum(event["event"] == "step" for event in events) == 4
    assert {path.name for path in out.iterdir()} == {
        "metrics.jsonl",
        "summary.csv",
        "plot.png",
        "default.log",
        "cutloss.log",
    }
    assert "chatter" in (out / "default.log").read_text()


def test_disagreement_is_the_exit_status(tmp_path, monkeypatch, capsys):
    fake_arm(tmp_path, monkeypatch, GOOD.replace("SHIFT", "1e-3"))
    assert demo.main(["--steps", "2", "--out", str(tmp_path / "out")]) == 1
    assert "one of them is wrong" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("emit('error', message='FloatingPointError: the loss of step 1 is nan')\nsys.exit(1)", "the loss of step 1 is nan"),
        ("os.kill(os.getpid(), 9)", "lack of memory"),
    ],
)
def test_failing_arm_is_named_with_its_reason_and_log(tmp_path, monkeypatch, capsys, body, message):
    fake_arm(tmp_path, monkeypatch, body)
    assert demo.main(["--out", str(tmp_path / "out")]) == 1
    shown = capsys.readouterr().out
    assert "'default' failed" in shown and message in shown and "default.log" in shown


@pytest.mark.parametrize("wrong", [["--arms", "default,torch"], ["--steps", "0"], ["--arms", "cutloss,cutloss"]])
def test_wrong_usage_is_status_2(wrong):
    with pytest.raises(SystemExit) as stop:
        demo.main(wrong)
    assert stop.value.code == 2


def test_settings_survive_the_command_line():
    settings = arm.ArmSettings("cutloss", "out", {"train": {"lr": 1e-3}, "data": {"path": None}}, 7)
    assert arm.ArmSettings.from_json(settings.to_json()) == settings


def test_both_arms_are_one_run_with_two_losses():
    """A preset that config.py refuses, or arms that differ in more than the loss, would show only after the download."""
    from cutloss.sft import config

    options = demo.parser().parse_args(["--steps", "3", "--rank", "4", "--answer-tokens", "0"])
    made = {
        name: config.from_dict({**demo.preset(options, "weights"), "loss": {"arm": loss}}) for name, loss in arm.ARMS.items()
    }
    assert made["default"].loss.arm == "dense" and made["cutloss"].loss.arm == "cutloss"
    differing = [key for key, value in made["default"].to_dict().items() if value != made["cutloss"].to_dict()[key]]
    assert differing == ["loss"]
    assert made["cutloss"].train.steps == 3 and made["cutloss"].lora.rank == 4
    assert made["cutloss"].generation.prompts == 0


def test_peak_memory_is_of_this_process_and_in_bytes():
    assert 2**23 < run.peak_rss_bytes() < 2**40
    assert os.getpid() > 0


def test_bad_data_destroys_the_results_of_an_earlier_run(tmp_path, capsys):
    (tmp_path / "summary.csv").write_text("precious")
    bad = tmp_path / "bad.tsv"
    bad.write_text("one column\n")
    status = demo.main(["--data", str(bad), "--out", str(tmp_path), "--json"])
    assert status == 2 and (tmp_path / "summary.csv").read_text() == "precious"
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is False and "bad.tsv:1" in answer["problem"]
