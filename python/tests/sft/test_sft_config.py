"""Settings: what is read, what is refused, and that each refusal says what and why."""

import json

import pytest

from cutloss.sft import cli, config
from cutloss.sft.config import ConfigError


@pytest.mark.parametrize("kind", ["yaml", "toml", "json"])
def test_a_file_of_every_kind_and_settings_over_it(tmp_path, kind):
    path = tmp_path / f"sft.{kind}"
    text = {
        "yaml": "train:\n  lr: 2e-4\n  steps: 7\nlora: {targets: [q_proj]}\n",
        "toml": '[train]\nlr = 2e-4\nsteps = 7\n[lora]\ntargets = ["q_proj"]\n',
        "json": '{"train": {"lr": 2e-4, "steps": 7}, "lora": {"targets": ["q_proj"]}}',
    }[kind]
    path.write_text(text)
    found = config.load(path, ["train.steps=9", "data.prompt='{source} =>'", "model.tied=false"])
    assert found.train.lr == 2e-4 and found.train.steps == 9 and found.lora.targets == ["q_proj"]
    assert found.data.prompt == "{source} =>" and found.model.tied is False
    assert config.from_dict(json.loads(json.dumps(found.to_dict()))) == found


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("train.stpes=3", "train.stpes: no such setting; did you mean train.steps"),
        ("trian.steps=3", "trian: no such setting; did you mean train"),
        ("steps=3", "'steps=3': expected section.key=value"),
        ("train.steps=0", "train.steps: 0 is less than 1"),
        ("train.steps=many", "train.steps: 'many' is str; expected int"),
        ("train.steps=true", "train.steps: True is bool; expected int"),
        ("train.steps=1.5", "train.steps: 1.5 is float; expected int"),
        ("train.lr=-1", "train.lr: -1.0 is not a positive number"),
        ("train.lr=nan", "train.lr: nan is not a positive number"),
        ("train.warmup=100", "train.warmup: 100 steps, and train.steps is 100"),
        ("train.schedule=linear", "train.schedule: 'linear' is not one of constant, cosine"),
        ("model.dtype=float16", "float16 overflows in Gemma"),
        ("lora.alpha=0", "lora.alpha: 0.0 is not a positive number"),
        ("lora.bits=3", "lora.bits: 3 is not one of nothing, 4, 8"),
        ("mesh.fsdp=3", "4 rows cannot be split over mesh.fsdp = 3 devices; make it a multiple of 3"),
        ("data.prompt=hello", "has no {source}"),
        ("loss.mode=fast", "loss.mode: 'fast' is not one of"),
        ("loss.mode=loss", "computes no gradient"),
        ("loss.budget=12parsec", "loss.budget: cannot read '12parsec'"),
        ("loss.mode=sparse", "loss.mode is \"sparse\"; with gradients wanted of e"),
        ("loss.filter=certified", "loss.filter is \"certified\", which needs one of tolerance and epsilon"),
        ("loss.epsilon=-1", "loss.epsilon"),
        ("loss.token_chunk=7", r"loss.token_chunk: 7 is outside \[8"),
        ("loss.token_chunk=20", "loss.token_chunk: 20 is not a multiple of 8"),
        ("loss.vocab_chunk=0", r"loss.vocab_chunk: 0 is outside \[1"),
        ("generation.quality=true", "needs answers; set generation.prompts"),
        ("train='}'", r"train: '\}' is no section|expected section.key=value"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value_and_the_limit(setting, message):
    with pytest.raises(ConfigError, match=message):
        config.load(None, [setting])


def test_a_mode_for_a_frozen_head_is_taken_with_adapters_only():
    assert config.load(None, ["loss.mode=stream"]).loss.mode == "stream"
    with pytest.raises(ConfigError, match='loss.mode is "stream"; with gradients wanted of e and c'):
        config.load(None, ["loss.mode=stream", "lora.rank=0"])


def test_settings_of_the_other_loss_are_not_silently_dropped():
    with pytest.raises(ConfigError, match="loss.budget: '1GiB' is for loss.arm=cutloss"):
        config.load(None, ["loss.arm=dense", "loss.budget=1GiB"])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.ini", "", "unknown kind of file; expected .yaml"),
        ("a.yaml", "train: [", "a.yaml: while parsing"),
        ("a.yaml", "- 1\n- 2\n", "expected sections of settings, found list"),
        ("a.toml", "train = ", "a.toml: Invalid value"),
        ("a.yaml", "train: 3\n", "train: 3 is not a section"),
    ],
)
def test_a_broken_file_is_named(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        config.load(tmp_path / name)


def test_going_on_allows_more_steps_but_not_another_schedule():
    first = config.load(None, ["train.steps=10"])
    assert config.difference(config.load(None, ["train.steps=20", "generation.prompts=3"]), first.to_dict()) is None
    cosine = config.load(None, ["train.steps=20", "train.schedule=cosine"])
    assert "train.steps was 10" in config.difference(cosine, {**cosine.to_dict(), "train": {**cosine.to_dict()["train"], "steps": 10}})


def test_a_wrong_loss_is_status_2_before_anything_is_loaded(tmp_path, capsys, monkeypatch):
    assert cli.main(["train", "--out", str(tmp_path / "run"), "model.path=/nowhere", "loss.mode=sparse"]) == 2
    assert "loss.mode" in capsys.readouterr().out and not (tmp_path / "run").exists()
    monkeypatch.setenv("CUTLOSS_TOKEN_CHUNK", "20")
    with pytest.raises(ConfigError, match="^CUTLOSS_TOKEN_CHUNK: 20 is not a multiple of 8"):
        config.load(None, [])


def test_the_command_prints_its_settings_and_refuses_wrong_ones(capsys):
    assert cli.main(["config", "train.steps=3"]) == 0
    assert "steps: 3" in capsys.readouterr().out
    assert cli.main(["config", "train.steps=0"]) == 2
    assert "train.steps: 0 is less than 1" in capsys.readouterr().out
