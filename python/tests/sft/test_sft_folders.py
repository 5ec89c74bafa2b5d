"""What is loaded of a folder as Hugging Face writes them computes what the published model does, of every family, and a
configuration of which Tunix's model is not capable is refused."""

import json

import numpy as np
import pytest
from folders import FILES, LENGTH, VOCAB, computed, logits, write

from cutloss.sft import config, families, models
from cutloss.sft.config import ConfigError


def source(folder):
    return models.find(config.load(None, [f"model.path={folder}", "lora.rank=0"]).model)


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in ("gemma", "gemma2") else pytest.mark.long) for n in FILES])
def test_a_folder_computes_what_the_published_model_does(tmp_path, name):
    """One wrong field of the configuration trains another model, whose loss looks like any other."""
    weights, found = write(tmp_path, name)
    settings = config.load(None, [f"model.path={tmp_path}", "lora.rank=0"])
    model = models.load(models.find(settings.model), settings)
    ids = np.random.default_rng(1).integers(0, VOCAB, LENGTH)
    wanted = logits(weights, found, ids)
    # f32 through up to six blocks, each a few dozen roundings of 2^-24 deep: 1e-5 of the largest.
    np.testing.assert_allclose(computed(model, ids), wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


LLAMA31 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
SLIDING = ["full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama3", {"rope_scaling": LLAMA31}, "rope_scaling is of the type 'llama3'"),
        ("llama3", {"rope_parameters": {"rope_theta": 5e5, **LLAMA31}}, "rope_scaling is of the type 'llama3'"),
        ("qwen2", {"rope_scaling": YARN}, "rope_scaling is of the type 'yarn'"),
        ("qwen3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling is 2.0, .* with 1.0 only"),
        ("llama3", {"attention_bias": True}, "attention_bias is True, .* with False only"),
        ("llama3", {"mlp_bias": True}, "mlp_bias is True"),
        ("llama3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window is True"),
        ("qwen3", {"layer_types": SLIDING}, "layer_types is .'full_attention', 'sliding_attention'."),
        ("gemma", {"rope_theta": 500.0}, "rope_theta is 500.0, .* with 10000 only"),
        ("gemma2", {"query_pre_attn_scalar": 144}, "query_pre_attn_scalar is 144, .* with 8 only"),
        ("gemma2", {"layer_types": SLIDING}, "layer_types"),
        ("gemma2", {"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05"),
        ("gemma3", {"query_pre_attn_scalar": 168}, "query_pre_attn_scalar is 168, .* with 4 only"),
        ("gemma3", {"rope_scaling": YARN}, "rope_scaling is of the type 'yarn'"),
        ("gemma3", {"sliding_window_pattern": 2}, "sliding_window_pattern is 2, .* with 6 only"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
    ],
)
def test_a_folder_of_another_model_than_tunix_has_is_refused(tmp_path, name, changes, message):
    write(tmp_path, name, **changes)
    with pytest.raises(ConfigError, match=r"config.json: " + message):
        source(tmp_path)


def test_a_name_of_tunix_does_not_hide_what_the_folder_says(tmp_path):
    """Llama 3.2's positions are scaled, and Tunix's llama3p2_1b does not scale them."""
    write(tmp_path, "llama3", rope_scaling=LLAMA31)
    with pytest.raises(ConfigError, match="of the type 'llama3'"):
        models.find(config.load(None, [f"model.path={tmp_path}", "model.name=llama3p2_1b"]).model)
    # A file that leaves out sizes, as Gemma 3 4B's does, is what the name is for.
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": {"hidden_size": 2560}}))
    found = models.find(config.load(None, [f"model.path={tmp_path}", "model.name=gemma3_4b_it"]).model)
    assert found.family == "gemma3" and found.config.global_scale_factor == 8.0


def test_every_family_of_folders_is_computed_here():
    known = {kind for family in families.FAMILIES.values() for kind in family.hugging_face}
    assert {file["model_type"] for file in FILES.values()} == known - {"gemma3"}
