"""The table of rules that a problem can break, and the arguments that break one in each front end."""

import json
from pathlib import Path

import numpy as np
from oracle import F32, lattice

_FOLDER = Path(__file__).parents[2] / "tests"
TABLE = json.loads((_FOLDER / "policies.json").read_text())
# Numbers beyond the types that C and C++ have for them.
_BEYOND = "beyond float32; it must be 0 or of a size in [2^-149, 2^128)"
TABLE += [
    {"set": {"threads": 99999999999}, "text": "threads is 99999999999; it must be 0 (choose) to 1024"},
    {"set": {"epsilon": 1e-50, "filter": "certified"}, "text": f"epsilon is 1e-50, {_BEYOND}"},
    {"set": {"tolerance": 1e-50, "filter": "unbiased"}, "text": f"tolerance is 1e-50, {_BEYOND}"},
    {"set": {"label_smoothing": 1e-50}, "text": f"label_smoothing is 1e-50, {_BEYOND}"},
    {"set": {"z_loss": -1e39}, "text": f"z_loss is -1e+39, {_BEYOND}"},
    {"set": {"logit_scale": 1e39}, "text": f"logit_scale is 1e+39, {_BEYOND}"},
    {"set": {"softcap": 1e300}, "text": f"softcap is 1e+300, {_BEYOND}"},
]
VALUES = json.loads((_FOLDER / "policy_values.json").read_text())
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
    given.pop("misaligned", None)  # in C and C++ only
    edges(given, options, e, labels, v)
    if given.pop("soft_padding", False):
        options["soft_targets"] = np.full((n, 2), -100), np.full((n, 2), 0.5, F32)
        labels = None
    options |= {word: number(value) if word not in ("filter", "mode", "reduction", "target", "wrt") else value
                for word, value in given.items()}
    return e, c, labels, options


def edges(given, options, e, labels, v):
    """The words of policy_values.json, taken out of `given`."""
    if at := given.pop("row", None):
        e[at[0]] = number(at[1])
    if "labels_all" in given:
        labels[:] = given.pop("labels_all")
    if at := given.pop("token_weight", None):
        options["token_weights"] = np.ones(len(e), F32)
        options["token_weights"][at[0]] = at[1]
    for word, size in (("token_weights", len(e)), ("class_weights", v), ("bias", v)):
        if word + "_all" in given:
            options[word] = np.full(size, number(given.pop(word + "_all")), F32)
    if at := given.pop("bias_at", None):
        options["bias"] = np.zeros(v, F32)
        options["bias"][at[0]] = number(at[1])


def kind_of(values):
    values = np.asarray(values)
    if not values.any():
        return "zero"
    if np.isfinite(values).all():
        return "finite"
    return "nan" if np.isnan(values).all() else "inf" if (values == np.inf).all() else "mixed"


def check_values(policy, loss, d_e, d_c, valid_count):
    want = policy["want"]
    assert kind_of(loss) == want["loss"] and int(valid_count) == want["valid_count"]
    for name, gradient in (("d_e", d_e), ("d_c", d_c)):
        assert kind_of(gradient) == want.get(name, kind_of(gradient)), name
    for i, row in enumerate(np.asarray(d_e)):
        if "zero_row" in want:
            assert (kind_of(row) == "zero") == (i == want["zero_row"]), i
        if "nan_row" in want:
            assert kind_of(row) == ("nan" if i == want["nan_row"] else "finite"), i


def check(said, policy):
    text = policy["text"]
    if text.endswith("..."):
        assert said.startswith(text[:-3]), said
    else:
        assert said == text
