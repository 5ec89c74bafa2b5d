"""Greedy answers by Tunix's Sampler, and their BLEU and chrF."""

from __future__ import annotations

from typing import Any

from . import data
from .config import Config, ConfigError


def prompts(pairs: list[data.Pair], config: Config, tokenizer: Any) -> list[data.Pair]:
    """Returns the pairs whose sources are asked for: sentences of moderate length first, menu entries show little."""
    fitting = [pair for pair in pairs if len(_ids(pair, config, tokenizer)) <= config.train.context]
    telling = [p for p in fitting if 40 <= len(p.source) <= 90 and p.source.count(" ") >= 6]
    chosen = [*telling, *(pair for pair in fitting if pair not in set(telling))]
    return chosen[: config.generation.prompts]


def _ids(pair: data.Pair, config: Config, tokenizer: Any) -> list[int]:
    return data.prompt_ids(data.prompt(pair.source, config.data.prompt), tokenizer)


class _AsTrained:
    """A tokenizer that encodes a prompt as training does. The Sampler puts BOS before it, and takes out a second one.

    It pads with an id that is in no prompt: the Sampler hides that id wherever it is.
    """

    def __init__(self, tokenizer: Any, prompts: list[list[int]]) -> None:
        self._tokenizer = tokenizer
        self.decode, self.eos_id = tokenizer.decode, tokenizer.eos_id
        used = {token for ids in prompts for token in ids}
        pad = tokenizer.pad_id()
        usual = tokenizer.eos_id() if pad is None or pad < 0 else pad
        self._pad = next(i for i in (usual, *range(tokenizer.vocab_size() - 1, -1, -1)) if i not in used)

    def encode(self, text: str) -> list[int]:
        return data.prompt_ids(text, self._tokenizer)

    def bos_id(self) -> int | None:
        bos = self._tokenizer.bos_id()
        return None if bos is None or bos < 0 else bos

    def pad_id(self) -> int:
        return self._pad


def answers(model: Any, tokenizer: Any, pairs: list[data.Pair], config: Config) -> list[str]:
    """Returns the model's greedy answer to each pair's source."""
    from tunix.generate import sampler as sampling
    from tunix.generate.tokenizer_adapter import TokenizerAdapter

    if not pairs:
        return []
    wanted = config.generation
    encoded = [_ids(pair, config, tokenizer) for pair in pairs]
    room = max(map(len, encoded))
    cache = sampling.CacheConfig(
        cache_size=room + wanted.tokens + 1,
        num_layers=model.config.num_layers,
        num_kv_heads=model.config.num_kv_heads,
        head_dim=model.config.head_dim,
    )
    sampler = sampling.Sampler(_without_remat(model), TokenizerAdapter(_AsTrained(tokenizer, encoded)), cache)
    found: list[str] = []
    size = min(wanted.batch, len(pairs))
    for start in range(0, len(pairs), size):
        group = pairs[start : start + size]
        # One shape for all groups, so that nothing is compiled twice.
        asked = [data.prompt(pair.source, config.data.prompt) for pair in group + [group[0]] * (size - len(group))]
        output = sampler(asked, max_generation_steps=wanted.tokens, max_prompt_length=room, temperature=0.0)
        found += [text.strip() for text in output.text[: len(group)]]
    return found


def _without_remat(model: Any) -> Any:
    """A model of the same arrays: rematerialisation is for gradients, and Tunix's Sampler cannot decode under it."""
    import dataclasses

    from flax import nnx

    if model.config.remat_config.name == "NONE":
        return model
    copy = nnx.merge(*nnx.split(model))
    none = type(model.config.remat_config).NONE
    for _, module in nnx.iter_graph(copy):
        if isinstance(module, nnx.Module):
            if hasattr(getattr(module, "config", None), "remat_config"):
                module.config = dataclasses.replace(module.config, remat_config=none)
            if hasattr(module, "remat_config"):  # Gemma's attention has its own
                module.remat_config = none
    return copy


def records(pairs: list[data.Pair], texts: list[str]) -> list[dict[str, str]]:
    return [
        {"source": pair.source, "reference": pair.target, "answer": text}
        for pair, text in zip(pairs, texts, strict=True)
    ]


# ---- quality ---------------------------------------------------------------------------------------------------------


def check_sacrebleu() -> None:
    """Raises ConfigError if quality cannot be computed."""
    try:
        import sacrebleu  # noqa: F401
    except ImportError as error:
        raise ConfigError("generation.quality: needs sacrebleu; run: pip install sacrebleu") from error


def quality(answered: list[dict[str, str]]) -> dict[str, Any]:
    """Returns the corpus BLEU and chrF of `records`, and the signatures by which others can compute the same.

    Answers are cut at their first line: an untrained model runs on, and the task is one line.
    """
    from sacrebleu.metrics import BLEU, CHRF

    texts = [(record["answer"].splitlines() or [""])[0] for record in answered]
    references = [[" ".join(record["reference"].split()) for record in answered]]
    found: dict[str, Any] = {"answers": len(texts)}
    for name, metric in (("bleu", BLEU()), ("chrf", CHRF())):
        found[name] = round(metric.corpus_score(texts, references).score, 4)
        found[f"{name}_signature"] = str(metric.get_signature())
    return found
