"""Reading, splitting and encoding pairs."""

import gettext
import json
import struct

import numpy as np
import pytest

from cutloss.sft import data, generation
from cutloss.sft.data import DataError, Example, Pair


# 6 of 100; from blake2b, so fixed for ever.
HELD_OUT_OF_100 = ["text 20", "text 47", "text 61", "text 65", "text 96", "text 97"]


class Words:
    """A tokenizer of whole words. Id 5 is 'pad' as text, and ids of BOS and EOS are never made from text."""

    def encode(self, text):
        return [5 if word == "pad" else 10 + len(word) for word in text.split()]

    def bos_id(self):
        return 2

    def eos_id(self):
        return 1


class MarkedWords(Words):
    """The same, putting BOS and EOS around what it encodes, as some tokenizers do."""

    def encode(self, text):
        return [2, *super().encode(text), 1]


def write_mo(path, entries):
    """Writes a little-endian .mo file; see the GNU gettext manual, "The Format of GNU MO Files"."""
    entries = {"": "Content-Type: text/plain; charset=UTF-8\nPlural-Forms: nplurals=2; plural=(n > 1);\n", **entries}
    keys, values = zip(*((k.encode(), v.encode()) for k, v in sorted(entries.items())), strict=True)
    at = 28 + 16 * len(keys)
    tables, blob = [], b""
    for strings in (keys, values):
        for string in strings:
            tables.append(struct.pack("<II", len(string), at + len(blob)))
            blob += string + b"\0"
    header = struct.pack("<7I", 0x950412DE, 0, len(keys), 28, 28 + 8 * len(keys), 0, 0)
    path.write_bytes(header + b"".join(tables) + blob)
    assert gettext.GNUTranslations(path.open("rb")).gettext("") != ""
    return path


def test_catalogue_header_contexts_and_plurals_do_not_leak_into_pairs(tmp_path):
    path = write_mo(
        tmp_path / "a.mo",
        {"Open": "Ouvrir", "menu\x04Close": "Fermer", "%d file\0%d files": "%d fichier\0%d fichiers"},
    )
    assert set(data.read_mo(path)) == {Pair("Open", "Ouvrir"), Pair("Close", "Fermer"), Pair("%d file", "%d fichier")}


def test_untranslated_empty_and_very_long_strings_are_dropped():
    good = Pair("Good day", "Bonjour")
    bad = [Pair("OK", "OK"), Pair("a", " "), Pair("---", "***"), Pair("x" * 900, "y")]
    assert data.usable([good, *bad, Pair(" Good day\n", "Bonjour ")]) == [good]


@pytest.mark.parametrize("kind", ["tsv", "jsonl", "parquet", "mo"])
def test_every_format_gives_the_same_pairs(tmp_path, kind):
    pairs = [Pair("Good day", "Bonjour"), Pair("Thé ou café?", "Tea or coffee?")]
    records = [{"en": pair.source, "fr": pair.target} for pair in pairs]
    path = tmp_path / f"pairs.{kind}"
    if kind == "tsv":
        path.write_text("".join(f"{p.source}\t{p.target}\r\n" for p in pairs), encoding="utf-8", newline="")
    elif kind == "jsonl":
        path.write_text("\n".join(json.dumps({"translation": r}) for r in records) + "\n\n", encoding="utf-8")
    elif kind == "parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table({"translation": records}), path)
    else:
        write_mo(path, {pair.source: pair.target for pair in pairs})
    found, whence = data.load(path)
    assert sorted(found, key=str) == sorted(pairs, key=str)
    assert str(path) in whence


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tsv", b"one\ttwo\nonly one column\n", r"a.tsv:2: 1 columns; expected 2"),
        ("a.tsv", b"fine\tbien\ncaf\xe9\tthe\n", r"a.tsv:2: not UTF-8"),
        ("a.jsonl", b'{"translation": {"en": "a", "fr": "b"}}\n{oops\n', r"a.jsonl:2: not JSON"),
        ("a.jsonl", b'{"translation": {"en": "a", "de": "b"}}\n', r'a.jsonl:1: expected {"translation"'),
        ("a.jsonl", b"[1]\n", r"a.jsonl:1: expected"),
        ("a.parquet", b"not parquet at all", r"a.parquet: not a Parquet file"),
        ("a.mo", b"not a catalogue at all", r"a.mo: not a gettext catalogue"),
        ("a.csv", b"", r"a.csv: unknown kind of file; expected one of .tsv"),
        ("a.tsv", b"", r"no usable pair"),
    ],
)
def test_bad_file_is_named_with_the_place_and_what_is_expected(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        data.load(path)


def test_missing_file_is_said_to_be_missing(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        data.load(tmp_path / "nowhere.tsv")


def test_parquet_without_a_translation_column_names_the_columns_it_has(tmp_path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="columns text; expected one named 'translation'"):
        data.load(tmp_path / "a.parquet")


def test_translations_of_one_source_never_straddle_the_split():
    pairs = [Pair(f"text {i}", f"{form} {i}") for i in range(2000) for form in ("texte", "écrit")]
    training, held_out = data.split(pairs)
    assert len(training) + len(held_out) == len(pairs)
    assert not {p.source for p in training} & {p.source for p in held_out}
    # 2000 sources, 1 in 20 held out: 100 with a deviation of 10. Five deviations.
    assert 50 <= len({p.source for p in held_out}) <= 150


def test_split_is_the_same_in_every_process():
    """Python's own hash of a string is not: held-out text would drift into training between runs."""
    held_out = data.split(Pair(f"text {i}", "x") for i in range(100))[1]
    assert [pair.source for pair in held_out] == HELD_OUT_OF_100


@pytest.mark.parametrize("tokenizer", [Words(), MarkedWords()])
def test_bos_stands_exactly_once_and_eos_is_learned(tokenizer):
    example = data.encode(Pair("a house", "une maison"), tokenizer, 64)
    assert example.tokens[0] == 2 and example.tokens.count(2) == 1
    assert example.tokens[-1] == 1 and example.tokens.count(1) == 1
    batch = data.collate([example], 64)
    learned = batch["input_tokens"][batch["input_mask"]].tolist()
    assert learned == [*Words().encode("une maison"), 1]


def test_prompt_is_what_generation_will_send():
    """A Sampler encodes the prompt alone; training must have seen those very tokens."""
    tokenizer = Words()
    example = data.encode(Pair("a house", "une maison"), tokenizer, 64)
    assert example.tokens[: example.targets_from] == [2, *tokenizer.encode(data.prompt("a house"))]


@pytest.mark.parametrize("tokenizer", [Words(), MarkedWords()])
def test_prompt_that_ends_with_eos_or_begins_with_bos_is_trained_as_it_is_generated_from(tokenizer):
    """Trained without the EOS that separates the turns of its template, a model never sees what it is asked with."""

    class Spelled(type(tokenizer)):
        def encode(self, text):
            ids = super().encode(text.replace("<s>", "").replace("</s>", ""))
            at = 1 if ids[:1] == [2] else 0
            return [*ids[:at], *[2] * text.count("<s>"), *ids[at : len(ids) - at], *[1] * text.count("</s>"), *ids[len(ids) - at :]]

        def decode(self, ids): ...
        def pad_id(self): return 1
        def vocab_size(self): return 40

    template = "<s>{source}</s>"
    example = data.encode(Pair("a house", "une maison"), Spelled(), 64, template)
    prompt = example.tokens[: example.targets_from]
    assert prompt == [2, *Words().encode("a house"), 1]
    asked = generation._AsTrained(Spelled(), [prompt])
    assert asked.encode(data.prompt("a house", template)) == prompt
    assert asked.pad_id() not in prompt  # the Sampler hides its pad id wherever it is


def test_padding_follows_from_the_length_not_from_an_id():
    """A row may hold the pad id, or EOS, as text: taking those for padding would drop targets."""
    batch = data.collate([Example([2, 0, 0, 1, 0, 1], 2), Example([2, 7, 8], 2)], 8)
    assert batch["input_mask"].tolist() == [[0, 0, 1, 1, 1, 1, 0, 0], [0, 0, 1, 0, 0, 0, 0, 0]]
    seen = batch["attention_mask"]
    assert seen.shape == (2, 8, 8) and seen[0, 5].tolist() == [1] * 6 + [0] * 2
    assert seen[1, 7].tolist() == [1] * 3 + [0] * 5  # a padded query still has keys: softmax of nothing is NaN
    assert not np.triu(seen[0], 1).any()
    np.testing.assert_array_equal(batch["positions"], np.tile(np.arange(8), (2, 1)))


def test_answer_too_long_is_cut_and_prompt_too_long_is_dropped():
    prompt_tokens = 1 + len(Words().encode(data.prompt("word")))
    assert data.encode(Pair("word", "x y z"), Words(), prompt_tokens) is None
    cut = data.encode(Pair("word", "x y z"), Words(), prompt_tokens + 2)
    assert len(cut.tokens) == prompt_tokens + 2 and 1 not in cut.tokens


def test_dropped_prompts_are_counted():
    pairs = [Pair("word " * 50, "x"), Pair("word", "x")]
    made, dropped = data.batches(pairs, Words(), batch=2, context=20, steps=2, seed=0)
    assert len(made) == 2 and dropped > 0


def test_no_row_with_a_target_stops_instead_of_training_on_nothing():
    with pytest.raises(DataError, match="no row has a target: all 1 prompts fill the context of 4 tokens"):
        data.batches([Pair("word", "x")], Words(), batch=1, context=4, steps=1, seed=0)
    with pytest.raises(DataError, match="no pair to train on"):
        data.batches([], Words(), batch=1, context=4, steps=1, seed=0)


def test_same_seed_same_batches_other_seed_other_batches():
    pairs = [Pair(f"{'w' * i} text", "x " * i) for i in range(1, 50)]

    def run(seed):
        return data.digest(data.batches(pairs, Words(), batch=4, context=32, steps=3, seed=seed)[0])

    assert run(0) == run(0) != run(1)
