"""The command cutloss-sft from end to end: events on stdout, a keyboard interrupt, answers, what fits."""

import json

import pytest
import runs

from cutloss.sft import cli, display

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.long
def test_interrupted_training_goes_on_and_answers(tmp_path, capsys, monkeypatch):
    settings = runs.settings(tmp_path, "generation.prompts=2", "generation.tokens=4", steps=3, checkpoint_every=1)
    file, out = tmp_path / "sft.json", tmp_path / "run"
    file.write_text(json.dumps(settings.to_dict()))
    command = ["train", "--config", str(file), "--out", str(out), "--json"]
    shown = display.Display.show

    def interrupted(self, event, fields):
        if event == "step" and fields["step"] == 2:
            raise KeyboardInterrupt
        shown(self, event, fields)

    monkeypatch.setattr(display.Display, "show", interrupted)
    assert cli.main(command) == 130
    told = capsys.readouterr()
    assert "the same command goes on from the last checkpoint" in told.err
    assert [json.loads(line)["event"] for line in told.out.splitlines()].count("step") == 2
    monkeypatch.undo()
    assert cli.main(["answer", str(out), "a text"]) == 2
    assert "the run is not finished" in capsys.readouterr().out

    assert cli.main(command) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [e["step"] for e in events if e["event"] in ("resumed", "step")] == [1, 2, 3]
    assert events[-1]["event"] == "finished" and events[-1]["steps"] == 3

    records = [json.loads(line) for line in (out / "after.jsonl").read_text().splitlines()]
    assert cli.main(["answer", str(out), *(record["source"] for record in records)]) == 0
    assert capsys.readouterr().out.splitlines() == [line for record in records for line in record["answer"].split("\n")]


@pytest.mark.parametrize(("budget", "status"), [("1GiB", 0), pytest.param("100KiB", 1, marks=pytest.mark.long)])
def test_fit_answers_with_its_points_and_its_status(tmp_path, capsys, budget, status):
    common = ["--budget", budget, "--batches", "2", "--contexts", "32", "model.family=gemma3", "lora.rank=4"]
    sizes = "model.sizes={num_layers: 1}"
    assert cli.main(["fit", "--json", *common, sizes]) == status
    told = capsys.readouterr()
    found = json.loads(told.out)
    (point,) = found["points"]
    assert found["budget"] == {"1GiB": 2**30, "100KiB": 100 * 2**10}[budget] and point["fits"] == (status == 0)
    assert (point["batch"], point["context"]) == (2, 32) and 2**17 < point["planned_bytes"] < 2**30
    said = "Most tokens a step: train.batch=2 train.context=32" if status == 0 else "Nothing fits: batch 2 x context 32"
    assert said in told.err


def test_a_tunix_of_another_train_step_is_refused_by_name(tmp_path, capsys, monkeypatch):
    from tunix.sft import peft_trainer

    def newer(self, model, optimizer, grad_accumulator, inputs, is_update_step): ...

    monkeypatch.setattr(peft_trainer.PeftTrainer, "_train_step", newer)
    for command in (["train", "--out", str(tmp_path / "run")], ["fit", "--budget", "1GiB"]):
        assert cli.main([*command, "model.family=gemma3"]) == 2
        told = " ".join(capsys.readouterr().out.split())
        assert "takes model, optimizer, grad_accumulator, inputs, is_update_step; cutloss-sft is made for" in told
