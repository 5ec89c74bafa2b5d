"""The byte-level BPE tokenizer of a GGUF file, as a tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# How text is cut before merging, by `tokenizer.ggml.pre`: None is GPT-2's own cut, else a pattern of the pieces.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PATTERNS = {"llama-bpe": _WORDS.format(digits="{1,3}"), "qwen2": _WORDS.format(digits="")}
_GPT2 = ("gpt-2", "default", "smollm")

CONTROL, USER_DEFINED = 3, 4  # of GGUF's token types


def write(reader: Any, folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json; raises ValueError for a kind of tokenizer that is not known."""
    made, ids = build(reader)
    made.save(str(folder / "tokenizer.json"))
    told = {f"{role}_token": made.id_to_token(i) for role, i in ids.items()} | {"add_bos_token": "bos" in ids}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))


def build(reader: Any) -> tuple[Any, dict[str, int]]:
    """Returns the tokenizer and the ids of what ends, pads and begins a text ("eos", "pad", "bos"), where there are such.

    Raises:
        ValueError or KeyError: it is of a kind that is not known.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

    def contents(key: str, default: Any = None) -> Any:
        field = reader.fields.get(f"tokenizer.ggml.{key}")
        return default if field is None else field.contents()

    kind, cut = contents("model"), contents("pre", "default")
    if kind != "gpt2" or cut not in (*_GPT2, *_PATTERNS):
        known = ", ".join((*_GPT2, *_PATTERNS))
        raise ValueError(f"its tokenizer is {kind!r} with the cut {cut!r}; of 'gpt2' with {known} is read")
    tokens = contents("tokens")
    merges = [tuple(merge.split(" ")) for merge in contents("merges")]
    made = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    if cut == "qwen2":
        made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence(_cuts(cut, pre_tokenizers))
    made.decoder = decoders.ByteLevel()
    for token, type_ in zip(tokens, contents("token_type"), strict=True):
        if type_ in (CONTROL, USER_DEFINED):
            made.add_tokens([AddedToken(token, special=type_ == CONTROL, normalized=False)])
    roles = {"eos": "eos", "pad": "padding", **({"bos": "bos"} if contents("add_bos_token", False) else {})}
    ids = {role: contents(f"{key}_token_id") for role, key in roles.items()}
    return made, {role: int(i) for role, i in ids.items() if i is not None}


def _cuts(cut: str, pre_tokenizers: Any) -> list[Any]:
    if cut in _PATTERNS:
        from tokenizers import Regex

        words = pre_tokenizers.Split(Regex(_PATTERNS[cut]), "isolated")
        return [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    digits = [pre_tokenizers.Digits(individual_digits=True)] if cut == "smollm" else []
    return [*digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
