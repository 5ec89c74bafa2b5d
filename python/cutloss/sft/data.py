"""Pairs of texts: where they come from, how they are split, and how they become batches.

By default the pairs are the system's own gettext catalogues, text that people translated and that is on most machines.
"""

from __future__ import annotations

import gettext
import hashlib
import itertools
import json
import random
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .config import PROMPT, Data
from .paths import cache_dir

CATALOGUES = (Path("/usr/share/locale/fr/LC_MESSAGES"), Path("/usr/share/locale-langpack/fr/LC_MESSAGES"))

# Container images often drop their catalogues. These Debian packages carry some 9,000 French strings together.
PACKAGES = ("coreutils", "dpkg", "apt", "gettext", "gnupg-l10n", "binutils-common")
ENOUGH_PAIRS = 2000

LONGEST = 600  # characters; 256 tokens hold about 900 of both languages together
HELD_OUT_ONE_IN = 20


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
        tokens: BOS if the tokenizer has one, the prompt, the answer, EOS; cut at the context.
        targets_from: index of the first token the loss counts: the first one of the answer.
    """

    tokens: list[int]
    targets_from: int


def load(path: Path | None, source: str = "en", target: str = "fr") -> tuple[list[Pair], str]:
    """Returns the usable pairs of a file, or of the system's catalogues if `path` is None, and a line that says whence.

    `source` and `target` are the fields of a JSONL or Parquet record.

    Raises:
        DataError: nothing usable there, or a malformed file.
    """
    if path is not None:
        fields = (source, target)
        readers = {
            ".tsv": read_tsv,
            ".jsonl": lambda path: read_jsonl(path, fields),
            ".parquet": lambda path: read_parquet(path, fields),
            ".mo": read_mo,
        }
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


def split(pairs: Iterable[Pair], one_in: int = HELD_OUT_ONE_IN) -> tuple[list[Pair], list[Pair]]:
    """Returns (training, held-out) pairs. All translations of one source fall on the same side, on every machine."""
    sides: tuple[list[Pair], list[Pair]] = ([], [])
    for pair in pairs:
        digest = hashlib.blake2b(pair.source.encode(), digest_size=8).digest()
        sides[int.from_bytes(digest, "little") % one_in == 0].append(pair)
    return sides


def of(settings: Data) -> tuple[list[Pair], list[Pair], str]:
    """Returns the (training, held-out) pairs of a run's settings, and whence they are; raises as `load` does."""
    path = Path(settings.path).expanduser() if settings.path else None
    pairs, whence = load(path, settings.source, settings.target)
    return *split(pairs, settings.held_out_one_in), whence


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


def read_jsonl(path: Path, fields: tuple[str, str] = ("en", "fr")) -> Iterator[Pair]:
    """Yields the pairs of a file with one JSON object a line: `{"en": ..., "fr": ...}`, or that as its "translation"."""
    for number, line in _lines(path):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}:{number}: not JSON ({error})") from error
        yield _from_record(record, fields, f"{path}:{number}")


def read_parquet(path: Path, fields: tuple[str, str] = ("en", "fr")) -> Iterator[Pair]:
    """Yields the pairs of a Parquet file: two columns, or a column `translation` with the two fields (OPUS-100's)."""
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{path}: not a Parquet file ({error})") from error
    names = file.schema_arrow.names
    columns = ["translation"] if "translation" in names else [name for name in fields if name in names]
    if columns != ["translation"] and len(columns) != 2:
        source, target = fields
        raise DataError(
            f"{path}: columns {', '.join(names)}; expected one named 'translation' with fields '{source}' and "
            f"'{target}', or these two"
        )
    row = 0
    for batch in file.iter_batches(columns=columns):
        for record in batch.to_pylist():
            yield _from_record(record, fields, f"{path}: row {row}")
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


def _from_record(record, fields: tuple[str, str], place: str) -> Pair:
    found = record.get("translation", record) if isinstance(record, dict) else None
    source, target = fields
    if isinstance(found, dict) and isinstance(found.get(source), str) and isinstance(found.get(target), str):
        return Pair(found[source], found[target])
    form = f'{{"{source}": "...", "{target}": "..."}}'
    raise DataError(f'{place}: expected {{"translation": {form}}} or {form}')


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


def prompt(source: str, template: str = PROMPT) -> str:
    """Returns the prompt for a source text, without BOS: the Sampler and `encode` add it."""
    return template.replace("{source}", source)


def encode(pair: Pair, tokenizer, context: int, template: str = PROMPT) -> Example | None:
    """Returns the row for a pair, or None if its prompt alone leaves no room for an answer in `context` tokens.

    Prompt and answer are encoded apart, as generation will see the prompt without the answer; the space that
    separates them begins the answer, because SentencePiece keeps a space with the word after it.
    """
    head = prompt_ids(prompt(pair.source, template), tokenizer)
    if len(head) >= context:
        return None
    answer = [*_bare(tokenizer, " " + pair.target), tokenizer.eos_id()]
    return Example((head + answer)[:context], len(head))


def prompt_ids(text: str, tokenizer) -> list[int]:
    """Returns the tokens of a prompt, in training and in generation: BOS if there is one, and the text's own.

    An EOS that the text spells out is its own; a BOS there is not said twice.
    """
    bos, ids = tokenizer.bos_id(), _bare(tokenizer, text)
    if bos is None or bos < 0:  # Qwen's has none
        return ids
    return [bos, *itertools.dropwhile(lambda token: token == bos, ids)]


def _bare(tokenizer, text: str) -> list[int]:
    """Returns the tokens of `text` alone: some tokenizers put BOS before and EOS after whatever they encode."""
    ids, around = list(tokenizer.encode(text)), list(tokenizer.encode(""))
    first = around[:1] == [tokenizer.bos_id()] and ids[:1] == around[:1]
    last = around[-1:] == [tokenizer.eos_id()] and ids[-1:] == around[-1:]
    return ids[first : len(ids) - last]


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


class Batches(Sequence):
    """Batches of rows in a fixed order, each collated when it is asked for: its attention mask is batch * context^2 bytes.

    Of `group` batches in turn each knows its `share` of their targets, by which a mean of their means becomes the mean
    over all their targets.
    """

    def __init__(self, examples: list[Example], batch: int, context: int, group: int = 1) -> None:
        self.examples, self._batch, self._context, self._group = examples, batch, context, group

    def __len__(self) -> int:
        return len(self.examples) // self._batch

    def __getitem__(self, index):
        import numpy as np

        if not 0 <= index < len(self):
            raise IndexError(index)
        made = collate(self._rows(index), self._context)
        if self._group > 1:
            first = index - index % self._group
            counts = [self.targets(i) for i in range(first, min(first + self._group, len(self)))]
            own = counts[index - first]
            # The mean over a group in which nothing is a target is 0, whatever the shares.
            made["share"] = np.float32(len(counts) * own / max(1, sum(counts)))
        return made

    def targets(self, index: int) -> int:
        """Returns the number of targets in a batch."""
        return sum(len(example.tokens) - example.targets_from for example in self._rows(index))

    def _rows(self, index: int) -> list[Example]:
        return self.examples[index * self._batch : (index + 1) * self._batch]


def batches(
    pairs: list[Pair],
    tokenizer,
    *,
    batch: int,
    context: int,
    steps: int,
    seed: int,
    accumulation: int = 1,
    template: str = PROMPT,
) -> tuple[Batches, int]:
    """Returns (the batches of `steps` steps, number of pairs dropped for a prompt that fills the context) for a seed.

    Raises:
        DataError: every pair was dropped, so there is nothing to learn from.
    """
    order, distinct = _endless(pairs, random.Random(seed)), len(set(pairs))
    encoded: dict[Pair, Example | None] = {}
    examples: list[Example] = []
    while len(examples) < batch * steps * accumulation:
        pair = next(order)
        if pair not in encoded:
            encoded[pair] = encode(pair, tokenizer, context, template)
        example = encoded[pair]
        if example is not None:
            examples.append(example)
        elif not examples and len(encoded) == distinct:
            raise DataError(
                f"no row has a target: all {len(encoded)} prompts fill the context of {context} tokens, such as "
                f"{prompt(pair.source, template)!r}"
            )
    return Batches(examples, batch, context, accumulation), sum(example is None for example in encoded.values())


def held_out_batches(
    pairs: list[Pair], tokenizer, *, batch: int, context: int, count: int, template: str = PROMPT
) -> Batches:
    """Returns up to `count` whole batches of the first pairs that fit the context; the mean over them is over targets."""
    encoded = (encode(pair, tokenizer, context, template) for pair in pairs)
    examples = [example for example in encoded if example is not None][: batch * count]
    whole = len(examples) // batch
    return Batches(examples[: whole * batch], batch, context, group=max(whole, 1))


def unknown_ids(examples: Iterable[Example], vocab: int) -> list[int]:
    """Returns the token ids that a head of `vocab` rows does not have."""
    return sorted({token for example in examples for token in example.tokens if not 0 <= token < vocab})


def digest(batch_list: Batches, hasher: Callable = hashlib.sha256) -> str:
    """Returns a hash of everything in the batches, by which two runs can show that they saw the same."""
    total = hasher()
    for example in batch_list.examples:
        total.update(json.dumps([example.targets_from, *example.tokens]).encode())
    return total.hexdigest()[:16]


def _endless(pairs: list[Pair], rng: random.Random) -> Iterator[Pair]:
    if not pairs:
        raise DataError("no pair to train on; the file is too small to hold some out, add more pairs")
    while True:
        yield from rng.sample(pairs, len(pairs))
