"""English-French pairs for the demo: where they come from, how they are split, and how they become batches.

By default the pairs are the system's own gettext catalogues, text that people translated and that is on most machines.
"""

from __future__ import annotations

import gettext
import hashlib
import json
import random
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .gemma3 import cache_dir

CATALOGUES = (Path("/usr/share/locale/fr/LC_MESSAGES"), Path("/usr/share/locale-langpack/fr/LC_MESSAGES"))

# Container images often drop their catalogues. These Debian packages carry some 9,000 French strings together.
PACKAGES = ("coreutils", "dpkg", "apt", "gettext", "gnupg-l10n", "binutils-common")
ENOUGH_PAIRS = 2000

LONGEST = 600  # characters; 256 tokens hold about 900 of both languages together
HELD_OUT_ONE_IN = 20

PROMPT = "Translate English to French.\nEnglish: {source}\nFrench:"


class DataError(ValueError):
    """The data cannot be used; the message names the file, the place in it and what is expected."""


@dataclass(frozen=True)
class Pair:
    """A text and its translation."""

    source: str
    target: str


@dataclass(frozen=True)
class Example:
    """One training row before padding.

    Attributes:
        tokens: BOS, the prompt, the answer, EOS; cut at the context.
        targets_from: index of the first token the loss counts: the first one of the answer.
    """

    tokens: list[int]
    targets_from: int


def load(path: Path | None) -> tuple[list[Pair], str]:
    """Returns the usable pairs of a file, or of the system's catalogues if `path` is None, and a line that says whence.

    Raises:
        DataError: nothing usable there, or a malformed file.
    """
    if path is not None:
        readers = {".tsv": read_tsv, ".jsonl": read_jsonl, ".parquet": read_parquet, ".mo": read_mo}
        if path.suffix not in readers:
            raise DataError(f"{path}: unknown kind of file; expected one of {', '.join(readers)}")
        if not path.is_file():
            raise DataError(f"{path}: no such file")
        found, whence = usable(readers[path.suffix](path)), str(path)
    else:
        folders = [folder for folder in CATALOGUES if folder.is_dir()]
        found, whence = _catalogue_pairs(folders), "gettext catalogues of this system"
        if len(found) < ENOUGH_PAIRS:
            few = len(found)
            found = _catalogue_pairs([*folders, _unpacked_packages()])
            whence += f" (only {few} pairs) and of the Debian packages {', '.join(PACKAGES)}"
    if not found:
        raise DataError(f"{whence}: no usable pair; each needs a text and a different translation of it")
    return found, f"{len(found)} pairs from {whence}"


def usable(pairs: Iterable[Pair]) -> list[Pair]:
    """Returns the distinct pairs worth learning from, in order: non-empty, really translated, not too long."""
    kept: dict[Pair, None] = {}
    for pair in pairs:
        pair = Pair(pair.source.strip(), pair.target.strip())
        translated = pair.source != pair.target and any(c.isalpha() for c in pair.source) and pair.target
        if translated and len(pair.source) + len(pair.target) <= LONGEST:
            kept[pair] = None
    return list(kept)


def split(pairs: Iterable[Pair]) -> tuple[list[Pair], list[Pair]]:
    """Returns (training, held-out) pairs. All translations of one source fall on the same side, on every machine."""
    sides: tuple[list[Pair], list[Pair]] = ([], [])
    for pair in pairs:
        digest = hashlib.blake2b(pair.source.encode(), digest_size=8).digest()
        sides[int.from_bytes(digest, "little") % HELD_OUT_ONE_IN == 0].append(pair)
    return sides


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_mo(path: Path) -> Iterator[Pair]:
    """Yields the pairs of a compiled gettext catalogue: of plurals the singular, of strings with a context the text."""
    try:
        with path.open("rb") as file:
            catalogue = gettext.GNUTranslations(file)._catalog
    except (OSError, UnicodeDecodeError, ValueError, LookupError) as error:
        raise DataError(f"{path}: not a gettext catalogue ({error}); expected a compiled .mo file") from error
    for key, target in catalogue.items():
        if isinstance(key, tuple):  # a plural: (singular source, index of the form)
            key, form = key
            if form != 0:
                continue
        source = key.rpartition("\x04")[2]
        if source:  # the entry of the empty string is the header
            yield Pair(source, target)


def read_tsv(path: Path) -> Iterator[Pair]:
    """Yields the pairs of a UTF-8 file with a source, a tab and a target on each line."""
    for number, line in _lines(path):
        columns = line.split("\t")
        if len(columns) != 2:
            raise DataError(f"{path}:{number}: {len(columns)} columns; expected 2, a source, a tab and a target")
        yield Pair(*columns)


def read_jsonl(path: Path) -> Iterator[Pair]:
    """Yields the pairs of a file with one JSON object a line, of the form `{"translation": {"en": ..., "fr": ...}}`."""
    for number, line in _lines(path):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}:{number}: not JSON ({error})") from error
        yield _from_translation(record.get("translation") if isinstance(record, dict) else None, f"{path}:{number}")


def read_parquet(path: Path) -> Iterator[Pair]:
    """Yields the pairs of a Parquet file's column `translation`, a struct with fields `en` and `fr` (OPUS-100's)."""
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{path}: not a Parquet file ({error})") from error
    if "translation" not in file.schema_arrow.names:
        names = ", ".join(file.schema_arrow.names)
        raise DataError(f"{path}: columns {names}; expected one named 'translation' with fields 'en' and 'fr'")
    row = 0
    for batch in file.iter_batches(columns=["translation"]):
        for translation in batch.column(0).to_pylist():
            yield _from_translation(translation, f"{path}: row {row}")
            row += 1


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            try:
                line = raw.decode("utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise DataError(f"{path}:{number}: not UTF-8 ({error.reason} at byte {error.start})") from error
            if line:
                yield number, line


def _from_translation(translation, place: str) -> Pair:
    match translation:
        case {"en": str(source), "fr": str(target)}:
            return Pair(source, target)
    raise DataError(f'{place}: expected {{"translation": {{"en": "...", "fr": "..."}}}}')


def _catalogue_pairs(folders: Iterable[Path]) -> list[Pair]:
    return usable(pair for folder in folders for path in sorted(folder.rglob("*.mo")) for pair in read_mo(path))


def _unpacked_packages() -> Path:
    """Downloads PACKAGES with apt-get and unpacks them, without installing anything; returns the cached folder."""
    target = cache_dir() / "catalogues-fr"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=target.name + ".", dir=target.parent) as name:
        building, kept = Path(name), Path(name, "kept")
        kept.mkdir()
        try:
            subprocess.run(["apt-get", "download", *PACKAGES], cwd=building, check=True, capture_output=True, text=True)
            for package in sorted(building.glob("*.deb")):
                root = building / package.stem
                subprocess.run(["dpkg-deb", "-x", package, root], check=True, capture_output=True, text=True)
                for catalogue in root.rglob("fr/LC_MESSAGES/*.mo"):
                    shutil.copy(catalogue, kept)
        except (OSError, subprocess.CalledProcessError) as error:
            reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1]
            raise DataError(
                f"this system has too few French catalogues, and Debian's could not be downloaded ({reason}); run "
                "'apt-get update' first, or give a file of pairs with --data"
            ) from error
        kept.rename(target)
    return target


# ---- encoding --------------------------------------------------------------------------------------------------------


def prompt(source: str) -> str:
    """Returns the prompt for a source text, without BOS: the Sampler and `encode` add it."""
    return PROMPT.format(source=source)


def encode(pair: Pair, tokenizer, context: int) -> Example | None:
    """Returns the row for a pair, or None if its prompt alone leaves no room for an answer in `context` tokens.

    Prompt and answer are encoded apart, as generation will see the prompt without the answer; the space that
    separates them begins the answer, because SentencePiece keeps a space with the word after it.
    """
    head = [tokenizer.bos_id(), *_bare(tokenizer, prompt(pair.source))]
    if len(head) >= context:
        return None
    answer = [*_bare(tokenizer, " " + pair.target), tokenizer.eos_id()]
    return Example((head + answer)[:context], len(head))


def _bare(tokenizer, text: str) -> list[int]:
    """Returns the tokens of `text` alone: some tokenizers put BOS before and EOS after whatever they encode."""
    ids = list(tokenizer.encode(text))
    start = 1 if ids[:1] == [tokenizer.bos_id()] else 0
    return ids[start:-1] if ids[start:] and ids[-1] == tokenizer.eos_id() else ids[start:]


def collate(examples: list[Example], context: int) -> dict:
    """Returns the batch that Tunix's PeftTrainer takes.

    `input_tokens` [B, L] int32, `input_mask` [B, L] bool (the targets), `positions` [B, L] int32, `attention_mask`
    [B, L, L] bool. What is padding follows from each row's length, never from a token's id: EOS or a pad id inside a
    row is text.
    """
    import numpy as np

    lengths = np.array([len(example.tokens) for example in examples])
    starts = np.array([example.targets_from for example in examples])
    tokens = np.zeros((len(examples), context), np.int32)
    for row, example in zip(tokens, examples, strict=True):
        row[: len(example.tokens)] = example.tokens
    at = np.arange(context)
    real = at < lengths[:, None]
    return {
        "input_tokens": tokens,
        "input_mask": real & (at >= starts[:, None]),
        "positions": np.tile(at.astype(np.int32), (len(examples), 1)),
        "attention_mask": (at[None, :] <= at[:, None]) & real[:, None, :],
    }


def batches(
    pairs: list[Pair], tokenizer, *, batch: int, context: int, steps: int, seed: int
) -> tuple[list[dict], int]:
    """Returns (`steps` batches, number of pairs dropped for a prompt that fills the context), the same for a seed.

    Raises:
        DataError: every pair was dropped, so there is nothing to learn from.
    """
    order = _endless(pairs, random.Random(seed))
    examples: list[Example] = []
    dropped = 0
    while len(examples) < batch * steps:
        example = encode(next(order), tokenizer, context)
        if example is not None:
            examples.append(example)
        elif (dropped := dropped + 1) >= len(pairs) and not examples:
            raise DataError(f"no row has a target: all {dropped} prompts fill the context of {context} tokens")
    rows = (examples[i : i + batch] for i in range(0, len(examples), batch))
    return [collate(group, context) for group in rows], dropped


def digest(batch_list: list[dict], hasher: Callable = hashlib.sha256) -> str:
    """Returns a hash of everything in the batches, by which two runs can show that they saw the same."""
    total = hasher()
    for batch in batch_list:
        for name in sorted(batch):
            total.update(batch[name].tobytes())
    return total.hexdigest()[:16]


def _endless(pairs: list[Pair], rng: random.Random) -> Iterator[Pair]:
    if not pairs:
        raise DataError("no pair to train on; the file is too small to hold some out, add more pairs")
    while True:
        yield from rng.sample(pairs, len(pairs))
