"""The whole train step of a PeftTrainer, of every family: memory, compilations, answers, quantised weights, checkpoints."""

import contextlib

import numpy as np
import pytest
import tiny

import cutloss.tunix as ct

MIB = 2**20


# A table of 8 MiB in f32, four times the logits of 64 tokens: a copy of it, or of half, is more than the logits saved.
WIDTH, VOCAB = 256, 8193
TUNIX = [("gemma", True), ("gemma2", True), ("gemma3", True), ("gemma4", True)]
TUNIX += [(family, tied) for family in ("qwen2", "qwen3", "llama3") for tied in (True, False)]
GRID = [
    *((*family, 1, 64, 4) for family in TUNIX),
    *(("gemma3", True, rows, length, 4) for rows, length in ((1, 96), (1, 256), (1, 1024), (2, 64), (3, 65), (8, 64))),
    ("gemma2", True, 2, 256, 4),
    ("llama3", False, 4, 64, 4),
    ("gemma3", True, 1, 64, 0),  # every weight trained
    ("qwen3", False, 1, 64, 0),
]


def planned(family, tied, rows, length, rank, arm):
    from cutloss.sft import config, families, fit

    layers = 4 if family == "gemma4" else 1
    sizes = f"{{num_layers: {layers}, embed_dim: {WIDTH}, {families.FAMILIES[family].vocab}: {VOCAB}}}"
    choices = [f"model.family={family}", f"model.tied={tied}", f"model.sizes={sizes}", f"lora.rank={rank}"]
    return fit.planner(config.load(None, [*choices, f"loss.arm={arm}"]))(rows, length)


@pytest.mark.long
@pytest.mark.parametrize(("family", "tied", "rows", "length", "rank"), GRID)
def test_step_plans_no_more_than_the_default_loss(family, tied, rows, length, rank):
    """An earlier attempt at this loss padded and copied the table: small shapes took more memory than without it."""
    dense, ours = (planned(family, tied, rows, length, rank, arm) for arm in ("dense", "cutloss"))
    assert ours <= dense + MIB


@pytest.mark.long
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_greedy_answers_are_those_of_the_unpatched_library(family):
    from tunix.generate import sampler as sampling
    from tunix.tests import test_common

    vocab = test_common.MockVocab()
    model = tiny.lora_model(family, vocab=vocab.GetPieceSize())
    cache = sampling.CacheConfig(
        cache_size=32,
        num_layers=model.config.num_layers,
        num_kv_heads=model.config.num_kv_heads,
        head_dim=model.config.head_dim,
    )

    def answer(sampler):
        # Logits can be asked for of Gemma alone (test_tunix_patch.py does).
        return np.asarray(sampler(["input string"], max_generation_steps=8, temperature=0.0).tokens[0]).tolist()

    before = sampling.Sampler(model, vocab, cache)
    tokens = answer(before)
    with ct.patched():
        trainer = tiny.trainer(model, learning_rate=0.0)
        trainer.train([tiny.batch(vocab=vocab.GetPieceSize())])
        during = sampling.Sampler(model, vocab, cache)
        assert answer(during) == tokens
    for sampler in (before, during, sampling.Sampler(model, vocab, cache)):
        assert answer(sampler) == tokens


def values_and_grads(model, data):
    from tunix.sft import peft_trainer

    return tiny.values_and_grads([peft_trainer._default_loss_fn, ct.loss_fn(strict=True)], model, data)


@pytest.mark.long
@pytest.mark.parametrize("family", tiny.QUANTISABLE)
def test_quantised_weights_under_the_adapters_keep_the_gradients(family):
    """QLoRA: the head itself stays as it is, since module_path does not name it."""
    model = tiny.quantised_model(family)
    (dense, dense_grads), (ours, grads) = values_and_grads(model, tiny.batch())
    assert abs(ours - dense) <= 1e-5 * abs(dense)
    for name, gradient in dense_grads.items():
        assert np.linalg.norm(grads[name] - gradient) <= 1e-5 * np.linalg.norm(gradient), name
    ct.loss_fn(model, strict=True)  # the self-check


@pytest.mark.long
@pytest.mark.parametrize("family", sorted(set(tiny.FAMILIES) - set(tiny.QUANTISABLE)))
def test_families_without_quantised_weights_are_those_tunix_cannot_run(family):
    """If one of them runs some day, it belongs to tiny.QUANTISABLE, and docs/tunix.md is out of date."""
    with pytest.raises(TypeError):
        tiny.quantised_model(family)


@pytest.mark.long
def test_quantised_head_is_refused_by_name():
    model = tiny.quantised_model("qwen3-untied", path=".*lm_head")
    with pytest.raises(ct.UnsupportedModelError, match="quantised|adapters sit on its head"):
        ct.loss_fn(strict=True)(model, **tiny.batch())


@pytest.mark.long
def test_trainer_compiles_once():
    data = [tiny.batch(seed=seed) for seed in range(3)]
    with ct.patched():
        trainer = tiny.trainer(tiny.lora_model())
        trainer.train(data[:1])
        trainer.train(data)
    assert trainer.jit_train_and_eval_step()[0].func.jitted_fn._cache_size() == 1


@pytest.mark.long
def test_checkpoints_are_those_of_the_default_loss(tmp_path):
    """The patch adds nothing to the model's state: a checkpoint of one run is restored by the other."""

    def run(name, patch):
        with patch:
            trainer = tiny.trainer(tiny.lora_model(), checkpoint_root_directory=str(tmp_path / name))
            trainer.train([tiny.batch()])
        return sorted(p.relative_to(tmp_path / name).parts[1:2] for p in (tmp_path / name).glob("*/*"))

    assert run("dense", contextlib.nullcontext()) == run("ours", ct.patched())
    restored = tiny.trainer(tiny.lora_model(), checkpoint_root_directory=str(tmp_path / "ours"))
    assert restored.train_steps == 1


@pytest.mark.long
def test_accumulation_weights_micro_batches_as_tunix_does():
    """0.1.7: the mean of their means, however few targets one has."""
    masks = [np.ones((2, 12), bool), np.eye(2, 12, 5, dtype=bool)]
    data = [tiny.batch(seed=seed, mask=mask) for seed, mask in enumerate(masks)]

    def weights(patch):
        import jax
        from flax import nnx

        with patch:
            trainer = tiny.trainer(tiny.lora_model(), gradient_accumulation_steps=2)
            trainer.train(data)
        assert trainer.train_steps == 1
        return jax.tree.leaves(nnx.to_pure_dict(nnx.state(trainer.model, nnx.LoRAParam)))

    # Adam's first step is lr = 1e-2 times the gradient's sign, almost: a wrong weight flips signs, 2e-2 apart.
    for a, b in zip(weights(contextlib.nullcontext()), weights(ct.patched()), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4)
