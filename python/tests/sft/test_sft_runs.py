"""Whole runs of tiny models: what stops them, what they compute, and that every family gets through."""

import json

import pytest
import runs

from cutloss.sft import cli, config, data, families, models, run, tokenizers

long = pytest.mark.long
pytestmark = pytest.mark.usefixtures("quick_compilation")


def arguments(settings):
    """The settings as a user would put them in a file."""
    return json.dumps(settings.to_dict())


@long
def test_loss_that_is_not_finite_stops_the_run_before_it_is_saved(tmp_path, capsys):
    settings = runs.settings(tmp_path, lr=1e30, checkpoint_every=1)
    (tmp_path / "sft.json").write_text(arguments(settings))
    out = tmp_path / "run"
    assert cli.main(["train", "--config", str(tmp_path / "sft.json"), "--out", str(out)]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "the loss of step 2 is nan" in shown or "the loss of step 2 is inf" in shown
    assert [p.name for p in (out / "checkpoints").glob("[0-9]*")] == ["1"]  # the weights that gave the last finite loss
    assert not (out / "summary.json").exists() and not (out / "adapter.safetensors").exists()


@long
def test_one_step_is_the_same_however_its_rows_are_cut(tmp_path):
    """Rows of unequal targets: 4 x 1, 2 x 2 and 1 x 4 log the same losses and end with the same adapters."""
    from safetensors.numpy import load_file

    found = {}
    for accumulation in (1, 2, 4):
        out = tmp_path / str(accumulation)
        settings = runs.settings(tmp_path, batch=4 // accumulation, accumulation=accumulation, steps=3, lr=1e-3)
        runs.go(settings, out)
        found[accumulation] = list(runs.losses(out).values()), load_file(out / "adapter.safetensors")
    losses, adapters = found[1]
    for accumulation in (2, 4):
        assert found[accumulation][0] == pytest.approx(losses, rel=1e-5)
        for name, one in adapters.items():
            # Three steps of Adam at 1e-3: where a gradient is rounding only, a step may differ by 1e-3 itself, rarely.
            other = found[accumulation][1][name]
            assert abs(other - one).mean() <= 1e-5, name


@long
@pytest.mark.parametrize("arm", ["cutloss", "dense"])
def test_evaluation_and_answers_of_both_arms(tmp_path, arm):
    pytest.importorskip("sacrebleu")
    settings = runs.settings(
        tmp_path,
        f"loss.arm={arm}",
        "evaluation.every=3",
        "evaluation.batches=3",
        "generation.prompts=3",
        "generation.tokens=8",
        "generation.batch=2",
        "generation.quality=true",
    )
    summary, events = runs.go(settings, tmp_path / "run")
    evaluated = {e["step"]: e["loss"] for e in events if e["event"] == "evaluated"}
    assert sorted(evaluated) == [0, 3, 6] and evaluated[6] < evaluated[0]
    for when in ("before", "after"):
        records = [json.loads(line) for line in (tmp_path / "run" / f"{when}.jsonl").read_text().splitlines()]
        assert len(records) == 3 and all(set(r) == {"source", "reference", "answer"} for r in records)
        assert summary["quality"][when]["answers"] == 3
        assert 0 <= summary["quality"][when]["bleu"] <= 100 and "chrf_signature" in summary["quality"][when]
    # What was saved, with its scale, is what was trained: the same answers from the files alone.
    assert run.answer(tmp_path / "run", [r["source"] for r in records]) == [r["answer"] for r in records]


@long
def test_both_losses_are_compared_with_their_quality(tmp_path, capsys):
    """The same data, order and start: the losses are one curve, and BLEU and chrF are there before and after for both."""
    pytest.importorskip("sacrebleu")
    for arm in ("dense", "cutloss"):
        settings = runs.settings(
            tmp_path, f"loss.arm={arm}", "generation.prompts=3", "generation.tokens=8", "generation.quality=true", steps=3
        )
        runs.go(settings, tmp_path / arm)
    assert cli.main(["compare", str(tmp_path / "dense"), str(tmp_path / "cutloss")]) == 0
    shown = capsys.readouterr().out
    for arm in ("dense", "cutloss"):
        for when in ("before", "after"):
            assert f"{arm}, {when}: BLEU " in shown
            assert (tmp_path / arm / f"{when}.jsonl").is_file()
    dense, ours = (runs.losses(tmp_path / arm) for arm in ("dense", "cutloss"))
    assert list(ours.values()) == pytest.approx(list(dense.values()), rel=1e-4)
    answers = [(tmp_path / arm / "before.jsonl").read_text() for arm in ("dense", "cutloss")]
    assert answers[0] == answers[1]
    assert cli.main(["compare", str(tmp_path / "dense"), str(tmp_path)]) == 2


@long
def test_evaluated_loss_is_the_mean_over_targets(tmp_path):
    """Against the model's own loss of all held-out rows as one batch."""
    from tunix.sft import peft_trainer

    settings = runs.settings(tmp_path, "evaluation.every=1", "evaluation.batches=3", steps=1)
    _, events = runs.go(settings, tmp_path / "run")
    first = next(e["loss"] for e in events if e["event"] == "evaluated")
    pairs, _ = data.load(runs.pairs(tmp_path))
    _, held_out = data.split(pairs, 4)
    rows = data.held_out_batches(held_out, tokenizers.Bytes(), batch=2, context=64, count=3, template="{source}:")
    whole = data.collate(rows.examples, 64)
    model = models.load(models.find(settings.model), settings)
    assert first == pytest.approx(float(peft_trainer._default_loss_fn(model, **whole)), rel=1e-5)


@long
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", families.FAMILIES)
def test_every_family_learns_and_answers(tmp_path, family, tied):
    if not tied and families.FAMILIES[family].tied_flag is None:
        pytest.skip("its head is always the embedding")
    chosen = (f"model.tied={tied}", "generation.prompts=1", "evaluation.every=20")
    runs.go(runs.settings(tmp_path, *chosen, family=family, steps=20, lr=5e-3), tmp_path / "run")
    before, after = (event["loss"] for event in runs.recorded(tmp_path / "run", "evaluated"))
    assert after < before - 1e-2  # of the same rows, whose rounding is 1e-6


@long
@pytest.mark.parametrize(
    "overrides",
    [
        ("lora.rank=0",),
        ("lora.bits=8", "generation.prompts=1", "generation.tokens=4"),
        ("model.dtype=bfloat16",),
        ("loss.mode=recompute", "lora.rank=0"),
        ("loss.mode=sparse", "loss.filter=unbiased", "loss.tolerance=1e-3"),
        ("model.remat=BLOCK", "generation.prompts=1", "generation.tokens=4"),
        ("model.sizes={num_layers: 1, num_heads: 1, embed_dim: 8}", "lora.rank=1", "train.batch=1"),
    ],
)
def test_every_choice_learns(tmp_path, overrides):
    runs.go(runs.settings(tmp_path, *overrides, steps=20, lr=5e-3), tmp_path / "run")
    losses = runs.losses(tmp_path / "run")
    assert losses[20] < losses[1] - 0.02


@pytest.fixture(scope="module")
def dense_losses(tmp_path_factory):
    """By rank of the adapters; 0: every weight is trained."""
    found = {}
    for rank in (4, 0):
        folder = tmp_path_factory.mktemp(f"dense{rank}")
        runs.go(runs.settings(folder, "loss.arm=dense", f"lora.rank={rank}", steps=3, lr=1e-3), folder / "run")
        found[rank] = list(runs.losses(folder / "run").values())
    return found


@long
@pytest.mark.parametrize(
    ("overrides", "later"),
    [
        # Adam's steps of 1e-3 may differ in the sign of a gradient that is rounding only, rarely.
        *((("loss.mode=" + mode,), 1e-5) for mode in ("auto", "stream")),
        *((("loss.mode=" + mode, "lora.rank=0"), 1e-5) for mode in ("chunk", "recompute")),  # of a head that is trained
        # The loss is exact with a filter too; its gradients are off by what the tolerance allows, and the next losses.
        (("loss.mode=sparse", "loss.filter=certified", "loss.tolerance=1e-4"), 1e-3),
        (("loss.mode=sparse", "loss.filter=unbiased", "loss.tolerance=1e-4"), 1e-3),
        (("loss.filter=tile", "loss.epsilon=1e-4"), 1e-3),
    ],
    ids=["auto", "stream", "chunk", "recompute", "certified", "unbiased", "tile"],
)
def test_every_way_to_the_loss_trains_with_the_same_losses(tmp_path, dense_losses, overrides, later):
    runs.go(runs.settings(tmp_path, *overrides, steps=3, lr=1e-3), tmp_path / "run")
    losses, dense = list(runs.losses(tmp_path / "run").values()), dense_losses[0 if "lora.rank=0" in overrides else 4]
    assert losses[0] == pytest.approx(dense[0], rel=1e-5)
    assert losses == pytest.approx(dense, rel=later)


@long
@pytest.mark.parametrize("overrides", [(), ("lora.bits=8",), ("lora.bits=4", "model.family=llama3")])
def test_fit_finds_what_training_then_plans(tmp_path, overrides):
    from cutloss.sft import fit

    settings = runs.settings(tmp_path, *overrides)
    plan = fit.planner(settings)
    small, large = plan(2, 64), plan(8, 128)
    _, events = runs.go(settings, tmp_path / "run")
    (compiled,) = [e for e in events if e["event"] == "compiled"]
    assert compiled["planned_bytes"] == small < large
    points = list(fit.frontier(settings, small, (2, 8), (64, 128)))
    assert [(p.batch, p.context) for p in points if p.fits] == [(2, 64)]


def test_a_mesh_larger_than_the_machine_is_refused(tmp_path):
    with pytest.raises(config.ConfigError, match=r"fsdp 64 x tp 1 needs 64 devices, there are \d+; on CPU set JAX_NUM_CPU"):
        run.make_mesh(runs.settings(tmp_path, "mesh.fsdp=64", batch=64))
