"""Folders as Hugging Face writes them, of every family: what is loaded computes what the published model does, and a
configuration of which Tunix's model is not capable is refused."""

import json

import numpy as np
import pytest

from cutloss.sft import config, families, models
from cutloss.sft.config import ConfigError

VOCAB, WIDTH, HIDDEN, HEADS, KV, HEAD, LENGTH, WINDOW = 50, 16, 24, 4, 2, 8, 12, 5
EPS = 1e-6

COMMON = {
    "num_hidden_layers": 2,
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": HEAD,
    "vocab_size": VOCAB,
    "rms_norm_eps": EPS,
}
LLAMA = {"rope_theta": 5000.0, "rope_scaling": None, "tie_word_embeddings": False, "hidden_act": "silu"}
GEMMA2 = {"query_pre_attn_scalar": HEAD, "sliding_window": WINDOW}
GEMMA3 = {"num_hidden_layers": 6, "query_pre_attn_scalar": WIDTH // HEADS, "sliding_window": WINDOW}
SCALED = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_theta": 3e5, "rope_local_base_freq": 2e4}
NESTED = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 3e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
}
FILES = {
    "gemma": {"model_type": "gemma", "rope_theta": 10000.0},
    "gemma2": {"model_type": "gemma2", **GEMMA2, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 5.0},
    "gemma3": {"model_type": "gemma3_text", **GEMMA3, **SCALED},
    "gemma3 of transformers 5": {"model_type": "gemma3_text", **GEMMA3, **NESTED},
    "qwen2": {"model_type": "qwen2", **LLAMA},
    "qwen3": {"model_type": "qwen3", **LLAMA},
    "llama3": {"model_type": "llama", **LLAMA},
}


def write(folder, name, **changes):
    """Writes random weights and config.json; returns (the weights in f64, the configuration)."""
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    found = {**COMMON, **FILES[name], **changes}
    kind = found["model_type"]
    shapes = {"model.embed_tokens.weight": (VOCAB, WIDTH), "model.norm.weight": (WIDTH,)}
    if "gemma" not in kind:
        shapes["lm_head.weight"] = (VOCAB, WIDTH)
    for i in range(found["num_hidden_layers"]):
        block = {
            "input_layernorm.weight": (WIDTH,),
            "post_attention_layernorm.weight": (WIDTH,),
            "self_attn.q_proj.weight": (HEADS * HEAD, WIDTH),
            "self_attn.k_proj.weight": (KV * HEAD, WIDTH),
            "self_attn.v_proj.weight": (KV * HEAD, WIDTH),
            "self_attn.o_proj.weight": (WIDTH, HEADS * HEAD),
            "mlp.gate_proj.weight": (HIDDEN, WIDTH),
            "mlp.up_proj.weight": (HIDDEN, WIDTH),
            "mlp.down_proj.weight": (WIDTH, HIDDEN),
        }
        if kind in ("gemma2", "gemma3_text"):
            block |= {"pre_feedforward_layernorm.weight": (WIDTH,), "post_feedforward_layernorm.weight": (WIDTH,)}
        if kind in ("gemma3_text", "qwen3"):
            block |= {f"self_attn.{x}_norm.weight": (HEAD,) for x in "qk"}
        if kind == "qwen2":
            block |= {f"self_attn.{x}_proj.bias": (n * HEAD,) for x, n in (("q", HEADS), ("k", KV), ("v", KV))}
        shapes |= {f"model.layers.{i}.{part}": shape for part, shape in block.items()}
    arrays = {part: (rng.standard_normal(shape) / 2).astype(np.float32) for part, shape in shapes.items()}
    save_file(arrays, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(found))
    return {part: array.astype(np.float64) for part, array in arrays.items()}, found


def rotated(x, base, factor):
    angle = np.arange(len(x))[:, None, None] / factor / base ** (np.arange(0, HEAD, 2) / HEAD)
    a, b = x[..., : HEAD // 2], x[..., HEAD // 2 :]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)


def capped(x, cap):
    return x if cap is None else cap * np.tanh(x / cap)


def logits(w, c, ids):
    """The published model in float64."""
    kind = c["model_type"]
    gemma, sandwich = "gemma" in kind, kind in ("gemma2", "gemma3_text")

    def norm(x, weight):
        return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + EPS) * (weight + gemma)

    def activation(x):
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) if gemma else x / (1 + np.exp(-x))

    x = w["model.embed_tokens.weight"][ids] * (np.sqrt(WIDTH) if gemma else 1)
    apart = np.subtract.outer(np.arange(len(ids)), np.arange(len(ids)))
    for i in range(c["num_hidden_layers"]):
        t = {part.split(".", 3)[3]: array for part, array in w.items() if part.startswith(f"model.layers.{i}.")}
        local = {"gemma2": i % 2 == 0, "gemma3_text": i % 6 != 5}.get(kind, False)
        h = norm(x, t["input_layernorm.weight"])
        q, k, v = (
            (h @ t[f"self_attn.{n}_proj.weight"].T + t.get(f"self_attn.{n}_proj.bias", 0)).reshape(len(ids), heads, HEAD)
            for n, heads in (("q", HEADS), ("k", KV), ("v", KV))
        )
        if "self_attn.q_norm.weight" in t:
            q, k = norm(q, t["self_attn.q_norm.weight"]), norm(k, t["self_attn.k_norm.weight"])
        base, factor = c.get("rope_theta", 10000.0), 1.0
        if kind == "gemma3_text":
            base, factor = (2e4, 1.0) if local else (3e5, 8.0)
        q, k = rotated(q, base, factor), rotated(k, base, factor)
        k, v = (np.repeat(a, HEADS // KV, axis=1) for a in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(c.get("query_pre_attn_scalar", HEAD))
        seen = (apart >= 0) & (not local or apart < WINDOW)
        scores = np.where(seen, capped(scores, c.get("attn_logit_softcapping")), -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        y = np.einsum("hqk,khd->qhd", p, v).reshape(len(ids), -1) @ t["self_attn.o_proj.weight"].T
        x = x + (norm(y, t["post_attention_layernorm.weight"]) if sandwich else y)
        h = norm(x, t["pre_feedforward_layernorm.weight" if sandwich else "post_attention_layernorm.weight"])
        y = (activation(h @ t["mlp.gate_proj.weight"].T) * (h @ t["mlp.up_proj.weight"].T)) @ t["mlp.down_proj.weight"].T
        x = x + (norm(y, t["post_feedforward_layernorm.weight"]) if sandwich else y)
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return capped(norm(x, w["model.norm.weight"]) @ head.T, c.get("final_logit_softcapping"))


def source(folder):
    return models.find(config.load(None, [f"model.path={folder}", "lora.rank=0"]).model)


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in ("gemma", "gemma2") else pytest.mark.long) for n in FILES])
def test_a_folder_computes_what_the_published_model_does(tmp_path, name):
    """One wrong field of the configuration trains another model, whose loss looks like any other."""
    import jax
    from flax import nnx

    weights, found = write(tmp_path, name)
    settings = config.load(None, [f"model.path={tmp_path}", "lora.rank=0"])
    model = models.load(models.find(settings.model), settings)
    ids = np.random.default_rng(1).integers(0, VOCAB, LENGTH)
    positions, mask = np.arange(LENGTH)[None], np.tril(np.ones((1, LENGTH, LENGTH), bool))
    with jax.default_matmul_precision("highest"):
        got = nnx.jit(lambda m: m(ids[None], positions, None, mask)[0])(model)[0]
    wanted = logits(weights, found, ids)
    # f32 through up to six blocks, each a few dozen roundings of 2^-24 deep: 1e-5 of the largest.
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


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
