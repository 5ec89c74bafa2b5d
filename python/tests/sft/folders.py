"""Folders of random weights as Hugging Face writes them, of every family, and what the published models compute of them."""

import json

import numpy as np

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


def write(folder, name, head=None, rows=VOCAB, drop=(), **changes):
    """Writes random weights and config.json; returns (the weights in f64, the configuration).

    Args:
        name: of FILES.
        head: "own", "equal" to the embedding, or "absent"; none: as the family has it.
        rows: of the embedding and the head.
        drop: names of weights that are not written.
        changes: to the configuration.
    """
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    found = {**COMMON, **FILES[name], **changes}
    kind = found["model_type"]
    head = head or ("absent" if "gemma" in kind else "own")
    shapes = {"model.embed_tokens.weight": (rows, WIDTH), "model.norm.weight": (WIDTH,)}
    if head == "own":
        shapes["lm_head.weight"] = (rows, WIDTH)
    for i in range(found["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{part}": shape for part, shape in _block(kind).items()}
    arrays = {part: (rng.standard_normal(shape) / 2).astype(np.float32) for part, shape in shapes.items()}
    if head == "equal":
        arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"].copy()
    save_file({part: array for part, array in arrays.items() if part not in drop}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(found))
    return {part: array.astype(np.float64) for part, array in arrays.items()}, found


def _block(kind):
    """{name: shape} of a layer's weights."""
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
    return block


def write_gemma4(folder):
    """Writes random weights for `families.tiny("gemma4", ...)`, whose configuration no config.json gives."""
    from safetensors.numpy import save_file

    rows, width, hidden, layers, heads, head, per_layer = 320, 32, 64, 4, 4, 8, 4
    shapes = {
        "embed_tokens.weight": (rows, width),
        "embed_tokens_per_layer.weight": (rows, layers * per_layer),
        "per_layer_model_projection.weight": (layers * per_layer, width),
        "per_layer_projection_norm.weight": (per_layer,),
        "norm.weight": (width,),
    }
    norms = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
             "post_per_layer_input_norm")  # fmt: skip
    block = {
        **{f"{norm}.weight": (width,) for norm in norms},
        "self_attn.q_proj.weight": (heads * head, width),
        "self_attn.k_proj.weight": (head, width),
        "self_attn.v_proj.weight": (head, width),
        "self_attn.o_proj.weight": (width, heads * head),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
        "mlp.gate_proj.weight": (hidden, width),
        "mlp.up_proj.weight": (hidden, width),
        "mlp.down_proj.weight": (width, hidden),
        "per_layer_input_gate.weight": (per_layer, width),
        "per_layer_projection.weight": (width, per_layer),
        "layer_scalar": (1,),
    }
    shapes |= {f"layers.{i}.{part}": shape for i in range(layers) for part, shape in block.items()}
    rng = np.random.default_rng(0)
    arrays = {f"model.language_model.{part}": rng.standard_normal(shape).astype(np.float32) for part, shape in shapes.items()}
    save_file(arrays, folder / "model.safetensors")


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



def computed(model, ids):
    """What Tunix's model makes of `ids`: the logits of one row, in f32."""
    import jax
    from flax import nnx

    length = len(ids)
    positions, mask = np.arange(length)[None], np.tril(np.ones((1, length, length), bool))
    with jax.default_matmul_precision("highest"):
        return np.asarray(nnx.jit(lambda m: m(ids[None], positions, None, mask)[0])(model)[0])
