"""The table of rules that a problem can break, and the arguments that break one in each front end."""

import json
from pathlib import Path

import numpy as np
from oracle import F32, lattice

TABLE = json.loads((Path(__file__).parents[2] / "tests" / "policies.json").read_text())
BY_NAME = [", ".join(f"{word} {value}" for word, value in policy["set"].items()) for policy in TABLE]


def number(value):
    return float(value) if isinstance(value, str) else value


def arguments(policy):
    """(e, c, labels, options) of cutloss.linear_cross_entropy."""
    given = dict(policy)
    n, v, d = (given.pop(word, size) for word, size in (("tokens", 7), ("vocab", 11), ("hidden", 5)))
    e, c, labels = lattice(n, max(v, 1), d)
    c = c[:v]
    options = {}
    if k := given.pop("soft_targets", 0):
        ids = np.ones((n, k), int)
        if at := given.pop("soft_id", None):
            ids[at[0], at[1]] = at[2]
        options["soft_targets"] = ids, np.full((n, k), 0.5, F32)
        given.setdefault("labels", False)
    if not given.pop("labels", True):
        labels = None
    if at := given.pop("label", None):
        labels[at[0]] = at[1]
    if given.pop("class_weights", False):
        options["class_weights"] = np.ones(v, F32)
    if k := given.pop("top_k", 0):
        options["metrics"] = (f"top_k={k}",)
    if "vocab_order" in given:
        options["vocab_order"] = np.array(given.pop("vocab_order"))
    if given.pop("accumulate", None):
        options["accumulate"] = {"d_c": np.zeros_like(c)}
    if given.pop("overlap", False):
        options["accumulate"] = {"d_c": c}
    options |= {word: number(value) if word not in ("filter", "mode", "reduction", "target", "wrt") else value
                for word, value in given.items()}
    return e, c, labels, options


def check(said, policy):
    text = policy["text"]
    if text.endswith("..."):
        assert said.startswith(text[:-3]), said
    else:
        assert said == text
