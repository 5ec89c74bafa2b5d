"""A Llama out of a GGUF file, run in NumPy: small models, and a check that needs no other framework.

What a file may hold, and its tokenizer, are what `cutloss.sft.gguf_file` says of the same files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..sft import gguf_file, gguf_tokenizer, weight_files


class Llama:
    """Weights in float32. `hidden(ids)` is what enters the head, `table` the head itself."""

    def __init__(self, path: Path) -> None:
        """Reads the file; raises ValueError if it holds anything this model does not compute with."""
        import gguf

        self._path, self._reader = path, weight_files.gguf(path)
        with self._named():
            config = gguf_file.config_json(self._reader, "llama")
            for tensor in self._reader.tensors:
                gguf_file.hugging_face_name(tensor.name, gguf_file.ARCHITECTURES["llama"])
        self._weights = {
            tensor.name: np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32)
            for tensor in self._reader.tensors
        }
        self.layers = config["num_hidden_layers"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.epsilon, self.rope_base = config["rms_norm_eps"], config["rope_theta"]
        embedding = self._weights["token_embd.weight"]
        self.table = self._weights.get("output.weight", embedding)  # tied where there is no head of its own

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, KeyError) as error:
            raise ValueError(f"{self._path}: {error}") from error

    def tokenizer(self) -> tuple[Any, int | None]:
        """Returns the file's byte-level BPE tokenizer, and the id that begins a text; SmolLM2 was trained without one.

        Raises:
            ValueError: the file's is of another kind.
        """
        with self._named():
            made, special = gguf_tokenizer.build(self._reader)
        return made, special.get("bos")

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
