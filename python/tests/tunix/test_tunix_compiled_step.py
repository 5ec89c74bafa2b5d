"""The compiled train step of a real PeftTrainer: the tapped dense head must be gone from it."""

import contextlib

import numpy as np
import pytest
import tiny_gemma3 as tiny

import cutloss.tunix as ct
from cutloss.sft import hlo
from cutloss.sft import trainer as training

ROWS, LENGTH = 4, 64


@pytest.fixture(scope="module")
def steps():
    def compiled(patch):
        with patch:
            trainer = tiny.trainer(tiny.lora_model())
            return training.compile_step(trainer, tiny.batch(rows=ROWS, length=LENGTH))

    return {"default": compiled(contextlib.nullcontext()), "cutloss": compiled(ct.patched())}


def logits(step):
    return hlo.logit_arrays(step.as_text(), vocab=tiny.VOCAB)


def test_tapped_dense_head_is_removed_by_the_compiler(steps):
    assert logits(steps["cutloss"]) == {}


def test_scan_sees_the_logits_where_there_are_some(steps):
    """Without this the test above would pass on a scan that sees nothing."""
    assert max(logits(steps["default"]).values()) >= ROWS * (LENGTH - 1)


def test_planned_memory_shrinks_by_the_logits(steps):
    # The default loss holds the logits and at least one more array of their size (log-softmax) at once.
    one_array = ROWS * (LENGTH - 1) * tiny.VOCAB * 4
    saved = training.planned_bytes(steps["default"]) - training.planned_bytes(steps["cutloss"])
    assert saved >= one_array


def test_self_check_is_not_in_the_compiled_step(steps):
    assert "callback" not in steps["cutloss"].as_text()


def test_measured_training_is_tunix_training(steps):
    """The demo hands Tunix a compiled step: the trainer must count, update and end as it does by itself."""
    import jax
    from flax import nnx

    data = [tiny.batch(rows=ROWS, length=LENGTH, seed=seed) for seed in range(2)]

    def adapters(run):
        trainer = tiny.trainer(tiny.lora_model())
        run(trainer)
        assert trainer.train_steps == len(data)
        return jax.tree.leaves(nnx.to_pure_dict(nnx.state(trainer.model, nnx.LoRAParam)))

    losses = []

    def run_measured(trainer):
        training.measure(trainer, lambda *_: None, lambda n, found, norms, seconds: losses.append((n, *found)))
        training.train(trainer, data)

    measured = adapters(run_measured)
    plain = adapters(lambda t: t.train(data))
    assert [n for n, _ in losses] == [1, 2]
    for a, b in zip(measured, plain, strict=True):
        np.testing.assert_array_equal(a, b)


def test_non_finite_loss_stops_training(monkeypatch):
    trainer = tiny.trainer(tiny.lora_model())
    result = (np.float32("nan"), None, np.float32(0))
    monkeypatch.setattr(training, "compile_step", lambda *_: lambda model, optimizer, example: result)
    training.measure(trainer, lambda *_: None, lambda *_: None)
    with pytest.raises(training.Stopped, match="loss of step 1 is nan"):
        training.train(trainer, [tiny.batch()])
