"""GGUF files of other architectures than Gemma 3, written here: what is loaded computes what llama.cpp's definition says."""

import numpy as np
import pytest
from folders import computed

from cutloss.sft import config, gguf_file, models, tokenizers
from cutloss.sft.config import ConfigError

WIDTH, HIDDEN, HEADS, KV, HEAD, LAYERS = 16, 24, 4, 2, 8, 2
WORDS = ["<|end|>", "<|begin|>", "a", "b", "c", "ab", "Ġ", "Ġa", "abc", "12", *"0123456789"]
MERGES = ["a b", "Ġ a", "ab c", "1 2"]


def write(path, architecture, tied=True, kind="F32", more=(), pre="smollm"):
    """Writes a random model; returns {GGUF name: array as a matrix product takes it, [out, in]}."""
    import gguf

    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV)
    writer.add_key_length(HEAD)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(5000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(WORDS)
    writer.add_token_types([3, 3] + [1] * (len(WORDS) - 2))
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(1)
    shapes = {"token_embd.weight": (len(WORDS), WIDTH), "output_norm.weight": (WIDTH,)}
    if not tied:
        shapes["output.weight"] = (len(WORDS), WIDTH)
    for i in range(LAYERS):
        block = {
            "attn_norm.weight": (WIDTH,),
            "ffn_norm.weight": (WIDTH,),
            "attn_q.weight": (HEADS * HEAD, WIDTH),
            "attn_k.weight": (KV * HEAD, WIDTH),
            "attn_v.weight": (KV * HEAD, WIDTH),
            "attn_output.weight": (WIDTH, HEADS * HEAD),
            "ffn_gate.weight": (HIDDEN, WIDTH),
            "ffn_up.weight": (HIDDEN, WIDTH),
            "ffn_down.weight": (WIDTH, HIDDEN),
        }
        if architecture == "qwen2":
            block |= {"attn_q.bias": (HEADS * HEAD,), "attn_k.bias": (KV * HEAD,), "attn_v.bias": (KV * HEAD,)}
        if architecture == "qwen3":
            block |= {"attn_q_norm.weight": (HEAD,), "attn_k_norm.weight": (HEAD,)}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in block.items()}
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    for name in more:
        writer.add_tensor(name, np.ones(4, np.float32))
    for name, array in arrays.items():
        writer.add_tensor(name, array.astype(np.float16) if kind == "F16" and array.ndim == 2 else array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return arrays


def rms(x, w):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6) * w


def rotated(x, neighbours):
    """Rotary positions of [L, heads, HEAD]: of pairs (2 i, 2 i + 1), or of (i, i + HEAD / 2)."""
    angle = np.arange(len(x))[:, None, None] / 5000.0 ** (np.arange(0, HEAD, 2) / HEAD)
    cos, sin = np.cos(angle), np.sin(angle)
    a, b = (x[..., 0::2], x[..., 1::2]) if neighbours else (x[..., : HEAD // 2], x[..., HEAD // 2 :])
    parts = (a * cos - b * sin, b * cos + a * sin)
    return np.stack(parts, -1).reshape(x.shape) if neighbours else np.concatenate(parts, -1)


def logits(arrays, ids, architecture):
    """llama.cpp's model in float64, from its own tensors."""
    arrays = {name: array.astype(np.float64) for name, array in arrays.items()}
    x = arrays["token_embd.weight"][ids]
    future = np.triu(np.full((len(ids), len(ids)), -np.inf), 1)
    for i in range(LAYERS):
        t = {name.split(".", 2)[2]: array for name, array in arrays.items() if name.startswith(f"blk.{i}.")}
        h = rms(x, t["attn_norm.weight"])
        q, k, v = (
            (h @ t[f"attn_{n}.weight"].T + t.get(f"attn_{n}.bias", 0)).reshape(len(ids), heads, HEAD)
            for n, heads in (("q", HEADS), ("k", KV), ("v", KV))
        )
        if architecture == "qwen3":
            q, k = rms(q, t["attn_q_norm.weight"]), rms(k, t["attn_k_norm.weight"])
        q, k = (rotated(a, architecture == "llama") for a in (q, k))
        k, v = (np.repeat(a, HEADS // KV, axis=1) for a in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(HEAD) + future
        p = np.exp(scores - scores.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        x = x + np.einsum("hqk,khd->qhd", p, v).reshape(len(ids), -1) @ t["attn_output.weight"].T
        h = rms(x, t["ffn_norm.weight"])
        gate = h @ t["ffn_gate.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ t["ffn_up.weight"].T)) @ t["ffn_down.weight"].T
    return rms(x, arrays["output_norm.weight"]) @ arrays.get("output.weight", arrays["token_embd.weight"]).T


def load(path, monkeypatch, tmp_path):
    monkeypatch.setenv("CUTLOSS_CACHE", str(tmp_path / "cache"))
    settings = config.load(None, [f"model.path={path}", "lora.rank=0"])
    source = models.find(settings.model)
    return source, models.load(source, settings)


@pytest.mark.parametrize(
    ("architecture", "tied"),
    [("llama", True), *(pytest.param(a, t, marks=pytest.mark.long) for a, t in (("llama", False), ("qwen2", True), ("qwen3", False)))],
)
def test_a_converted_file_computes_what_the_original_does(tmp_path, monkeypatch, architecture, tied):
    """Queries and keys of llama lie in pairs there: taken as they are, the model runs, and every position is wrong."""
    arrays = write(tmp_path / "a.gguf", architecture, tied)
    source, model = load(tmp_path / "a.gguf", monkeypatch, tmp_path)
    assert source.family == {"llama": "llama3"}.get(architecture, architecture)
    ids = np.random.default_rng(1).integers(0, len(WORDS), 12)
    wanted = logits(arrays, ids, architecture)
    # f32 through two blocks: 1e-5 of the largest is ten times what is seen, and a pair out of place is 1e-1 and more.
    np.testing.assert_allclose(computed(model, ids), wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def test_halves_undo_the_order_of_a_converted_file():
    """llama.cpp's own permutation, forward, on rows that say which they are."""
    rows = np.arange(2 * 8)[:, None]
    stored = rows.reshape(2, 2, 4, 1).swapaxes(1, 2).reshape(rows.shape)
    assert stored[:4, 0].tolist() == [0, 4, 1, 5]
    np.testing.assert_array_equal(gguf_file.halves(stored, 2), rows)


def test_the_tokenizer_of_a_file_cuts_and_merges_as_it_says(tmp_path, monkeypatch):
    write(tmp_path / "a.gguf", "llama")
    monkeypatch.setenv("CUTLOSS_CACHE", str(tmp_path / "cache"))
    made = tokenizers.load(str(gguf_file.prepare(tmp_path / "a.gguf")))
    named = [WORDS[i] for i in made.encode("abc ab12<|end|>a")]
    assert named == ["abc", "Ġ", "ab", "1", "2", "<|end|>", "a"]
    assert made.decode(made.encode("abc ab12")) == "abc ab12"
    assert made.eos_id() == 0 and made.bos_id() is None  # add_bos_token is not set: text is trained without it


def test_what_a_file_holds_beyond_the_model_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("CUTLOSS_CACHE", str(tmp_path / "cache"))
    for name, message, options in (
        ("mamba", "it holds a 'mamba' model; of GGUF files gemma3, llama, qwen2, qwen3 are read", {}),
        ("llama", "its tensor 'rope_freqs.weight' is nothing that Tunix's model computes with", {"more": ["rope_freqs.weight"]}),
        ("qwen2", "'gpt2' with the cut 'tekken'", {"pre": "tekken"}),
    ):
        path = tmp_path / f"{name}.gguf"
        write(path, name, **options)
        with pytest.raises(ConfigError, match=message):
            gguf_file.prepare(path)
    assert not list((tmp_path / "cache").glob("*")), "half a conversion was left behind"
