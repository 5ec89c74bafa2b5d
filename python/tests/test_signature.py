"""One signature everywhere: the same words, defaults and names of values in Python, JAX, C, C++ and on the command line."""

import dataclasses
import inspect
import re
from pathlib import Path

import numpy as np
import pytest
from tool import needs_tool, run

import cutloss
from cutloss import _check

ROOT = Path(__file__).parents[2]
NOTHING = inspect.Parameter.empty
SIGNATURE = {
    "e": NOTHING, "c": NOTHING, "labels": None, "bias": None, "wrt": ("e", "c"), "reduction": "mean", "denominator": None,
    "ignore_index": -100, "token_weights": None, "class_weights": None, "label_smoothing": 0.0, "z_loss": 0.0,
    "logit_scale": 1.0, "softcap": None, "shift": 0, "soft_targets": None, "cotangent": None, "lse_cotangent": None,
    "metrics": (), "mode": "auto", "filter": None, "tolerance": None, "epsilon": None, "vocab_order": None,
    "budget": None, "threads": None, "seed": 0,
}
RESULT = ("loss", "nll", "lse", "d_e", "d_c", "d_bias", "metrics", "valid_count", "plan", "filter_report")
# The words for what C, C++ and the tool cannot say in one: a set of names, a pair of arrays, a size with its unit.
FIELDS = {"wrt": ("want_d_e", "want_d_c", "want_d_bias"), "budget": ("budget_bytes",),
          "metrics": ("entropy", "argmax", "rank", "top_k", "mean_logits"), "soft_targets": (
              "soft_targets", "soft_ids", "soft_probabilities")}
OPTIONS = {"wrt": ("wrt", "frozen", "no-gradient"), "soft_targets": ("soft-ids", "soft-probabilities")}
NAMES = {"reduction": ("mean", "sum", "none"), "filter": ("certified", "unbiased", "tile"),
         "mode": ("auto", "loss", "stream", "chunk", "recompute", "sparse")}


def parameters(function):
    return inspect.signature(function).parameters


def test_an_argument_has_another_name_place_or_default():
    given = parameters(cutloss.linear_cross_entropy)
    assert list(given)[:len(SIGNATURE)] == list(SIGNATURE)  # what is ours alone comes after
    for name, default in SIGNATURE.items():
        assert given[name].default == default and type(given[name].default) is type(default), name
        keyword = name not in ("e", "c", "labels")
        assert given[name].kind == (inspect.Parameter.KEYWORD_ONLY if keyword else inspect.Parameter.POSITIONAL_OR_KEYWORD)


def test_a_field_of_the_result_has_another_name():
    assert tuple(field.name for field in dataclasses.fields(cutloss.LossResult)) == RESULT
    got = cutloss.linear_cross_entropy(np.ones((3, 2), np.float32), np.eye(2, dtype=np.float32), [0, 1, -100])
    assert all(hasattr(got, name) for name in RESULT)
    assert isinstance(got.loss, np.float32) and isinstance(got.valid_count, int) and got.metrics == {}


def test_learning_an_order_has_other_words():
    given, all_of_them = parameters(cutloss.learn_vocab_order), parameters(cutloss.linear_cross_entropy)
    for name, parameter in given.items():
        assert parameter.default == all_of_them[name].default and parameter.kind == all_of_them[name].kind, name


def test_jax_has_other_words_or_defaults():
    pytest.importorskip("jax")
    from cutloss.jax import linear_cross_entropy

    given = parameters(linear_cross_entropy)
    # x and w are jax-cce's names; gradients are asked for by differentiating, their cotangents come from there.
    renamed = {"e": "x", "c": "w", "vocab_order": "vocab_sort_indices"}
    for name, default in SIGNATURE.items():
        if name in ("wrt", "cotangent", "lse_cotangent"):
            assert name not in given
            continue
        name = renamed.get(name, name)
        assert given[name].default == default and type(given[name].default) is type(default), name
    own = [name for name in given if name not in SIGNATURE and name not in renamed.values() and name[0] != "_"]
    assert own == ["chunk_size", "filter_eps", "head_layout", "mesh", "x_spec", "w_spec", "check_labels"]


def structs(header, pattern):
    """Names of the fields of all structs of a header."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", (ROOT / "include" / "cutloss" / header).read_text(), flags=re.DOTALL)
    bodies = re.findall(pattern, text, flags=re.DOTALL)
    assert bodies
    return set(re.findall(r"\w+", " ".join(bodies)))


@pytest.mark.parametrize("header,pattern", [("cutloss.h", r"typedef struct \{(.*?)\}"), ("cutloss.hpp", r"struct \w+ \{(.*?)\n\};")])
def test_c_or_cpp_has_other_words(header, pattern):
    there = structs(header, pattern)
    for name in SIGNATURE:
        assert set(FIELDS.get(name, (name,))) <= there, name
    for name in RESULT:  # metrics by their own names; the plan is what run() is called with
        if name not in ("metrics", "plan"):
            assert name in there, name
    assert {"head_layout", "accumulate_d_e", "accumulate_d_c", "accumulate_d_bias", "compensated"} <= there
    assert {"entropy", "argmax", "correct", "rank", "top_k_ids", "top_k_logprobs", "mean_logits"} <= there


@needs_tool
def test_the_tool_has_other_words_or_defaults():
    text = run("loss", "--help").stdout
    for name in SIGNATURE:
        for option in OPTIONS.get(name, (name.replace("_", "-"),)):
            assert re.search(rf"--{option}\b", text), option
    for option, default in (("ignore-index", "-100"), ("label-smoothing", "0"), ("z-loss", "0"), ("logit-scale", "1"),
                            ("shift", "0"), ("seed", "0"), ("reduction", "mean"), ("mode", "auto"), ("filter", "none")):
        assert re.search(rf"--{option} \S+?(=| \[){default}\b", text), option


def test_a_value_has_another_name():
    for name, known in NAMES.items():
        parse = {"filter": _check.filter_name}.get(name, getattr(_check, name, None))
        for value in known:
            assert parse(value) == value
        with pytest.raises(ValueError, match=", ".join(map(repr, known)).replace("'", ".")):
            parse("other")
        header = (ROOT / "src" / "problem" / "names.cc").read_text()
        assert all(f'return "{value}"' in header for value in known)


@needs_tool
def test_the_tool_has_other_names_of_values():
    for name, known in NAMES.items():
        result = run("loss", "--e", "x", "--c", "x", "--labels", "x", f"--{name}", "other")
        assert result.returncode == 2 and all(value in result.stderr for value in known), result.stderr
