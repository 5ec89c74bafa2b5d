"""Where the arrays come from, and the figures."""

import json
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from tool import needs_tool

from cutloss.analysis import sources, texts

HEADS, KV_HEADS, HALF, D, F, V = 4, 2, 3, 24, 40, 50


def rms(x, w):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w


def hugging_face_llama(w, ids):
    """One token and one head at a time, as the published model is written: halves of a head are turned, not pairs."""
    size = 2 * HALF
    x = w["embed"][ids].astype(np.float64)
    for layer in w["layers"]:
        h = rms(x, layer["attn_norm"])
        q, k, v = (h @ layer[name].T for name in ("q", "k", "v"))

        def turned(row, position):
            angle = position * 10000.0 ** (-np.arange(HALF) / HALF)
            a, b = row[:HALF], row[HALF:]
            return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)])

        mixed = np.zeros((len(ids), HEADS * size))
        for head in range(HEADS):
            shared = head // (HEADS // KV_HEADS)
            own = slice(head * size, (head + 1) * size)
            theirs = slice(shared * size, (shared + 1) * size)
            for i in range(len(ids)):
                scores = np.array([turned(q[i, own], i) @ turned(k[j, theirs], j) for j in range(i + 1)])
                weights = np.exp((scores - scores.max()) / np.sqrt(size))
                mixed[i, own] = weights / weights.sum() @ v[: i + 1, theirs]
        x = x + mixed @ layer["o"].T
        h = rms(x, layer["ffn_norm"])
        gate = h @ layer["gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ layer["up"].T)) @ layer["down"].T
    return rms(x, w["norm"])


def write_llama(path, more=lambda writer: None):
    """Writes a GGUF file, with `more(writer)` in it; returns the same weights in the published layout."""
    gguf = pytest.importorskip("gguf")
    rng = np.random.default_rng(0)

    def draw(*shape):
        return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    size = 2 * HALF
    layers = [
        {"attn_norm": 1 + draw(D), "ffn_norm": 1 + draw(D), "q": draw(HEADS * size, D), "k": draw(KV_HEADS * size, D),
         "v": draw(KV_HEADS * size, D), "o": draw(D, HEADS * size), "gate": draw(F, D), "up": draw(F, D),
         "down": draw(D, F)}
        for _ in range(2)
    ]  # fmt: skip
    w = {"embed": draw(V, D), "norm": 1 + draw(D), "layers": layers}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_embedding_length(D)
    writer.add_feed_forward_length(F)
    writer.add_key_length(size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", w["embed"])
    writer.add_tensor("output_norm.weight", w["norm"])
    names = {"attn_norm": "attn_norm", "ffn_norm": "ffn_norm", "q": "attn_q", "k": "attn_k", "v": "attn_v",
             "o": "attn_output", "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down"}  # fmt: skip
    for index, layer in enumerate(layers):
        for name, stored in names.items():
            value = layer[name]
            if name in "qk":  # GGUF's order: the two halves of each head woven together
                value = np.ascontiguousarray(value.reshape(-1, 2, HALF, D).swapaxes(1, 2)).reshape(value.shape)
            writer.add_tensor(f"blk.{index}.{stored}.weight", value)
    more(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return w


@pytest.fixture
def tiny_llama(tmp_path):
    path = tmp_path / "tiny.gguf"
    return path, write_llama(path)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (lambda w: w.add_tensor("rope_freqs.weight", np.ones(HALF, np.float32)), "tensor 'rope_freqs.weight' is nothing"),
        (lambda w: w.add_tensor("blk.0.attn_q.bias", np.ones(D, np.float32)), "tensor 'blk.0.attn_q.bias' is nothing"),
        (lambda w: w.add_rope_scaling_factor(8.0), r"scales rotary positions by 8.0 \(linear\)"),
        (lambda w: w.add_rope_dimension_count(HALF), "llama.rope.dimension_count is 3; .* computes with 6 only"),
        (lambda w: w.add_value_length(8), "llama.attention.value_length is 8; .* computes with 6 only"),
        (lambda w: w.add_expert_count(4), "llama.expert_count is 4; .* computes with 0 only"),
        (lambda w: (w.add_tokenizer_model("gpt2"), w.add_tokenizer_pre("tekken")), "'gpt2' with the cut 'tekken'"),
    ],
)
def test_a_llama_that_is_more_than_its_weights_is_refused(tmp_path, more, message):
    """Computed without it, the numbers are those of another model, or of another cut of the text."""
    write_llama(tmp_path / "a.gguf", more)
    with pytest.raises(ValueError, match=r"a.gguf: .*" + message):
        sources.llama(tmp_path / "a.gguf")


def test_a_llama_of_gguf_is_the_published_model_in_spite_of_its_permuted_heads(tiny_llama):
    from cutloss.analysis.llama import Llama

    path, w = tiny_llama
    model = Llama(path)
    ids = np.random.default_rng(1).integers(0, V, 9)
    # Sums of up to 40 f32 terms of size 1, two layers deep: a few hundred times 2^-24.
    np.testing.assert_allclose(model.hidden(ids), hugging_face_llama(w, ids), atol=2e-5, rtol=2e-5)
    np.testing.assert_array_equal(model.table, w["embed"])


def test_the_table_of_a_file_is_the_head_or_else_the_embedding(tiny_llama, tmp_path):
    path, w = tiny_llama
    np.testing.assert_array_equal(sources.table_of(path)[0], w["embed"])
    numpy_files = pytest.importorskip("safetensors.numpy")
    head = w["embed"] + 1
    numpy_files.save_file({"model.embed_tokens.weight": w["embed"]}, tmp_path / "a.safetensors")
    np.testing.assert_array_equal(sources.table_of(tmp_path)[0], w["embed"])
    numpy_files.save_file({"lm_head.weight": head.astype(ml_dtypes.bfloat16)}, tmp_path / "b.safetensors")
    np.testing.assert_array_equal(sources.table_of(tmp_path)[0], head.astype(ml_dtypes.bfloat16))
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": true}')  # a lm_head saved along with it is not used
    np.testing.assert_array_equal(sources.table_of(tmp_path)[0], w["embed"])
    with pytest.raises(ValueError, match="lm_head.weight or embed_tokens.weight"):
        sources.table_of(Path(__file__).parent)


@needs_tool
def test_the_softcap_of_a_file_goes_with_its_table(tmp_path, capsys):
    """Without it the logits of a Gemma 2 are others, and so is the loss."""
    numpy_files, gguf = pytest.importorskip("safetensors.numpy"), pytest.importorskip("gguf")
    from cutloss.analysis.__main__ import main

    rng = np.random.default_rng(3)
    table, hidden = (2 * rng.standard_normal((n, 8)).astype(np.float32) for n in (60, 20))
    labels = rng.integers(0, 60, 20)
    sources.Arrays(hidden, table, labels).dump(tmp_path / "arrays")
    model = tmp_path / "model"
    model.mkdir()
    numpy_files.save_file({"model.embed_tokens.weight": table}, model / "a.safetensors")
    (model / "config.json").write_text('{"model_type": "gemma2", "final_logit_softcapping": 5.0}')
    writer = gguf.GGUFWriter(model / "a.gguf", "gemma2")
    writer.add_final_logit_softcapping(5.0)
    writer.add_tensor("token_embd.weight", table)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    given = [f"--{name}={tmp_path}/arrays/{name}.npy" for name in ("hidden", "labels")]
    common = [*given, "--what", "mass", "--no-plots", "--out", str(tmp_path)]

    def nll(*source):
        assert main([*common, *source, "--name", "x"]) == 0
        (file,) = tmp_path.glob("x-*.json")
        found = json.loads(file.read_text())["nll"]
        file.unlink()
        return found

    def wanted(cap):
        z = cap * np.tanh(hidden @ table.T.astype(np.float64) / cap)
        return np.mean(np.log(np.exp(z).sum(1)) - z[np.arange(20), labels])

    # f32 logits of 8 terms up to 100: within 1e-5; without the cap the loss is several times as large.
    for path in (["--safetensors", str(model)], ["--gguf", str(model / "a.gguf")]):
        assert nll(*path) == pytest.approx(wanted(5.0), rel=1e-5)
        assert nll(*path, "--softcap", "7") == pytest.approx(wanted(7.0), rel=1e-5)


def test_every_label_is_the_token_after_its_row_s_input():
    ids = list(range(100, 140))
    inputs, labels = sources.rows_of(ids, 7, tokens=40, context=8)
    assert inputs[0].tolist() == [7, *range(100, 107)]
    assert labels[0].tolist() == list(range(100, 108))
    assert inputs.shape == labels.shape == (5, 8)
    inputs, labels = sources.rows_of(ids, None, tokens=16, context=8)  # Qwen has no BOS
    assert (inputs[1, 0], labels[1, 0], labels[1, -1]) == (108, 109, 116)
    with pytest.raises(ValueError, match="the text has 40 tokens; one row of --context 64"):
        sources.rows_of(ids, 7, tokens=1024, context=64)


def test_hidden_states_of_a_live_model_give_its_own_logits():
    pytest.importorskip("tunix")
    import jax.numpy as jnp
    from cutloss.sft import families, models
    from cutloss.sft.config import Config, Data, Lora, Model

    settings = Model(family="gemma3")
    source = models.find(settings)
    model = models.load(source, Config(settings, Data(), Lora(rank=0)))
    ids = np.random.default_rng(0).integers(0, families.TINY_VOCAB, (2, 12))
    arrays = sources.live(model, ids, ids)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((1, 12, 12), bool)), (2, 12, 12))
    logits, _ = model(jnp.asarray(ids), jnp.broadcast_to(jnp.arange(12), (2, 12)), None, mask)
    assert arrays.options == {"head_layout": "vd", "softcap": None}
    # f32 products over 32 numbers, jitted here and not there.
    np.testing.assert_allclose(arrays.hidden @ arrays.table.T, np.asarray(logits).reshape(24, -1), atol=1e-4, rtol=1e-4)


def test_texts_are_named_and_an_unknown_kind_is_refused(tmp_path):
    text, whence = texts.read("code", 500)
    assert len(text) == 500
    assert "argparse.py" in whence
    file = tmp_path / "own.txt"
    file.write_text("déjà", encoding="utf-8")
    assert texts.read(str(file), 3) == ("déj", str(file))
    with pytest.raises(ValueError, match="neither one of english, french, code nor a file"):
        texts.read("latin", 5)


def test_importing_the_package_imports_no_framework_and_no_matplotlib():
    code = "import sys, cutloss.analysis; print(sorted({'jax', 'matplotlib', 'gguf'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@needs_tool
def test_the_command_reads_dumps_and_draws_before_and_after(tmp_path):
    pytest.importorskip("matplotlib")
    from cutloss.analysis.__main__ import main

    rng = np.random.default_rng(2)
    table = rng.standard_normal((300, 16)).astype(np.float32)
    for name, scale in (("a", 0.5), ("b", 1.5)):  # training makes a model more confident
        hidden = (scale * rng.standard_normal((64, 16))).astype(np.float32)
        sources.Arrays(hidden, table, rng.integers(0, 300, 64)).dump(tmp_path / name)
    out = tmp_path / "out"
    common = ["--before", str(tmp_path / "a"), "--after", str(tmp_path / "b"), "--out", str(out), "--name", "x"]
    assert main([*common, "--tile", "16x32", "--tolerances", "0.01"]) == 0
    names = {path.name for path in out.iterdir()}
    figures = {f"x-{figure}.{kind}" for figure in ("survival", "tiles", "error") for kind in ("png", "svg")}
    assert names == figures | {"x-before.json", "x-after.json"}
    assert all((out / name).stat().st_size > 2000 for name in figures)
    first = (out / "x-survival.svg").read_bytes()
    assert main([*common, "--what", "mass"]) == 0
    assert (out / "x-survival.svg").read_bytes() == first  # the same figure is the same file


def test_the_command_says_what_is_wrong(capsys, tmp_path):
    from cutloss.analysis.__main__ import main

    assert main(["--out", str(tmp_path)]) == 2
    assert "give one of --npy" in capsys.readouterr().err
    assert main(["--npy", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert "hidden.npy" in capsys.readouterr().err
