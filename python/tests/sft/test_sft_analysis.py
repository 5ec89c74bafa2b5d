"""`cutloss.analysis --run`: the held-out answers of a run, before and after it."""

import json
from pathlib import Path

import numpy as np
import pytest
import runs

from cutloss.analysis import __main__ as command
from cutloss.analysis import runs as analysed
from cutloss.sft import adapter, config, data, models, tokenizers
from cutloss.sft.data import Example


def nll(arrays):
    """The mean loss of the arrays, in float64."""
    z = np.asarray(arrays.hidden, np.float64) @ np.asarray(arrays.table, np.float64).T
    return np.mean(np.log(np.exp(z).sum(1)) - z[np.arange(len(z)), arrays.labels])


def tunix_loss(model, settings, tokens):
    """Tunix's own loss of the same rows: held-out pairs in their order, each cut where the targets are reached."""
    from flax import nnx
    from tunix.sft import peft_trainer

    pairs, _ = data.load(Path(settings.data.path))
    _, held_out = data.split(pairs, settings.data.held_out_one_in)
    rows, left = [], tokens
    for pair in held_out:
        row = data.encode(pair, tokenizers.Bytes(), settings.train.context, settings.data.prompt)
        if left == 0 or row is None:
            continue
        row.tokens[:] = row.tokens[: row.targets_from + left]
        left -= len(row.tokens) - row.targets_from
        rows.append(row)
    loss = nnx.jit(lambda model, batch: peft_trainer._default_loss_fn(model, **batch))
    return float(loss(model, data.collate(rows, settings.train.context))), tokens - left


def finished(folder, settings, change):
    """A folder as a finished run leaves it, with `change(model)` in place of the training; returns the changed model."""
    source = models.find(settings.model)
    model = models.load(source, settings)
    change(model)
    state, digest = adapter.of(model)
    folder.mkdir()
    adapter.save(folder / "adapter.safetensors", state, settings, source)
    (folder / "config.json").write_text(json.dumps(settings.to_dict()))
    (folder / "summary.json").write_text(json.dumps({"steps": 6, "sha256": digest}))
    return model


def shaken(model):
    import jax
    from flax import nnx

    rng = np.random.default_rng(0)
    state = nnx.state(model, models.trained(model))
    nnx.update(model, jax.tree.map(lambda x: x + 0.05 * rng.standard_normal(x.shape).astype(x.dtype), state))


@pytest.mark.parametrize("rank", [4, pytest.param(0, marks=pytest.mark.long)])
def test_rows_or_weights_are_not_those_of_the_run(tmp_path, quick_compilation, rank):
    settings = runs.settings(tmp_path, f"lora.rank={rank}", "lora.alpha=12")
    changed = finished(tmp_path / "run", settings, shaken)
    base = models.load(models.find(settings.model), settings)
    for tokens in (60, 10_000):
        found = dict(analysed.arrays(tmp_path / "run", tokens))
        assert list(found) == ["before", "after"]
        wanted = {"before": tunix_loss(base, settings, tokens), "after": tunix_loss(changed, settings, tokens)}
        for when, (loss, targets) in wanted.items():
            assert len(found[when].labels) == targets
            # f32 throughout: logits of 32 terms, compiled here for other shapes than there.
            assert nll(found[when]) == pytest.approx(loss, rel=1e-5), (when, tokens)
        assert abs(wanted["after"][0] - wanted["before"][0]) > 1e-3
        assert [found[when].record["steps"] for when in found] == [0, 6]
        assert (rank == 0) == (not np.array_equal(found["before"].table, found["after"].table))


def test_targets_are_cut_elsewhere_or_the_first_token_of_a_row_is_one():
    examples = [Example([1, 2, 3, 4, 5], 3), Example([6, 7], 2), Example([8, 9, 10], 0), Example([11, 12, 13], 1)]
    assert analysed.first_targets(examples, 100) == [([1, 2, 3, 4, 5], 3), ([8, 9, 10], 1), ([11, 12, 13], 1)]
    assert analysed.first_targets(examples, 3) == [([1, 2, 3, 4, 5], 3), ([8, 9], 1)]
    assert analysed.first_targets(examples, 2) == [([1, 2, 3, 4, 5], 3)]


def test_a_folder_without_a_finished_run_is_named(tmp_path, capsys):
    out = ["--out", str(tmp_path / "out")]
    assert command.main(["--run", str(tmp_path), *out]) == 2
    assert f"{tmp_path} holds no run; there is no config.json" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps(config.Config().to_dict()))
    assert command.main(["--run", str(tmp_path), *out]) == 2
    assert "the run is not finished; there is no summary.json" in capsys.readouterr().err
    assert command.main(["--run", str(tmp_path), "--tokens", "0", *out]) == 2
    assert "--tokens is 0; it must be at least 1" in capsys.readouterr().err


@pytest.mark.long
def test_a_real_run_s_own_evaluations_are_the_analysis_s_losses(tmp_path, quick_compilation):
    """Trained by cutloss-sft and analysed by the command, with its files and figures."""
    pytest.importorskip("matplotlib")
    settings = runs.settings(tmp_path, "evaluation.every=6", "evaluation.batches=2")
    _, events = runs.go(settings, tmp_path / "run")
    evaluated = {event["step"]: event["loss"] for event in events if event["event"] == "evaluated"}
    rows = data.held_out_batches(
        data.split(data.load(runs.pairs(tmp_path))[0], 4)[1], tokenizers.Bytes(), batch=2, context=64, count=2,
        template=settings.data.prompt,
    )  # fmt: skip
    targets = sum(rows.targets(i) for i in range(len(rows)))
    out, dump = tmp_path / "out", tmp_path / "dump"
    options = ["--run", str(tmp_path / "run"), "--tokens", str(targets), "--tile", "16x32", "--tolerances", "0.01"]
    assert command.main([*options, "--out", str(out), "--dump", str(dump), "--name", "x"]) == 0
    for when, step in (("before", 0), ("after", 6)):
        result = json.loads((out / f"x-{when}.json").read_text())
        assert result["settings"]["n"] == targets
        assert result["nll"] == pytest.approx(evaluated[step], rel=1e-5)
        assert len(np.load(dump / when / "labels.npy")) == targets
    assert evaluated[6] < evaluated[0]
    assert (out / "x-survival.png").stat().st_size > 2000
