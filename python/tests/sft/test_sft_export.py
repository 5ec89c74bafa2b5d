"""A finished run's model as a folder that others read: its weights are the base's and what was trained, by their names."""

import json
import shutil

import numpy as np
import pytest
from folders import FILES, LENGTH, VOCAB, computed, logits, write, write_gemma4
from safetensors.numpy import load_file, save_file

from cutloss.sft import adapter, cli, config, export, families, models, run
from cutloss.sft.config import ConfigError


def finished(folder, name, *overrides, change, **changes):
    """A run's folder as training leaves it: of a model that `write` makes in `folder`/base, with `change` of each array."""
    base, out = folder / "base", folder / "run"
    base.mkdir()
    out.mkdir()
    if name == "gemma4":
        write_gemma4(base)
        overrides = ("model.name=gemma4_tiny", *overrides)
    else:
        write(base, name, **changes)
    settings = config.load(None, [f"model.path={base}", "lora.rank=4", "lora.alpha=12", *overrides])
    source = models.find(settings.model)
    model = models.load(source, settings)
    trained = {path: change(array) for path, array in adapter.of(model)[0].items()}
    adapter.save(out / "adapter.safetensors", trained, settings, source)
    (out / "config.json").write_text(json.dumps(settings.to_dict()))
    adapter.load(model, out / "adapter.safetensors", settings.lora)
    return out, model


def adapters(seed=1):
    """Small random ones: B of a new adapter is zero."""
    rng = np.random.default_rng(seed)
    return lambda array: (0.1 * rng.standard_normal(array.shape)).astype(np.float32)


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "gemma2" else pytest.mark.long) for n in FILES])
def test_the_published_model_computes_of_the_folder_what_was_trained(tmp_path, name):
    folder, model = finished(tmp_path, name, change=adapters())
    export.export(folder, tmp_path / "out")
    weights = {part: array.astype(np.float64) for part, array in load_file(tmp_path / "out" / "model.safetensors").items()}
    found = json.loads((tmp_path / "out" / "config.json").read_text())
    ids = np.random.default_rng(1).integers(0, VOCAB, LENGTH)
    ours, base = computed(model, ids), load_file(tmp_path / "base" / "model.safetensors")
    # As for a folder that is loaded (test_sft_folders.py), and the merged weights' own rounding, one more of its kind.
    np.testing.assert_allclose(logits(weights, found, ids), ours, rtol=0, atol=2e-5 * np.abs(ours).max())
    assert np.abs(logits(base, found, ids) - ours).max() > 1e-2 * np.abs(ours).max()
    assert {part: array.shape for part, array in weights.items()} == {part: array.shape for part, array in base.items()}


@pytest.mark.parametrize("name", [*FILES, "gemma4"])
def test_every_weight_is_under_its_own_name(tmp_path, monkeypatch, name):
    """All of them trained, to 1.5 of what they were: exact, and no other place has these numbers."""
    made = families.FAMILIES["gemma4"].module.ModelConfig
    tiny = classmethod(lambda cls: families.tiny("gemma4", True, {}))
    monkeypatch.setattr(made, "gemma4_tiny", tiny, raising=False)
    tied = {} if "gemma" in name else {"tie_word_embeddings": True, "head": "equal"}
    folder, _ = finished(tmp_path, name, "lora.rank=0", change=lambda array: 1.5 * array, **tied)
    export.export(folder, tmp_path / "out")
    base, out = (load_file(tmp_path / place / "model.safetensors") for place in ("base", "out"))
    assert base.keys() == out.keys() and ("lm_head.weight" in out) == bool(tied)
    for part, array in base.items():
        np.testing.assert_array_equal(out[part], 1.5 * array, err_msg=part)


def test_all_files_come_along_and_tell_their_dtype_and_size(tmp_path, capsys):
    folder, _ = finished(tmp_path, "qwen3", "lora.rank=0", change=lambda array: array, dtype="float32")
    base = tmp_path / "base"
    arrays = load_file(base / "model.safetensors")
    (base / "model.safetensors").unlink()
    halves = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    where = {part: halves[i % 2] for i, part in enumerate(arrays)}
    other = {"vision_tower.bias": np.arange(3, dtype=np.float32)}  # nothing of Tunix's model
    for half in halves:
        more = other if half == halves[1] else {}
        save_file({**{p: a for p, a in arrays.items() if where[p] == half}, **more}, base / half, {"format": "pt"})
    index = {"metadata": {"total_size": 1}, "weight_map": where}
    (base / export.INDEX).write_text(json.dumps(index))
    (base / "tokenizer.model").write_bytes(b"words")
    out = tmp_path / "made" / "here"
    assert cli.main(["export", str(folder), str(out), "--dtype", "bfloat16"]) == 0
    assert f"of weights are in {out}/" in capsys.readouterr().out
    assert {path.name for path in out.iterdir()} == {path.name for path in base.iterdir()}
    assert (out / "tokenizer.model").read_bytes() == b"words"
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = [load_file(out / half) for half in halves]
    assert all(loaded[halves.index(half)][part].dtype == "bfloat16" for part, half in where.items())
    np.testing.assert_array_equal(loaded[1].pop("vision_tower.bias"), other["vision_tower.bias"])
    told = json.loads((out / export.INDEX).read_text())
    assert told == {**index, "metadata": {"total_size": 12 + sum(2 * array.size for array in arrays.values())}}


def test_what_cannot_be_exported_is_refused_with_its_reason(tmp_path, capsys):
    folder, _ = finished(tmp_path, "qwen3", change=adapters())
    out, settings = tmp_path / "out", json.loads((folder / "config.json").read_text())

    def refused(message, folder=folder, **changes):
        (folder / "config.json").write_text(json.dumps({**settings, **changes}))
        assert cli.main(["export", str(folder), str(out)]) == 2
        assert message in " ".join(capsys.readouterr().out.split())

    refused("its model began with random weights", model={"family": "qwen3"})
    refused("are quantised to 8 bits and cannot take the adapters", lora={"rank": 4, "bits": 8})
    refused("the configuration's is 2.0", lora={"rank": 4, "alpha": 8.0})
    shutil.copytree(folder, tmp_path / "young", ignore=lambda *_: ["adapter.safetensors"])
    refused("the run is not finished", tmp_path / "young")
    assert not out.exists() and not list(tmp_path.glob("out.*"))
    out.mkdir()
    (out / "kept").touch()
    refused("is not empty; give another folder")
    with pytest.raises(ConfigError, match="holds no run"):
        export.export(tmp_path, tmp_path / "other")


def test_a_loader_that_puts_a_weight_elsewhere_is_noticed_before_anything_is_written(tmp_path, monkeypatch):
    folder, model = finished(tmp_path, "qwen3", change=adapters())
    _, source = run.settings(folder)
    with models.loader_of(source) as loader:
        table = loader._get_key_and_transform_mapping(source.config)
    crossed = {pattern: (place.replace("q_norm", "k_norm"), to) for pattern, (place, to) in table.items()}
    monkeypatch.setattr(loader, "_get_key_and_transform_mapping", lambda _: crossed)
    with pytest.raises(RuntimeError, match="q_norm.weight is not what this Tunix's model has in its place"):
        export._check_places(source, model)
    lacking = {pattern: to for pattern, to in table.items() if "q_norm" not in pattern}
    monkeypatch.setattr(loader, "_get_key_and_transform_mapping", lambda _: lacking)
    with pytest.raises(RuntimeError, match="have a place in the files"):
        export._check_places(source, model)
