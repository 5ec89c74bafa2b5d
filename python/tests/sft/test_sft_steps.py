"""What the steps of a run do to the adapters: accumulation, precision, rematerialisation, the softcap, the smallest models."""

import json

import numpy as np
import pytest
import runs

from cutloss.sft import adapter, config, data, families, models, tokenizers, trainer

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("quick_compilation")]


def saved_adapters(out):
    from safetensors.numpy import load_file

    return load_file(out / "adapter.safetensors")


def attention(arrays):
    """{name: B} of attention. Tunix starts every MLP at zero, where its adapters have no gradient either."""
    found = {name: array for name, array in arrays.items() if name.endswith("lora_b") and "/attn/" in name}
    assert found
    return found


def first(events, name):
    return next(event for event in events if event["event"] == name)


def test_logged_loss_and_gradient_norm_are_the_updates(tmp_path):
    """8 rows of unequal targets at a time: 1 x 8, 2 x 4, 4 x 2 and 8 x 1 are one update, and are logged as one."""
    found = {}
    for accumulation in (1, 2, 4, 8):
        settings = runs.settings(tmp_path, batch=8 // accumulation, accumulation=accumulation, steps=1)
        _, events = runs.go(settings, tmp_path / str(accumulation))
        step = first(events, "step")
        found[accumulation] = (step["loss"], step["grad_norm"])
    for accumulation in (2, 4, 8):
        assert found[accumulation] == pytest.approx(found[1], rel=1e-5), found


def test_clipping_is_of_the_updates_gradient(tmp_path):
    """The norm that is logged is the one before it, for one micro-batch and for several."""
    free, clipped = {}, {}
    for accumulation in (1, 2):
        for found, clip in ((free, []), (clipped, ["train.clip=0.01"])):
            settings = runs.settings(tmp_path, *clip, batch=4 // accumulation, accumulation=accumulation, steps=1)
            _, events = runs.go(settings, tmp_path / f"{accumulation}{bool(clip)}")
            found[accumulation] = first(events, "step")["grad_norm"]
    assert free[1] > 0.01
    assert clipped == pytest.approx(free, rel=1e-5) and free[2] == pytest.approx(free[1], rel=1e-5)


def test_low_precision_weights_keep_adapters_and_moments_in_f32(tmp_path):
    """An update of 1e-5 of a bf16 number is none, and a second moment in bf16 collapses."""
    import jax
    from flax import nnx

    settings = runs.settings(tmp_path, "model.dtype=bfloat16", steps=20, lr=1e-5)
    runs.go(settings, tmp_path / "run")
    saved = saved_adapters(tmp_path / "run")
    fresh = models.load(models.find(settings.model), settings)
    state = jax.tree.leaves(nnx.to_pure_dict(nnx.state(fresh, nnx.LoRAParam)))
    assert all(array.dtype == np.float32 for array in [*saved.values(), *state])
    assert all(np.abs(b).max() > 0 for b in attention(saved).values())
    moments = nnx.state(trainer.build(fresh, settings, None).optimizer, nnx.optimizer.OptState)
    assert {leaf.dtype for leaf in jax.tree.leaves(moments) if leaf.ndim} == {np.dtype(np.float32)}


def steps(settings, examples, context=64):
    """Trains on these rows in their order; returns [(loss, norm of the gradient, adapters)] after each step."""
    model, seen = models.load(models.find(settings.model), settings), []
    made = trainer.with_loss(trainer.build(model, settings, None), settings)

    def step(number, losses, norm, seconds):
        seen.append((sum(losses) / len(losses), norm, adapter.of(made.model)[0]))

    trainer.measure(made, lambda *_: None, step)
    trainer.train(made, data.Batches(examples, settings.train.batch, context, settings.train.accumulation))
    return seen


def rows(folder, count):
    pairs, _ = data.load(runs.pairs(folder))
    return [data.encode(pair, tokenizers.Bytes(), 64, "{source}:") for pair in pairs[:count]]


def without_targets(row):
    return data.Example(row.tokens, len(row.tokens))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_first_step_without_targets_leaves_the_next_ones_alone(tmp_path, dtype):
    """Adam's 0 / (sqrt(0) + eps) is NaN where eps is nothing, as 1e-8 is in f16, and a mean over no target is 0 / 0."""
    settings = runs.settings(tmp_path, f"model.dtype={dtype}", "evaluation.every=0", steps=2, lr=1e-3)
    one = rows(tmp_path, 4)
    (loss, norm, idle), (_, after, trained) = steps(settings, [*map(without_targets, one[:2]), *one[2:]])
    assert (loss, norm) == (0, 0) and after > 0
    assert all((array == 0).all() for name, array in idle.items() if name.endswith("lora_b"))
    assert all(np.isfinite(array).all() for array in trained.values())
    assert all(np.abs(b).max() > 0 for b in attention(trained).values())


def test_a_micro_batch_without_targets_leaves_the_step_to_the_others(tmp_path):
    one = rows(tmp_path, 2)
    whole = steps(runs.settings(tmp_path, steps=1), one)
    parts = runs.settings(tmp_path, steps=1, accumulation=4)
    for at in (0, 2, 3):
        groups = [list(map(without_targets, one)) for _ in range(4)]
        groups[at] = one
        ((loss, norm, adapters),) = steps(parts, [row for group in groups for row in group])
        assert (loss, norm) == pytest.approx(whole[0][:2], rel=1e-6)
        for name, array in whole[0][2].items():
            # Adam's first step is the sign of the gradient times the rate: alike but where the gradient is rounding.
            assert np.abs(adapters[name] - array).mean() <= 1e-4 * 1e-2, name


def test_rematerialisation_cuts_no_layer_off(tmp_path):
    found = {}
    for remat in ("NONE", "BLOCK", "DECODER"):
        settings = runs.settings(tmp_path, f"model.remat={remat}", "model.sizes={num_layers: 4}", steps=2)
        runs.go(settings, tmp_path / remat)
        found[remat] = runs.losses(tmp_path / remat), saved_adapters(tmp_path / remat)
    losses, plain = found["NONE"]
    for remat in ("BLOCK", "DECODER"):
        others, arrays = found[remat]
        assert others == pytest.approx(losses, rel=1e-6)
        assert all(np.abs(b).max() > 0 for b in attention(arrays).values())
        for name, array in arrays.items():
            # Adam's step of 1e-2 from a gradient that is only rounding may differ by itself, in few places.
            assert np.abs(array - plain[name]).mean() <= 1e-4, name


@pytest.mark.parametrize("family", ["gemma2", "gemma4"])
def test_softcap_of_the_configuration_reaches_training_and_evaluation(tmp_path, family):
    """Greedy answers do not show it: tanh keeps the order."""
    found = {}
    layers = 4 if family == "gemma4" else 1
    for cap in (0.05, "null"):
        sizes = f"model.sizes={{num_layers: {layers}, final_logit_softcap: {cap}}}"
        for arm in ("cutloss", "dense"):
            settings = runs.settings(tmp_path, sizes, f"loss.arm={arm}", "evaluation.every=1", family=family, steps=1)
            _, events = runs.go(settings, tmp_path / f"{cap}-{arm}")
            found[cap, arm] = (first(events, "step")["loss"], first(events, "evaluated")["loss"])
    for cap in (0.05, "null"):
        assert found[cap, "cutloss"] == pytest.approx(found[cap, "dense"], rel=1e-5)
    for k in (0, 1):  # capped so low, all logits are nearly one
        assert abs(found[0.05, "cutloss"][k] - np.log(families.TINY_VOCAB)) <= 0.1
        assert abs(found[0.05, "cutloss"][k] - found["null", "cutloss"][k]) >= 1e-3


def test_perplexity_means_the_same_with_either_loss(tmp_path):
    found = {}
    for arm in ("cutloss", "dense"):
        settings = runs.settings(tmp_path, f"loss.arm={arm}", "evaluation.every=2", "evaluation.batches=3", steps=4, lr=1e-3)
        _, events = runs.go(settings, tmp_path / arm)
        found[arm] = [(e["loss"], e["perplexity"]) for e in events if e["event"] == "evaluated"]
    assert len(found["dense"]) == 3
    for ours, dense in zip(found["cutloss"], found["dense"], strict=True):
        assert ours == pytest.approx(dense, rel=1e-5) and ours[1] == pytest.approx(np.exp(ours[0]), rel=1e-6)


WORDS = ["<pad>", "<end>", *(f"w{i}" for i in range(29)), ":"]


def word_tokenizer(folder):
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers import models as parts

    made = Tokenizer(parts.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>", "pad_token": "<pad>"}))


@pytest.mark.parametrize("heads", [(1, 1), (4, 1)], ids=["one head", "grouped heads"])
@pytest.mark.parametrize("family", families.FAMILIES)
def test_the_smallest_model_of_every_family_learns(tmp_path, family, heads):
    """Width 8, 32 ids, context 16, rank 1, batch 1: 20 steps on one row, whose loss no noise of other rows hides."""
    word_tokenizer(tmp_path)
    path = tmp_path / "words.tsv"
    path.write_text("w0 w1\tw2 w2\n")
    layers = 4 if family == "gemma4" else 1
    sizes = {
        "num_layers": layers,
        "num_heads": heads[0],
        "num_kv_heads": heads[1],
        "embed_dim": 8,
        "hidden_dim": 8,
        "head_dim": 8,
        families.FAMILIES[family].vocab: len(WORDS),
    }
    settings = config.load(
        None,
        [f"model.family={family}", f"model.sizes={json.dumps(sizes)}", f"model.tokenizer={tmp_path}", f"data.path={path}",
         "data.prompt='{source} :'", "lora.rank=1", "train.batch=1", "train.context=16", "train.steps=20", "train.lr=2e-2"],
    )  # fmt: skip
    runs.go(settings, tmp_path / "run")
    losses = list(runs.losses(tmp_path / "run").values())
    assert losses[-1] < losses[0] - 1e-3  # rounding moves them by 1e-6
