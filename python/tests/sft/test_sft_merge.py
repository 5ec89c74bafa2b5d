"""The scale of adapters is one number wherever they are used: trained, loaded, merged."""

import numpy as np
import pytest
import runs

from cutloss.sft import adapter, config, data, families, models, tokenizers
from cutloss.sft.config import ConfigError


def test_scale_is_alpha_over_rank_and_by_its_root_if_asked():
    assert config.Lora(rank=8, alpha=16.0).scale == 2 and config.Lora(rank=8).scale == 1
    assert config.Lora(rank=16, alpha=8.0, rank_stabilized=True).scale == 2


def loss_of(model, folder):
    """Tunix's own loss, of some rows."""
    from flax import nnx
    from tunix.sft import peft_trainer

    pairs, _ = data.load(runs.pairs(folder))
    rows = [data.encode(pair, tokenizers.Bytes(), 64, "{source}:") for pair in pairs[:4]]
    loss = nnx.jit(lambda model, batch: peft_trainer._default_loss_fn(model, **batch))
    return float(loss(model, data.collate(rows, 64)))


def values(model):
    import jax
    from flax import nnx

    return [np.array(leaf) for leaf in jax.tree.leaves(nnx.state(model, nnx.Any(nnx.Param, nnx.LoRAParam)))]


@pytest.mark.long
@pytest.mark.parametrize("stabilized", [False, True])
@pytest.mark.parametrize("family", families.FAMILIES)
def test_merged_is_loaded_is_trained(tmp_path, quick_compilation, family, stabilized):
    settings = runs.settings(tmp_path, "lora.alpha=12", f"lora.rank_stabilized={stabilized}", family=family, lr=2e-2)
    runs.go(settings, tmp_path / "run")
    model = models.load(models.find(settings.model), settings)
    base = loss_of(model, tmp_path)
    adapter.load(model, tmp_path / "run" / "adapter.safetensors", settings.lora)
    trained = loss_of(model, tmp_path)
    before = values(model)
    merged = adapter.merged(model, settings.lora)
    assert abs(trained - base) > 1e-2
    assert loss_of(merged, tmp_path) == pytest.approx(trained, rel=1e-5)
    for was, now in zip(before, values(model), strict=True):
        np.testing.assert_array_equal(was, now, err_msg="merging changed the model itself")


@pytest.mark.long
def test_saved_scale_is_the_one_of_training(tmp_path, quick_compilation):
    from safetensors import safe_open

    settings = runs.settings(tmp_path, "lora.alpha=12", "lora.rank_stabilized=true", steps=1)
    runs.go(settings, tmp_path / "run")
    with safe_open(tmp_path / "run" / "adapter.safetensors", framework="numpy") as file:
        told = file.metadata()
    assert (told["rank"], told["alpha"], told["scale"]) == ("4", "12.0", "6.0")


@pytest.mark.long
def test_quantised_weights_take_no_adapters(tmp_path, quick_compilation):
    settings = runs.settings(tmp_path, "lora.bits=8")
    model = models.load(models.find(settings.model), settings)
    with pytest.raises(ConfigError, match=r"lora.bits: .* is quantised"):
        adapter.merged(model, settings.lora)


@pytest.mark.long
def test_merging_adds_what_the_definition_says(tmp_path, quick_compilation):
    """By hand for one weight: W + alpha / r * A B."""
    settings = runs.settings(tmp_path, "lora.alpha=12", family="llama3")
    model = models.load(models.find(settings.model), settings)
    mlp = model.layers[0].mlp.gate_proj
    rng = np.random.default_rng(0)
    mlp.kernel_lora_b.set_value(rng.standard_normal(mlp.kernel_lora_b.get_value().shape).astype(np.float32))
    a, b, w = (np.asarray(v.get_value(), np.float64) for v in (mlp.kernel_lora_a, mlp.kernel_lora_b, mlp.kernel))
    found = adapter.merged(model, settings.lora).layers[0].mlp.gate_proj.kernel.get_value()
    np.testing.assert_allclose(found, w + 3 * a @ b, rtol=0, atol=1e-6 * np.abs(w + 3 * a @ b).max())


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """(model, settings, {name: random adapter})."""
    settings = runs.settings(tmp_path_factory.mktemp("adapted"), "lora.alpha=12", family="llama3")
    model = models.load(models.find(settings.model), settings)
    rng = np.random.default_rng(1)
    return model, settings, {n: rng.standard_normal(a.shape).astype(np.float32) for n, a in adapter.of(model)[0].items()}


@pytest.mark.parametrize("dtypes", ["float32", "bfloat16", "float16", "float32 bfloat16 float16"])
def test_adapters_are_read_in_another_dtype_than_the_files(tmp_path, adapted, dtypes):
    import jax.numpy as jnp

    model, settings, made = adapted
    kinds = dtypes.split()
    stored = {name: array.astype(jnp.dtype(kinds[i % len(kinds)])) for i, (name, array) in enumerate(made.items())}
    adapter.save(tmp_path / "a.safetensors", stored, settings, models.find(settings.model))
    adapter.load(model, tmp_path / "a.safetensors", settings.lora)
    found, _ = adapter.of(model)
    assert {array.dtype for array in found.values()} == {np.dtype("float32")}
    for name, array in stored.items():
        np.testing.assert_array_equal(found[name], array.astype(np.float32))


def test_alpha_left_out_is_the_rank_wherever_it_is_used(tmp_path, adapted):
    """Left to whoever reads the file, a missing alpha has been 0, 1, 16 and the rank."""
    import dataclasses

    from safetensors import safe_open

    model, settings, made = adapted
    plain = config.from_dict({**settings.to_dict(), "lora": {"rank": 4}})
    assert plain.lora.alpha is None and plain.lora.scale == 1
    adapter.save(tmp_path / "a.safetensors", made, plain, models.find(plain.model))
    with safe_open(tmp_path / "a.safetensors", framework="numpy") as file:
        assert {key: file.metadata()[key] for key in ("rank", "alpha", "scale")} == {"rank": "4", "alpha": "4.0", "scale": "1.0"}
    adapter.load(model, tmp_path / "a.safetensors", plain.lora)
    adapter.load(model, tmp_path / "a.safetensors", dataclasses.replace(plain.lora, alpha=4.0))
    changed = {scale: _change(adapter.merged(model, lora), model) for scale, lora in ((1, plain.lora), (3, settings.lora))}
    np.testing.assert_allclose(changed[3], 3 * changed[1], rtol=0, atol=1e-6 * np.abs(changed[3]).max())


def _change(merged, model):
    one, other = (np.asarray(m.layers[0].mlp.gate_proj.kernel.get_value(), np.float64) for m in (merged, model))
    return one - other


@pytest.mark.parametrize("told", [None, {}, {"scale": "1.0"}])
def test_adapters_of_another_or_no_scale_are_loaded(tmp_path, adapted, told):
    from safetensors.numpy import save_file

    model, settings, made = adapted
    save_file(made, tmp_path / "a.safetensors", told)
    with pytest.raises(ConfigError, match=r"a.safetensors: .*scale of .*(does not say|1\.0).* is 3\.0"):
        adapter.load(model, tmp_path / "a.safetensors", settings.lora)
