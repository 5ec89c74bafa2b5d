"""The whole train step of a PeftTrainer, of every family: memory, compilations, answers, quantised weights, checkpoints."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import optax
import pytest
import tiny

import cutloss.tunix as ct
from cutloss.tunix import loss

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


GREEDY = Path(__file__).with_name("greedy_answers.py")


@pytest.mark.long
def test_greedy_answers_are_those_of_the_unpatched_library(tmp_path):
    """Before, during and after a training that changes them, of every family: a process without cutloss says which."""
    import greedy_answers
    import jax
    from flax import nnx

    found = {}
    for family in tiny.FAMILIES:
        model = greedy_answers.build(family)
        before = greedy_answers.sampler(model)
        untrained = greedy_answers.ask(before)
        with ct.patched():
            # Every weight, and one answer to all: adapters leave a model of one layer repeating its last token.
            data = [tiny.batch(rows=4, vocab=greedy_answers.vocab_size(), seed=seed) for seed in range(6)]
            for one in data:
                one["input_tokens"][:, 1::2] = 7
                one["input_mask"] = one["input_tokens"] == 7
            trainer = tiny.trainer(model, learning_rate=0.1)
            trainer.train(data)
            during = greedy_answers.sampler(model)
            trained = greedy_answers.ask(during)
        # A Sampler shares the model's weights, also one that was built before they were trained.
        for made in (before, during, greedy_answers.sampler(model)):
            assert greedy_answers.ask(made) == trained, family
        assert trained != untrained, family
        np.savez(tmp_path / f"{family}.npz", *map(np.asarray, jax.tree.leaves(nnx.state(model, nnx.Param))))
        found[family] = [untrained, trained]
    command = [sys.executable, str(GREEDY), str(tmp_path), *tiny.FAMILIES]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == found


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
    model = tiny.quantised_model(family)
    with pytest.raises(TypeError, match="astype requires ndarray or scalar arguments"):
        loss.tunix_loss()(model, **tiny.batch())


@pytest.mark.long
def test_quantised_head_is_refused_by_name():
    model = tiny.quantised_model("qwen3-untied", path=".*lm_head")
    with pytest.raises(ct.UnsupportedModelError, match="quantised|adapters sit on its head"):
        ct.loss_fn(strict=True)(model, **tiny.batch())


@pytest.mark.long
def test_trainer_compiles_once():
    """With evaluation and accumulation: every micro-batch, and each evaluation's batches, in one program each."""
    data = [tiny.batch(seed=seed) for seed in range(4)]
    with ct.patched():
        trainer = tiny.trainer(tiny.lora_model(), gradient_accumulation_steps=2, evaluate_every=1)
        trainer.is_managed_externally = True  # train() then leaves the trainer open for a second call
        trainer.train(data[:2], data[:2])
        trainer.train(data, data[:2])
    assert trainer.train_steps == 3
    for step in trainer.jit_train_and_eval_step():
        assert step.func.jitted_fn._cache_size() == 1


def lora(model):
    """The adapters as arrays by name."""
    import jax
    from flax import nnx

    leaves = jax.tree_util.tree_flatten_with_path(nnx.to_pure_dict(nnx.state(model, nnx.LoRAParam)))[0]
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def assert_same_change(start, dense, ours):
    """Of plain descent the change is the gradient: within 1e-5 of its norm, as of one step (test_tunix_families.py)."""
    for name, first in start.items():
        change = dense[name] - first
        # Beside it, the rounding of the weight itself: half a unit of f32 of each element, in both.
        rounding = 2.0**-23 * np.linalg.norm(first)
        assert np.linalg.norm(ours[name] - dense[name]) <= 1e-5 * np.linalg.norm(change) + rounding, name
        assert np.linalg.norm(change) > 100 * rounding, name


@pytest.mark.long
def test_checkpoints_are_those_of_the_default_loss(tmp_path):
    """The patch adds nothing to the model's state: either run goes on from the other's checkpoint."""
    import jax
    import orbax.checkpoint as orbax

    arms = {"dense": contextlib.nullcontext, "ours": ct.patched}
    ended = {}
    for name, patch in arms.items():
        with patch():
            trainer = tiny.trainer(tiny.lora_model(), checkpoint_root_directory=str(tmp_path / name))
            trainer.train([tiny.batch()])
        ended[name] = lora(trainer.model)

    def saved(name):
        items = (tmp_path / name / "1" / item for item in ("model_params", "optimizer_state"))
        leaves = jax.tree_util.tree_flatten_with_path([orbax.PyTreeCheckpointer().restore(item) for item in items])[0]
        return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}

    dense, ours = saved("dense"), saved("ours")
    assert {n: (a.shape, a.dtype) for n, a in dense.items()} == {n: (a.shape, a.dtype) for n, a in ours.items()}
    assert len(dense) > 2 * len(ended["dense"])  # the weights, and two moments of each
    for saver, restorer in (("dense", "ours"), ("ours", "dense")):
        with arms[restorer]():
            # One more step from there; train() passes over the batches that were.
            trainer = tiny.trainer(tiny.lora_model(), checkpoint_root_directory=str(tmp_path / saver))
            assert trainer.train_steps == 1
            for name, array in lora(trainer.model).items():
                np.testing.assert_array_equal(array, ended[saver][name])
            trainer.train([tiny.batch(), tiny.batch(seed=1)])
            assert trainer.train_steps == 2


@pytest.mark.long
@pytest.mark.parametrize("parts", [1, 4])
def test_accumulation_weights_micro_batches_as_tunix_does(parts):
    """0.1.7: the mean of their means, however few targets one has."""
    shares = (1.0, 0.1, 0.5, 0.25)
    masks = [np.random.default_rng(i).random((2, 12)) < share for i, share in enumerate(shares)]
    data = [tiny.batch(seed=seed, mask=mask) for seed, mask in enumerate(masks)]
    start = lora(tiny.lora_model())

    def weights(patch):
        with patch:
            accumulate = parts if parts > 1 else None
            trainer = tiny.trainer(tiny.lora_model(), optimizer=optax.sgd(0.1), gradient_accumulation_steps=accumulate)
            trainer.train(data[:parts])
        assert trainer.train_steps == 1
        return lora(trainer.model)

    assert_same_change(start, weights(contextlib.nullcontext()), weights(ct.patched()))


@pytest.mark.long
def test_a_step_without_compilation_is_the_same():
    """What `skip_jit` runs. Not through `train`, which in 0.1.7 leaves the step's model and optimizer out."""
    start = lora(tiny.lora_model())

    def weights(patch):
        with patch:
            trainer = tiny.trainer(tiny.lora_model(), optimizer=optax.sgd(0.1))
            step, _ = trainer.jit_train_and_eval_step(skip_jit=True)
            step(trainer.model, trainer.optimizer, tiny.batch())
        return lora(trainer.model)

    assert_same_change(start, weights(contextlib.nullcontext()), weights(ct.patched()))
