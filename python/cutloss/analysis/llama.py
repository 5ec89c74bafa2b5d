"""A Llama out of a GGUF file, run in NumPy: small models, and a check that needs no other framework."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


class Llama:
    """Weights in float32. `hidden(ids)` is what enters the head, `table` the head itself."""

    def __init__(self, path: Path) -> None:
        import gguf

        reader = gguf.GGUFReader(path)
        self._fields = reader.fields
        if (architecture := self._contents("general.architecture")) != "llama":
            raise ValueError(f"{path} holds a {architecture!r} model; a 'llama' one is needed")
        self._weights = {
            tensor.name: np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32)
            for tensor in reader.tensors
        }
        self.layers = int(self._contents("llama.block_count"))
        self.heads = int(self._contents("llama.attention.head_count"))
        self.kv_heads = int(self._contents("llama.attention.head_count_kv"))
        self.epsilon = float(self._contents("llama.attention.layer_norm_rms_epsilon"))
        base = reader.fields.get("llama.rope.freq_base")
        self.rope_base = 10000.0 if base is None else float(base.contents())
        embedding = self._weights["token_embd.weight"]
        self.table = self._weights.get("output.weight", embedding)  # tied where there is no head of its own

    def _contents(self, key: str) -> Any:
        return self._fields[key].contents()

    def tokenizer(self) -> Any:
        """Returns the byte-level BPE tokenizer that the file describes."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        if (kind := self._contents("tokenizer.ggml.model")) != "gpt2":
            raise ValueError(f"the file's tokenizer is {kind!r}; only byte-level BPE ('gpt2') is read")
        tokens = self._contents("tokenizer.ggml.tokens")
        merges = [tuple(merge.split(" ")) for merge in self._contents("tokenizer.ggml.merges")]
        tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
        steps = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
        pre = self._fields.get("tokenizer.ggml.pre")
        if pre is not None and pre.contents() == "smollm":
            steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    def bos(self) -> int | None:
        """Returns the id that begins a text; None where the model was trained without one, as SmolLM2."""
        adds, token = (self._fields.get(f"tokenizer.ggml.{key}") for key in ("add_bos_token", "bos_token_id"))
        return None if token is None or (adds is not None and not adds.contents()) else int(token.contents())

    def hidden(self, ids: np.ndarray) -> np.ndarray:
        """Returns the hidden states [L, D] after the final norm of a sequence of ids [L]."""
        x = self._weights["token_embd.weight"][ids]
        for layer in range(self.layers):
            x = x + self._attention(layer, self._norm(x, f"blk.{layer}.attn_norm.weight"))
            x = x + self._mlp(layer, self._norm(x, f"blk.{layer}.ffn_norm.weight"))
        return self._norm(x, "output_norm.weight")

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + self.epsilon) * self._weights[name]

    def _project(self, layer: int, name: str, x: np.ndarray) -> np.ndarray:
        return x @ self._weights[f"blk.{layer}.{name}.weight"].T

    def _attention(self, layer: int, x: np.ndarray) -> np.ndarray:
        length = len(x)
        q = self._rope(self._project(layer, "attn_q", x).reshape(length, self.heads, -1))
        k = self._rope(self._project(layer, "attn_k", x).reshape(length, self.kv_heads, -1))
        v = self._project(layer, "attn_v", x).reshape(length, self.kv_heads, -1)
        k, v = (np.repeat(each, self.heads // self.kv_heads, axis=1) for each in (k, v))
        scores = np.einsum("ihd,jhd->hij", q, k, optimize=True) / np.sqrt(q.shape[-1])
        scores[:, np.triu(np.ones((length, length), bool), 1)] = -np.inf
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        mixed = np.einsum("hij,jhd->ihd", scores, v, optimize=True).reshape(length, -1)
        return self._project(layer, "attn_output", mixed.astype(np.float32))

    def _rope(self, x: np.ndarray) -> np.ndarray:
        """Turns neighbouring pairs: GGUF permutes the rows of Q and K so that a pair's halves lie side by side."""
        length, _, size = x.shape
        angles = np.arange(length)[:, None] * self.rope_base ** (-np.arange(0, size, 2) / size)
        cos, sin = (f(angles)[:, None].astype(np.float32) for f in (np.cos, np.sin))
        even, odd = x[..., 0::2], x[..., 1::2]
        return np.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(x.shape)

    def _mlp(self, layer: int, x: np.ndarray) -> np.ndarray:
        gate = self._project(layer, "ffn_gate", x)
        return self._project(layer, "ffn_down", gate / (1 + np.exp(-gate)) * self._project(layer, "ffn_up", x))
