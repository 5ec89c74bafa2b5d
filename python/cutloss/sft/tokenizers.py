"""Tokenizers under one interface: encode, decode, bos_id, eos_id, pad_id, vocab_size, as SentencePiece has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .config import ConfigError


def load(place: str) -> Any:
    """Returns the tokenizer of a file, or of a folder that holds one; "bytes" is one token a byte.

    Raises:
        ConfigError: there is none, or the file is not one.
    """
    if place == "bytes":
        return Bytes()
    path = Path(place).expanduser()
    if path.is_dir():
        found = [path / name for name in ("tokenizer.model", "tokenizer.json") if (path / name).is_file()]
        if not found:
            raise ConfigError(f"model.tokenizer: {path} has neither tokenizer.model nor tokenizer.json")
        path = found[0]
    if not path.is_file():
        raise ConfigError(f"model.tokenizer: {path}: no such file")
    try:
        if path.suffix == ".json":
            return HuggingFace(path)
        import sentencepiece

        return sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes())
    except ConfigError:
        raise
    except Exception as error:  # both libraries raise bare exceptions
        raise ConfigError(f"model.tokenizer: {path}: {error}; expected a tokenizer.model or tokenizer.json") from error


class Bytes:
    """UTF-8 bytes from id 3 on; 0 pads, 1 ends, 2 begins."""

    def encode(self, text: str) -> list[int]:
        return [3 + byte for byte in text.encode()]

    def decode(self, ids: list[int]) -> str:
        return bytes(i - 3 for i in map(int, ids) if 3 <= i < 259).decode(errors="replace")

    def pad_id(self) -> int:
        return 0

    def eos_id(self) -> int:
        return 1

    def bos_id(self) -> int:
        return 2

    def vocab_size(self) -> int:
        return 259


class HuggingFace:
    """A tokenizer.json; which tokens begin, end and pad is in the tokenizer_config.json or config.json beside it.

    A text begins with BOS if the tokenizer puts it there, or `add_bos_token` says that it does.
    """

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(path))
        settings: dict[str, Any] = {}
        for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
            if (path.parent / name).is_file():
                settings.update(json.loads((path.parent / name).read_text(encoding="utf-8")))
        bos = self._special(settings, "bos")
        adds = settings.get("add_bos_token")
        if adds is None:  # many name a BOS that they never put before a text
            adds = self._tokenizer.encode("", add_special_tokens=True).ids[:1] == [bos]
        self._bos = bos if adds else None
        eos = self._special(settings, "eos")
        if eos is None:
            raise ConfigError(f"model.tokenizer: no eos_token in tokenizer_config.json beside {path}: nothing would end")
        self._eos = eos
        pad = self._special(settings, "pad")
        self._pad = eos if pad is None else pad

    def _special(self, settings: dict[str, Any], role: str) -> int | None:
        token = settings.get(f"{role}_token")
        token = token.get("content") if isinstance(token, dict) else token
        if token is not None:
            return self._tokenizer.token_to_id(token)
        found = settings.get(f"{role}_token_id")
        return found[0] if isinstance(found, list) else found

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids])

    def pad_id(self) -> int:
        return self._pad

    def eos_id(self) -> int:
        return self._eos

    def bos_id(self) -> int | None:
        return self._bos

    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size()
