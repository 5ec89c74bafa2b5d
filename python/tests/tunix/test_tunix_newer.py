"""Tunix after 0.1.7, in doubles: models that hand out their hidden states, heads cutloss does not know, meshes."""

import numpy as np
import pytest
import tiny
from flax import nnx

import cutloss.tunix as ct
from cutloss.tunix import adapters, chunked, meshes, selfcheck


def own_loss():
    from tunix.sft import peft_trainer

    return peft_trainer._default_loss_fn


class Biased(nnx.Module):
    """A model of no known class, with the two calls of newer Tunix and a bias on its head."""

    def __init__(self):
        self.emb = nnx.Embed(tiny.VOCAB, 16, rngs=nnx.Rngs(0))
        self.lm_head = nnx.Linear(16, tiny.VOCAB, rngs=nnx.Rngs(1))
        rng = np.random.default_rng(0)
        self.lm_head.bias.set_value(rng.standard_normal(tiny.VOCAB).astype(np.float32))

    def __call__(self, tokens, positions, cache, attention_mask, skip_lm_head=False):
        x = self.emb(tokens)
        return (x if skip_lm_head else self.compute_final_logits(x)), cache

    def compute_final_logits(self, x):
        return self.lm_head(x)


def newer_gemma3():
    """A Gemma 3 that can leave out its head; with it, its own call is an error, so that a test sees which was used."""
    model = tiny.model()

    class Gemma3(type(model)):
        def __call__(self, tokens, positions, cache, attention_mask, skip_lm_head=False):
            if not skip_lm_head:
                return super().__call__(tokens, positions, cache, attention_mask)
            x = self.embedder.encode(tokens)
            for layer in self.layers:
                _, x = layer(x, positions, None, attention_mask)
            return self.final_norm(x), cache

    object.__setattr__(model, "__class__", Gemma3)
    return model


def test_hidden_states_are_asked_for_where_the_model_gives_them(monkeypatch):
    model, data = newer_gemma3(), tiny.batch()
    expected = float(own_loss()(model, **data))
    monkeypatch.setattr(type(model.embedder), "decode", None)  # the head is not called
    np.testing.assert_allclose(float(ct.loss_fn(strict=True)(model, **data)), expected, rtol=1e-5)


def seeing(way):
    """A model whose hidden states are the tokens' and the images', of each of the three ways to the loss."""
    model = Biased() if way == "chunked" else tiny.model()

    class Gemma3(type(model)):
        def __call__(self, tokens, positions, cache, attention_mask, images=None):
            return self.embedder.decode(self.embedder.encode(tokens) + images), cache

    class Newer(type(model)):
        def __call__(self, tokens, positions, cache, attention_mask, images=None, skip_lm_head=False):
            x = (self.emb if way == "chunked" else self.embedder.encode)(tokens) + images
            head = self.compute_final_logits if way == "chunked" else self.embedder.decode
            return (x if skip_lm_head else head(x)), cache

    object.__setattr__(model, "__class__", Gemma3 if way == "tapped" else Newer)
    return model


@pytest.mark.parametrize("way", ["tapped", "skipped", "chunked"])
def test_images_reach_the_model(way):
    from cutloss.tunix import loss

    model, data = seeing(way), tiny.batch()
    assert loss.way_of(model) is {"tapped": loss.tapped, "skipped": loss.skipped, "chunked": chunked.forward}[way]
    width = 16 if way == "chunked" else tiny.WIDTH
    one, other = np.random.default_rng(3).standard_normal((2, 2, 12, width)).astype(np.float32)
    found = float(loss.as_scalar(ct.loss_fn(strict=True)(model, **data, images=one)))
    np.testing.assert_allclose(found, float(loss.as_scalar(own_loss()(model, **data, images=one))), rtol=1e-5)
    assert abs(found - float(loss.as_scalar(ct.loss_fn(strict=True)(model, **data, images=other)))) > 1e-3


@pytest.mark.parametrize("tokens", [8, 16, 128])  # 4 steps of 4 and less, a ragged last one, and all at once
def test_unknown_biased_head_is_computed_in_chunks(tokens):
    data = tiny.batch(length=13, mask=np.random.default_rng(1).choice([0, 0.5, 2], (2, 13)).astype(np.float32))
    loss_fn = ct.loss_fn(strict=True, token_chunk=tokens)
    (dense, dense_grads), (loss, grads) = tiny.values_and_grads([own_loss(), loss_fn], Biased(), data, nnx.Param)
    np.testing.assert_allclose(loss, dense, rtol=1e-5)
    for name, gradient in dense_grads.items():
        assert np.linalg.norm(grads[name] - gradient) <= 1e-5 * np.linalg.norm(gradient), name


def test_adapters_on_an_unknown_head_are_not_left_out():
    model = Biased()
    model.lm_head.kernel_lora_b = nnx.LoRAParam(np.zeros((4, tiny.VOCAB), np.float32))
    with pytest.raises(ct.UnsupportedModelError, match=r"lm_head.kernel_lora_b"):
        ct.loss_fn(strict=True)(model, **tiny.batch())


def test_quantised_unknown_head_is_not_left_out():
    class Box:  # as qwix's: a shape, and no array
        shape, ndim = (16, tiny.VOCAB), 2

    model = Biased()
    model.lm_head.kernel_box = nnx.Param(0)
    model.lm_head.kernel_box.set_value(Box())
    with pytest.raises(ct.UnsupportedModelError, match=r"its head is quantised .lm_head.kernel_box is a Box"):
        ct.loss_fn(strict=True)(model, **tiny.batch())


def test_self_check_catches_a_chunked_head_that_is_not_the_models():
    class Scaled(Biased):
        def __call__(self, *args, skip_lm_head=False):
            x, cache = super().__call__(*args, skip_lm_head=skip_lm_head)
            return (x if skip_lm_head else 0.5 * x), cache

    selfcheck.check(Biased(), own_loss())
    with pytest.raises(ct.SelfCheckError):
        selfcheck.check(Scaled(), own_loss())


def test_known_family_keeps_the_exact_way():
    from cutloss.tunix import loss

    assert loss.way_of(newer_gemma3()) is loss.skipped
    assert loss.way_of(tiny.model()) is loss.tapped
    assert loss.way_of(Biased()) is chunked.forward


def test_batch_that_is_not_split_is_reported(monkeypatch):
    class Mesh:
        shape = {"fsdp": 4, "tp": 2}

    monkeypatch.setattr(meshes, "tunix_mesh", Mesh)
    assert meshes.undivided_batch(8, ("fsdp",)) is None
    assert "multiple of 4" in meshes.undivided_batch(6, ("fsdp",))
    assert meshes.undivided_batch(6, ("tp",)) is None
    assert "8 devices of mesh axis 'fsdp', 'tp'" in meshes.undivided_batch(12, (("fsdp", "tp"), None))


def test_batch_lies_as_the_trainer_splits_it(monkeypatch):
    """Taken to be split over fsdp where it is not, every hidden state is moved before the loss."""
    from jax.sharding import PartitionSpec as P

    class Mesh:
        shape = {"data": 2, "fsdp": 4, "seq": 2}

    monkeypatch.setattr(meshes, "current_mesh", Mesh)

    def x_spec(shape, axis):
        return meshes.layout(shape, P(), axis)["x_spec"]

    assert x_spec((8, 16), ("fsdp",)) == P(("fsdp",))
    assert x_spec((8, 16), ("data",)) == P(("data",))
    assert x_spec((8, 16), (("data", "fsdp"), "seq")) == P(("data", "fsdp"), ("seq",))
    assert x_spec((8, 15), (("data", "fsdp"), "seq")) == x_spec((12, 16), (("data", "fsdp"),)) == P()


def test_trainer_s_own_axis_reaches_its_loss(monkeypatch):
    monkeypatch.setattr(selfcheck, "check", lambda *_: None)
    model = tiny.lora_model()
    trainer = ct.with_cut_loss(tiny.trainer(model, data_sharding_axis=("data",)))
    assert trainer.loss_fn.cutloss_settings.data_sharding_axis == ("data",)
    with ct.patched():
        trainer = tiny.trainer(model, data_sharding_axis=("data",))
        trainer.train([])
        assert trainer.loss_fn is trainer.eval_loss_fn is ct.loss_fn(data_sharding_axis=("data",))
        other = tiny.trainer(model)
        assert other.loss_fn is ct.loss_fn()


def test_self_check_of_eight_tokens_does_without_flash_attention():
    """Its blocks are thousands of tokens long. The model that is trained keeps it."""
    import dataclasses

    model = tiny.model("qwen3-tied")

    def configs(of):
        return [m.config for _, m in nnx.iter_graph(of) if isinstance(m, nnx.Module) and hasattr(m, "config")]

    for _, module in nnx.iter_graph(model):
        if isinstance(module, nnx.Module) and hasattr(module, "config"):
            module.config = dataclasses.replace(module.config, use_flash_attention=True)
    checked = selfcheck._without_flash(nnx.merge(*nnx.split(model)))
    assert len(configs(model)) >= 2 and all(config.use_flash_attention for config in configs(model))
    assert not any(config.use_flash_attention for config in configs(checked))


def test_head_in_f16_is_refused():
    with pytest.raises(ct.UnsupportedModelError, match="weight has dtype float16; float32 and bfloat16 are taken"):
        adapters.read_head(tiny.model("qwen3-untied", dtype="float16"))


def test_head_that_is_called_twice_is_refused():
    """Which of its inputs the loss is of is not known."""
    model = tiny.model()

    class Gemma3(type(model)):
        def __call__(self, *args):
            logits, cache = super().__call__(*args)
            return logits + self.embedder.decode(0 * logits[..., : tiny.WIDTH]), cache

    object.__setattr__(model, "__class__", Gemma3)
    with pytest.raises(ct.UnsupportedModelError, match="a forward pass called its head 2 times, expected once"):
        ct.loss_fn(strict=True)(model, **tiny.batch())


def test_weights_that_are_not_finite_are_seen_before_the_first_step():
    model = tiny.lora_model()
    table = model.embedder.input_embedding
    table.set_value(table.get_value().at[3, 5].set(np.nan))
    with pytest.raises(ct.SelfCheckError, match="own loss is nan.* or its weights are not finite"):
        ct.loss_fn(model, strict=True)


def test_head_that_computes_something_else_is_refused():
    model = tiny.model("qwen3-untied")
    model.lm_head.einsum_str = "BTD,DV->BVT"
    with pytest.raises(ct.UnsupportedModelError, match="BTD,DV->BVT"):
        adapters.read_head(model)
