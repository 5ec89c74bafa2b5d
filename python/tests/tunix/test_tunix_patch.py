"""What the patch touches, what it leaves alone, and what it refuses."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
import tiny_gemma3 as tiny

import cutloss.tunix as ct
from cutloss.tunix import adapters, selfcheck

cut_loss_fn = ct.loss_fn()
OWN_LOSS = 123.0  # of a stand-in for Tunix's default loss


def test_import_does_not_load_tunix():
    """Tunix takes seconds to import and drags in pandas; a user of `cutloss` alone must not pay."""
    code = "import sys, cutloss.tunix; sys.exit(any(m == 'tunix' or m.startswith('tunix.') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_body_that_ends_first_takes_the_patch_from_one_that_is_open():
    first, second = ct.patched(), ct.patched()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert ct.is_installed()
    second.__exit__(None, None, None)
    assert not ct.is_installed()


def test_uninstall_restores_the_very_objects():
    from tunix.models.gemma3.model import Embedder
    from tunix.sft import peft_trainer

    def objects():
        return peft_trainer._default_loss_fn, peft_trainer.PeftTrainer.train, vars(Embedder)["decode"]

    before = objects()
    with ct.patched():
        ct.install()  # twice is once
        assert ct.is_installed() and objects()[0] is cut_loss_fn
        cut_loss_fn(tiny.model(), **tiny.batch())
        assert vars(Embedder)["decode"] is before[2]  # on the class during the trace only
    assert not ct.is_installed()
    assert all(now is then for now, then in zip(objects(), before, strict=True))


def test_failing_trace_leaves_no_tap_behind():
    from tunix.models.gemma3.model import Embedder

    original = vars(Embedder)["decode"]
    with pytest.raises(Exception, match="."):
        cut_loss_fn(tiny.model(), **{**tiny.batch(), "positions": "not an array"})
    assert vars(Embedder)["decode"] is original


def test_no_tracer_outlives_the_trace():
    """A kept tracer keeps the whole trace alive, and using it later is an error far from its cause."""
    import jax

    from cutloss.tunix import tap

    records = []

    def forward(x):
        model = tiny.model()
        with tap.tap(model.embedder, "decode") as record:
            model.embedder.decode(x)
            records.append(record)
            assert len(record.calls) == 1
        return x

    jax.jit(forward)(np.zeros((1, tiny.WIDTH), np.float32))
    assert records[0].calls == [] and tap._wrapped == {}


def test_another_thread_is_not_recorded():
    """A Sampler may run beside a trace; its logits must not be taken for the loss's."""
    import threading

    from cutloss.tunix import tap

    embedder = tiny.model().embedder
    x = np.zeros((1, tiny.WIDTH), np.float32)
    with tap.tap(embedder, "decode") as record:
        thread = threading.Thread(target=embedder.decode, args=(x,))
        thread.start()
        thread.join()
        assert record.calls == []
        embedder.decode(x)
        assert len(record.calls) == 1


def test_trainer_trains_alike_with_and_without():
    data = [tiny.batch(seed=seed) for seed in range(3)]

    def weights():
        from flax import nnx

        model = tiny.lora_model()
        tiny.trainer(model).train(data)
        import jax

        return jax.tree.leaves(nnx.to_pure_dict(nnx.state(model, nnx.LoRAParam)))

    dense = weights()
    with ct.patched():
        ours = weights()
    # Adam divides a gradient by its own size: a relative error r of it moves a step of size lr by lr * r. Small
    # gradients have large r, so bound the whole: three steps of lr = 1e-2, each off by at most 1 %.
    for a, b in zip(dense, ours, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=3e-4)


def test_trainers_with_a_loss_of_their_own_are_untouched():
    def own_loss(model, input_tokens, input_mask, positions, attention_mask):
        logits, _ = model(input_tokens, positions, None, attention_mask)
        assert logits.shape[-1] == tiny.VOCAB
        return (logits**2).mean()

    with ct.patched():
        trainer = tiny.trainer(tiny.lora_model()).with_loss_fn(own_loss)
        assert trainer.loss_fn is own_loss and trainer.eval_loss_fn is own_loss
        trainer.train([tiny.batch()])


def test_generation_is_identical_before_during_and_after():
    from tunix.generate import sampler as sampling
    from tunix.tests import test_common

    vocab = test_common.MockVocab()
    model = tiny.lora_model(vocab=vocab.GetPieceSize())
    cache = sampling.CacheConfig(cache_size=32, num_layers=1, num_kv_heads=1, head_dim=8)

    def build():
        return sampling.Sampler(model, vocab, cache)

    def tokens(sampler):
        out = sampler(["input string"], max_generation_steps=8, temperature=0.0, return_logits=True)
        return np.asarray(out.tokens[0]).tolist(), np.asarray(out.logits[0])

    built_before = build()
    expected, logits = tokens(built_before)
    assert logits.shape[-1] == vocab.GetPieceSize()
    with ct.patched():
        data = tiny.batch(vocab=vocab.GetPieceSize())
        trainer = tiny.trainer(model, learning_rate=0.0)
        trainer.train([data])
        built_during = build()
        for sampler in (built_before, built_during):
            assert tokens(sampler)[0] == expected
    for sampler in (built_before, built_during, build()):
        again, again_logits = tokens(sampler)
        assert again == expected
        np.testing.assert_array_equal(again_logits, logits)


def test_evaluation_uses_the_loss_too():
    with ct.patched():
        trainer = tiny.trainer(tiny.lora_model())
        assert trainer.eval_loss_fn is cut_loss_fn


def test_existing_trainer_can_be_switched():
    trainer = tiny.trainer(tiny.lora_model())
    assert ct.with_cut_loss(trainer) is trainer
    assert trainer.loss_fn is cut_loss_fn
    trainer.train([tiny.batch()])


# ---- the self-check ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_self_check_passes_a_right_adapter(dtype):
    from tunix.sft import peft_trainer

    selfcheck.check(tiny.lora_model(dtype), peft_trainer._default_loss_fn)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_self_check_catches_a_wrong_softcap(dtype, monkeypatch):
    family = next(family for family in adapters.FAMILIES if family.name == "Gemma3")
    wrong = dataclasses.replace(family, softcap=lambda model: 5.0)  # this Gemma 3 does not apply one
    monkeypatch.setattr(adapters, "FAMILIES", (wrong,))
    with ct.patched(), pytest.raises(ct.SelfCheckError, match=r"own loss is [\d.]+, cutloss gives [\d.]+"):
        tiny.trainer(tiny.lora_model(dtype)).train([tiny.batch()])


def test_self_check_runs_once_a_trainer(monkeypatch):
    calls = []
    monkeypatch.setattr(selfcheck, "check", lambda model, loss, settings: calls.append(loss))
    with ct.patched():
        trainer = tiny.trainer(tiny.lora_model())
        trainer.is_managed_externally = True  # train() then leaves the trainer open for a second call
        trainer.train([tiny.batch()])
        trainer.train([tiny.batch()])
    assert len(calls) == 1 and calls[0] is not cut_loss_fn


# ---- refusals ------------------------------------------------------------------------------------------------------


def assert_refused(model, reason):
    """Strict: an error before training and at the trace. Else: the model's own loss, and a warning that says why."""
    with pytest.raises(ct.UnsupportedModelError, match=reason) as refusal:
        ct.loss_fn(model, strict=True)
    assert type(model).__name__ in str(refusal.value)
    with pytest.raises(ct.UnsupportedModelError, match=reason):
        ct.loss_fn(strict=True)(model, **tiny.batch())
    with pytest.warns(ct.CutLossWarning, match=reason):
        assert cut_loss_fn(model, **tiny.batch()) == OWN_LOSS


@pytest.fixture
def own_loss(monkeypatch):
    """Tunix's default loss, told apart from ours by its value."""
    from tunix.sft import peft_trainer

    monkeypatch.setattr(peft_trainer, "_default_loss_fn", lambda model, *args, **kwargs: OWN_LOSS)


def test_adapters_on_the_head_are_refused(own_loss):
    from flax import nnx

    model = tiny.model()
    model.embedder.input_embedding_lora_a = nnx.LoRAParam(np.zeros((tiny.VOCAB, 4), np.float32))
    assert_refused(model, "LoRA adapters sit on its head .input_embedding_lora_a")


def test_bias_on_the_head_is_refused(own_loss):
    from flax import nnx

    model = tiny.model()
    model.embedder.bias = nnx.Param(np.zeros(tiny.VOCAB, np.float32))
    assert_refused(model, "its head has a bias")


def test_quantised_head_is_refused(own_loss, monkeypatch):
    from flax import nnx

    monkeypatch.setattr(nnx.Param, "get_value", lambda self: object())
    assert_refused(tiny.model(), "quantised")


def test_unknown_model_class_is_refused(own_loss):
    from flax import nnx
    from tunix.tests import test_common

    model = test_common.ToyTransformer(config=test_common.ModelConfig(), rngs=nnx.Rngs(0))
    assert_refused(model, "no adapter for this class")
