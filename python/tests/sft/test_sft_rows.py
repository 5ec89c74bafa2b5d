"""What a batch tells the trainer: which tokens are targets, and how much each counts."""

import numpy as np
import pytest
import runs

from cutloss.sft import data, run, tokenizers
from cutloss.sft.config import ConfigError
from cutloss.sft.data import Batches, DataError, Example, Pair


def test_micro_batches_count_by_their_targets():
    """7 targets of loss 0.693147 and one of 4.018150: a mean of means says 2.355649, the tokens say 1.108773."""
    rows = [Example([1] * 8, 1), Example([1] * 2, 1)]
    made = Batches(rows, batch=1, context=8, group=2)
    means = [0.693147, 4.018150]
    mean_of_shared = sum(mean * made[i]["share"] for i, mean in enumerate(means)) / 2
    assert mean_of_shared == pytest.approx(1.108773, abs=2e-6)


def test_a_micro_batch_without_targets_leaves_the_others_their_weight():
    rows = [Example([1, 2], 2), Example([1] * 5, 1), Example([1, 2], 2), Example([1, 2], 2)]
    made = Batches(rows, batch=1, context=8, group=2)
    assert [float(b["share"]) for b in made] == [0.0, 2.0, 0.0, 0.0]


def test_one_batch_a_step_is_tunix_own_batch():
    assert "share" not in Batches([Example([1, 2], 1)], batch=1, context=4)[0]


def test_shares_are_within_a_step_and_a_ragged_last_group_is_its_own():
    rows = [Example([1] * n, 1) for n in (2, 4, 3)]
    made = Batches(rows, batch=1, context=4, group=2)
    assert [float(b["share"]) for b in made] == pytest.approx([2 * 1 / 4, 2 * 3 / 4, 1.0])


def test_held_out_mean_is_over_targets_of_whole_batches():
    pairs = [Pair("a", "x" * n) for n in (1, 5, 9, 2, 4)]
    made = data.held_out_batches(pairs, tokenizers.Bytes(), batch=2, context=64, count=9, template="{source}")
    counts = [made.targets(i) for i in range(len(made))]
    assert len(made) == 2 and sum(counts) == sum(n + 2 for n in (1, 5, 9, 2))  # a space before, EOS after
    assert [float(made[i]["share"]) for i in (0, 1)] == pytest.approx([2 * c / sum(counts) for c in counts])


class NoBeginning(tokenizers.Bytes):
    def bos_id(self):
        return None


def test_a_tokenizer_without_bos_gets_none():
    example = data.encode(Pair("ab", "c"), NoBeginning(), 64, "{source}")
    assert example.tokens == [3 + ord(c) for c in "ab c"] + [1] and example.targets_from == 2


def test_a_prompt_may_hold_braces_and_other_fields():
    assert data.prompt("x", '{"text": "{source}"} {target}') == '{"text": "x"} {target}'


def test_bytes_come_back():
    text = "Thé \u2603"
    made = tokenizers.Bytes()
    assert made.decode(made.encode(text)) == text


def test_token_ids_without_a_row_in_the_head_stop_the_run_before_it_loads(tmp_path):
    settings = runs.settings(tmp_path, "model.sizes={num_layers: 1, num_embed: 100}")
    with pytest.raises(ConfigError, match=r"259 ids and the model's head 100 rows; the data uses \d+ ids without one: 10"):
        run.run(settings, tmp_path / "run", lambda *_, **__: None)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_context_shorter_than_every_prompt_stops_the_run_with_a_sample(tmp_path):
    settings = runs.settings(tmp_path, "data.prompt='say this in French please: {source}'", context=16)
    with pytest.raises(DataError, match=r"all \d+ prompts fill the context of 16 tokens, such as 'say this"):
        run.run(settings, tmp_path / "run", lambda *_, **__: None)


def test_too_few_held_out_pairs_for_an_evaluation_are_said_before_the_first_step(tmp_path):
    settings = runs.settings(tmp_path, "evaluation.every=1", batch=30)
    with pytest.raises(DataError, match="do not fill a batch of 30 rows"):
        run.run(settings, tmp_path / "run", lambda *_, **__: None)


def test_a_file_of_one_pair_without_a_newline_trains_or_says_so(tmp_path):
    path = tmp_path / "one.tsv"
    path.write_text("number 1\tnombre 1")
    settings = runs.settings(tmp_path, f"data.path={path}")
    pairs, _ = data.load(path)
    training, held_out = data.split(pairs, settings.data.held_out_one_in)
    assert len(training) + len(held_out) == 1
    if not training:
        with pytest.raises(DataError, match="no pair to train on"):
            data.batches(training, tokenizers.Bytes(), batch=1, context=64, steps=1, seed=0)
    else:
        made, _ = data.batches(training, tokenizers.Bytes(), batch=2, context=64, steps=2, seed=0, template="{source}")
        assert len(made) == 2 and made.examples[0] == made.examples[3]


def test_records_may_be_flat_or_a_translation(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"de": "gut", "fr": "bon", "x": 1}\n{"translation": {"de": "Haus", "fr": "maison"}}\n')
    assert data.load(path, "de", "fr")[0] == [Pair("gut", "bon"), Pair("Haus", "maison")]
    with pytest.raises(DataError, match=r'a.jsonl:1: expected .*"en"'):
        data.load(path)
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"de": ["gut"], "fr": ["bon"]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert data.load(tmp_path / "a.parquet", "de", "fr")[0] == [Pair("gut", "bon")]


def test_shares_are_arrays_that_a_mesh_can_take():
    made = Batches([Example([1] * 4, 1)] * 2, batch=1, context=4, group=2)[0]["share"]
    assert isinstance(made, (np.ndarray, np.generic)) and made.dtype == np.float32 and made.shape == ()
