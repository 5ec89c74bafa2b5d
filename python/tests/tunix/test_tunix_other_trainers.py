"""Trainers with losses of their own (DPO, ORPO, distillation, RL) compute the same losses while the patch is installed,
and Tunix's second PeftTrainer, which came after 0.1.7, gets it."""

import sys
import types

import numpy as np
import pytest
import tiny_gemma3 as tiny

import cutloss.tunix as ct


def preference(algorithm):
    import optax
    from tunix.sft.dpo import dpo_trainer

    config = dpo_trainer.DPOTrainingConfig(
        algorithm=algorithm, eval_every_n_steps=10**6, max_prompt_length=4, max_response_length=8
    )
    reference = tiny.model() if algorithm == "dpo" else None
    trainer = dpo_trainer.DPOTrainer(tiny.lora_model(), reference, optax.sgd(0.0), config)
    rng = np.random.default_rng(0)
    fields = {}
    for name, length in (("prompt", 4), ("chosen", 8), ("rejected", 8)):
        fields[f"{name}_ids"] = rng.integers(1, tiny.VOCAB, (2, length)).astype(np.int32)
        fields[f"{name}_mask"] = np.ones((2, length), np.int32)
    return trainer, dpo_trainer.TrainingInput(**fields)


def distillation():
    import jax
    import optax
    from tunix.distillation import distillation_trainer, strategies

    def forward(model, input_tokens, input_mask):
        positions = np.tile(np.arange(input_tokens.shape[1]), (len(input_tokens), 1))
        causal = np.tile(np.tril(np.ones((input_tokens.shape[1],) * 2, bool)), (len(input_tokens), 1, 1))
        return model(input_tokens, positions, None, causal)[0]

    def labels(input_tokens, input_mask):
        return jax.nn.one_hot(input_tokens, tiny.VOCAB)

    strategy = strategies.LogitStrategy(forward, forward, labels)
    config = distillation_trainer.TrainingConfig(eval_every_n_steps=10**6)
    trainer = distillation_trainer.DistillationTrainer(tiny.lora_model(), tiny.model(), strategy, optax.sgd(0.0), config)
    data = tiny.batch()
    return trainer, distillation_trainer.TrainingInput(input_tokens=data["input_tokens"], input_mask=data["input_mask"])


def reinforcement():
    import optax
    from tunix.rl import common, trainer
    from tunix.sft import peft_trainer

    def loss(model, input_tokens, input_mask, positions, attention_mask):
        found = common.get_per_token_logps(model, input_tokens, positions, attention_mask, 6)
        return -found.mean(), {"mean": found.mean()}

    config = peft_trainer.TrainingConfig(eval_every_n_steps=10**6)
    made = trainer.Trainer(tiny.lora_model(), optax.sgd(0.0), config, custom_checkpoint_metadata_fn=dict)
    return made.with_loss_fn(loss, has_aux=True), tiny.batch()


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(lambda: preference("dpo"), id="dpo"),
        pytest.param(lambda: preference("orpo"), id="orpo", marks=pytest.mark.long),
        pytest.param(distillation, id="distillation", marks=pytest.mark.long),
        pytest.param(reinforcement, id="rl", marks=pytest.mark.long),
    ],
)
def test_other_trainers_compute_the_same_while_installed(build):
    def loss():
        trainer, example = build()
        assert not hasattr(trainer.loss_fn, "cutloss_settings")
        seen = []
        trainer._post_process_train_step = lambda aux: seen.append(float(trainer._buffered_train_metrics.losses[0]))
        trainer.train([example])
        return seen

    before = loss()
    with ct.patched(strict=True):
        assert loss() == before
    assert len(before) == 1 and np.isfinite(before[0]) and before[0] != 0


# ---- the second trainer of newer Tunix ---------------------------------------------------------------------------------

SECOND = "tunix.experimental.train.peft_trainer_v2"


@pytest.fixture
def second(monkeypatch):
    """A double of that module, which is a copy of the first with a default loss of its own."""
    module = types.ModuleType(SECOND)

    class PeftTrainer:
        def train(self, dataset): ...

    module.PeftTrainer, module._default_loss_fn = PeftTrainer, lambda model, **batch: 1.0
    for name in ("tunix.experimental", "tunix.experimental.train"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, SECOND, module)
    return module


def test_the_second_trainer_is_patched_and_given_back(second):
    own, train = second._default_loss_fn, second.PeftTrainer.train
    with ct.patched():
        assert hasattr(second._default_loss_fn, "cutloss_settings") and second.PeftTrainer.train is not train
    assert second._default_loss_fn is own and second.PeftTrainer.train is train


def test_a_second_trainer_that_lacks_a_module_is_named(second, monkeypatch, tmp_path, recwarn):
    """Left out without a word, its trainers would run with the memory of the logits. A Tunix without it says nothing."""
    monkeypatch.delitem(sys.modules, SECOND)
    with ct.patched():
        pass
    assert not [w for w in recwarn if issubclass(w.category, ct.CutLossWarning)]
    package = sys.modules["tunix.experimental.train"]
    monkeypatch.setattr(package, "__path__", [str(tmp_path)], raising=False)
    (tmp_path / "peft_trainer_v2.py").write_text("import no_such_dependency\n")
    with pytest.warns(ct.CutLossWarning, match="peft_trainer_v2 cannot be imported .*no_such_dependency"), ct.patched():
        assert ct.is_installed()
