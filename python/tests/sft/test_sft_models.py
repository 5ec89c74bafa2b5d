"""Models from folders: what is loaded is what the files hold, and a folder that does not hold it is refused."""

import json

import numpy as np
import pytest
from folders import VOCAB, write

from cutloss.sft import config, data, families, generation, models, tokenizers
from cutloss.sft.config import ConfigError

def load(folder):
    settings = config.load(None, [f"model.path={folder}", "lora.rank=0"])
    return models.load(models.find(settings.model), settings)


def test_a_folder_of_safetensors_is_loaded_by_its_own_config(tmp_path):
    arrays, _ = write(tmp_path, "qwen3", rope_theta=None, rope_parameters={"rope_theta": 7000.0})
    model = load(tmp_path)
    assert model.config.rope_theta == 7000.0 and not model.config.use_tied_embedding
    np.testing.assert_array_equal(model.embedder.input_embedding.get_value(), arrays["model.embed_tokens.weight"])
    np.testing.assert_array_equal(model.lm_head.w.get_value(), arrays["lm_head.weight"].T)


@pytest.mark.parametrize(
    ("tied", "head", "message"),
    [
        (False, "own", None),
        (False, "equal", None),
        (False, "absent", "has no lm_head.weight"),
        (True, "own", "a lm_head.weight that is not the embedding"),
        (True, "equal", None),
        (True, "absent", None),
    ],
)
def test_a_head_that_contradicts_the_config_is_refused(tmp_path, tied, head, message):
    """Believing the flag drops a real head, or trains with a random one."""
    write(tmp_path, "qwen3", tie_word_embeddings=tied, head=head)
    source = models.find(config.load(None, [f"model.path={tmp_path}"]).model)
    if message is None:
        models.check_head(source)
    else:
        with pytest.raises(ConfigError, match=message):
            models.check_head(source)


def test_a_missing_weight_and_one_of_another_shape_are_named(tmp_path):
    write(tmp_path, "qwen3", drop=("model.layers.0.mlp.up_proj.weight",))
    with pytest.raises(ConfigError, match=r"lacks weights, the first is .*up_proj"):
        load(tmp_path)
    write(tmp_path, "qwen3", rows=VOCAB + 10)
    with pytest.raises(ConfigError, match=str(VOCAB + 10)):
        load(tmp_path)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("model.family=gpt", "'gpt' is not one of gemma, gemma2"),
        ("model.name=gemma9", "'gemma9' is no model of Tunix's; there is: .*gemma3_270m"),
        ("model.path=/nowhere", "/nowhere: no such file or folder"),
        ("model.seed=1", "set model.path .*, model.name .*, or model.family"),
    ],
)
def test_a_model_that_is_not_there_is_named(setting, message):
    with pytest.raises(ConfigError, match=message):
        models.find(config.load(None, [setting]).model)


def test_a_folder_without_weights_or_config_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no \\*.safetensors"):
        models.find(config.load(None, [f"model.path={tmp_path}"]).model)
    write(tmp_path, "qwen3")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(ConfigError, match="model_type 'mamba' is not known"):
        models.find(config.load(None, [f"model.path={tmp_path}"]).model)
    (tmp_path / "a.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match="expected a folder or .gguf"):
        models.find(config.load(None, [f"model.path={tmp_path / 'a.bin'}"]).model)


@pytest.mark.parametrize("family", families.FAMILIES)
def test_constructors_belong_to_their_family(family):
    """Gemma 2's are on the class it shares with Gemma: a wrong family would lose its softcap."""
    name = {"gemma": "gemma_2b", "gemma2": "gemma2_2b", "gemma3": "gemma3_1b_it", "gemma4": "gemma4_e2b",
            "qwen2": "qwen2p5_0p5b", "qwen3": "qwen3_0p6b", "llama3": "llama3p2_1b"}[family]  # fmt: skip
    source = models.find(config.load(None, [f"model.name={name}", "model.tokenizer=bytes", "model.dtype=bfloat16"]).model)
    assert source.family == family
    if family == "gemma2":
        assert source.config.final_logit_softcap == 30.0


def test_adapters_that_hit_nothing_are_named_with_what_there_is():
    settings = config.load(None, ["model.family=gemma3", "lora.targets=[q_einsum, nope]"])
    with pytest.raises(ConfigError, match=r"lora.targets: nope: no such module in this model; there is: .*gate_proj"):
        models.abstract(models.find(settings.model), settings)


def hugging_face_tokenizer(folder, begins=False, **special):
    """A tokenizer of five words that puts <begin> before a text or does not, and what stands beside it."""
    from tokenizers import AddedToken, Tokenizer, models as parts, pre_tokenizers, processors

    words = {"<end>": 0, "one": 1, "two": 2, "<begin>": 3, "say": 4}
    tokenizer = Tokenizer(parts.WordLevel(words, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_tokens([AddedToken(word, special=True, normalized=False) for word in ("<begin>", "<end>")])
    if begins:
        tokenizer.post_processor = processors.TemplateProcessing("<begin> $A", special_tokens=[("<begin>", 3)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    return tokenizers.load(str(folder))


BOTH = {"eos_token": "<end>", "bos_token": {"content": "<begin>"}}


def test_a_tokenizer_json_knows_what_begins_and_ends(tmp_path):
    made = hugging_face_tokenizer(tmp_path, begins=True, **BOTH)
    assert made.encode("one two") == [1, 2] and made.decode([1, 2]) == "one two"
    assert (made.bos_id(), made.eos_id(), made.pad_id(), made.vocab_size()) == (3, 0, 0, 5)
    assert hugging_face_tokenizer(tmp_path, eos_token="<end>").bos_id() is None  # Qwen has none
    with pytest.raises(ConfigError, match="no eos_token"):
        hugging_face_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("begins", "said", "bos"),
    [(True, None, 3), (False, None, None), (True, False, None), (False, True, 3), (True, True, 3), (False, False, None)],
)
def test_a_token_that_begins_no_text_is_not_put_before_one(tmp_path, begins, said, bos):
    """SmolLM2 has a BOS by name and was trained without; what a file says of it is believed first."""
    told = {} if said is None else {"add_bos_token": said}
    assert hugging_face_tokenizer(tmp_path, begins, **BOTH, **told).bos_id() == bos


@pytest.mark.parametrize(
    ("begins", "template", "prompt"),
    [
        (True, "<begin> say {source}", [3, 4, 1]),  # both: once
        (True, "say {source}", [3, 4, 1]),
        (False, "<begin> say {source}", [3, 4, 1]),
        (False, "say {source}", [4, 1]),
    ],
)
def test_a_start_of_the_template_and_one_of_the_tokenizer_are_one(tmp_path, begins, template, prompt):
    made = hugging_face_tokenizer(tmp_path, begins, **BOTH)
    row = data.encode(data.Pair("one", "two"), made, 16, template)
    assert (row.tokens, row.targets_from) == ([*prompt, 2, 0], len(prompt))
    asked = generation._AsTrained(made, [prompt])
    # What the Sampler sends: its own BOS, then the text's tokens without one.
    text = asked.encode(data.prompt("one", template))
    assert text == prompt and asked.bos_id() == (3 if begins else None)


def test_a_tokenizer_that_is_not_there_or_is_none_is_named(tmp_path):
    with pytest.raises(ConfigError, match="neither tokenizer.model nor tokenizer.json"):
        tokenizers.load(str(tmp_path))
    (tmp_path / "tokenizer.model").write_bytes(b"junk")
    with pytest.raises(ConfigError, match="expected a tokenizer.model"):
        tokenizers.load(str(tmp_path))
    (tmp_path / "a.gguf").write_bytes(b"junk")
    with pytest.raises(ConfigError, match=r"a.gguf"):
        models.find(config.load(None, [f"model.path={tmp_path / 'a.gguf'}"]).model)
