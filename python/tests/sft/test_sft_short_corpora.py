"""Texts around the length of a context: trained on, or refused in a line; never an empty or a wrapped-around batch."""

import pytest

from cutloss.sft import data, tokenizers
from cutloss.sft.data import DataError, Pair

CONTEXT = 64
TEMPLATE = "{source}:"
# BOS, "s:", the space before the answer, EOS
AROUND = 5


@pytest.mark.parametrize("tokens", [AROUND + 1, CONTEXT - 1, CONTEXT, CONTEXT + 1])
def test_a_row_around_the_length_of_the_context_keeps_its_targets(tokens):
    pair = Pair("s", "x" * (tokens - AROUND))
    made, dropped = data.batches([pair], tokenizers.Bytes(), batch=2, context=CONTEXT, steps=3, seed=0, template=TEMPLATE)
    assert len(made) == 3 and dropped == 0
    for i in range(len(made)):
        batch = made[i]
        assert batch["input_tokens"].shape == (2, CONTEXT)
        targets = min(tokens, CONTEXT) - 3
        assert batch["input_mask"].sum(1).tolist() == [targets, targets] and made.targets(i) == 2 * targets
        ended = tokens <= CONTEXT
        assert (batch["input_tokens"] == tokenizers.Bytes().eos_id()).sum() == (2 if ended else 0)


@pytest.mark.parametrize("prompt", [CONTEXT - 2, CONTEXT - 1, CONTEXT])
def test_a_prompt_around_the_length_of_the_context(prompt):
    """It needs room for one target; the row of exactly the context has none."""
    pair = Pair("s" * (prompt - 1), "x")
    length = 1 + prompt  # with BOS

    def make():
        return data.batches([pair], tokenizers.Bytes(), batch=1, context=CONTEXT, steps=1, seed=0, template=TEMPLATE)

    if length < CONTEXT:
        assert make()[0].targets(0) == CONTEXT - length
    else:
        with pytest.raises(DataError, match="all 1 prompts fill the context of 64 tokens"):
            make()


@pytest.mark.parametrize("text", ["", "\n", "a\t", "\ta", "a\tb"])
def test_a_file_of_next_to_nothing(tmp_path, text):
    path = tmp_path / "a.tsv"
    path.write_text(text)
    if text == "a\tb":
        assert data.load(path)[0] == [Pair("a", "b")]
    else:
        with pytest.raises(DataError, match=r"no usable pair|1 columns; expected 2"):
            data.load(path)
