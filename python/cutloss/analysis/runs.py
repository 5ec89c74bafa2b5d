"""What a run of cutloss-sft changed: its own held-out answers, seen by its model before and after training."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..sft import adapter, data, models, run
from ..sft.config import Config
from . import sources


def arrays(folder: Path, tokens: int) -> Iterator[tuple[str, sources.Arrays]]:
    """Yields ("before", arrays) and ("after", arrays) of the finished run in a folder.

    The labels are what the run's loss counts: up to `tokens` tokens of the answers that were kept out of training.

    Raises:
        ConfigError or DataError: there is no finished run in the folder, or its model or data is not there any more.
    """
    config, source, model = run.finished(folder)  # the model is the base model yet
    tokenizer = models.load_tokenizer(source)
    _, held_out, whence = data.of(config.data)
    encoded = (data.encode(pair, tokenizer, config.train.context, config.data.prompt) for pair in held_out)
    rows = first_targets((example for example in encoded if example is not None), tokens)
    if not rows:
        raise data.DataError(f"{folder}: none of its {len(held_out)} held-out pairs has an answer within the context")
    record = {"model": _name(config), "run": folder.name, "context": config.train.context,
              "text": f"answers of {len(rows)} held-out pairs; {whence}"}  # fmt: skip
    yield "before", _of(model, config, rows, {**record, "steps": 0})
    adapter.load(model, folder / "adapter.safetensors", config.lora)
    steps = json.loads((folder / "summary.json").read_text())["steps"]
    yield "after", _of(model, config, rows, {**record, "steps": steps})


def first_targets(examples: Iterable[data.Example], tokens: int) -> list[tuple[list[int], int]]:
    """Returns (ids, place of the first target) of the first examples, cut where `tokens` targets are reached."""
    rows = []
    for example in examples:
        first = max(example.targets_from, 1)  # nothing predicts the first token of a row
        ids = example.tokens[: first + tokens]
        if len(ids) > first:
            rows.append((ids, first))
            tokens -= len(ids) - first
        if tokens == 0:
            break
    return rows


def _of(model: Any, config: Config, rows: list[tuple[list[int], int]], record: dict[str, Any]) -> sources.Arrays:
    hidden_of, table, options = sources.parts(models.as_run(model, config))
    longest = max(len(ids) for ids, _ in rows)
    hidden, labels = [], []
    for ids, first in rows:
        padded = np.zeros(longest, np.int32)  # one length, one compilation; a causal model does not see what follows
        padded[: len(ids)] = ids
        hidden.append(hidden_of(padded)[first - 1 : len(ids) - 1])
        labels.append(ids[first:])
    return sources.Arrays(np.concatenate(hidden), table, np.concatenate(labels), options, record)


def _name(config: Config) -> str:
    model = config.model
    return Path(model.path).name if model.path else model.name or f"random {model.family}"
