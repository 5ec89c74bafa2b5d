"""tests/policies.json has one text for each rule that a problem can break: cutloss.jax must give just that."""

import functools
import re

import jax
import numpy as np
import pytest
from policies import BY_NAME, TABLE, VALUES, arguments, check, check_values

import cutloss
from cutloss.jax import linear_cross_entropy

# No argument here: gradients are asked for by differentiating, and written to new arrays; the kernels' target is the
# environment's.
ELSEWHERE = ("accumulate", "overlap", "misaligned", "target")
NAMES = {"vocab_order": "vocab_sort_indices"}


@pytest.mark.parametrize("policy", TABLE, ids=BY_NAME)
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_a_rule_is_not_kept_or_has_another_text(policy, jit):
    e, c, labels, options = arguments(policy["set"])
    wrt = options.pop("wrt", ["e", "c"])
    if "bias" in wrt or any(word in policy["set"] for word in ELSEWHERE):
        pytest.skip("there is no such argument")
    options = {NAMES.get(name, name): value for name, value in options.items()}

    def f(e, c):
        return linear_cross_entropy(e, c, labels, **options)  # labels and ids are known while tracing

    g = jax.value_and_grad(f, tuple(range(len(wrt))))
    with pytest.raises(ValueError) as caught:
        (jax.jit(g) if jit else g)(e, c)
    said = str(caught.value)
    for ours, theirs in NAMES.items():
        said = said.replace(theirs, ours)
    check(said, policy)


@pytest.mark.parametrize("policy", VALUES, ids=lambda policy: policy["name"])
@pytest.mark.parametrize("impl", ["cpu", "xla"])
def test_a_rules_value_differs(policy, impl):
    e, c, labels, options = arguments(policy["set"])
    options.pop("nan_labels", None)  # what is traced is never refused

    def f(e, c, labels):
        loss, metrics = linear_cross_entropy(e, c, labels, metrics="valid_count", _impl=impl, **options)
        return loss, metrics["valid_count"]

    (loss, count), gradients = jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True))(e, c, labels)
    check_values(policy, loss, *gradients, count)


def test_evaluating_forgives_what_differentiating_does_not():
    """The rules on gradients' options hold although the loss alone does not need them."""
    e, c, labels, _ = arguments({})
    for options in ({"filter": "certified"}, {"epsilon": 0.1}, {"filter": "tile", "tolerance": 0.1, "epsilon": 0.1}):
        with pytest.raises(ValueError, match="epsilon"):
            linear_cross_entropy(e, c, labels, **options)


def test_traced_values_pass_unchecked():
    """What cannot be looked at while tracing: a denominator below 0, ids that are none."""
    e, c, labels, _ = arguments({})
    f = jax.jit(functools.partial(linear_cross_entropy, e, c, labels), static_argnames="_impl")
    assert np.isnan(f(denominator=np.float32(-1), _impl="xla"))
    with pytest.raises(Exception, match="denominator is -1; it must be finite and 0 or more"):
        jax.block_until_ready(f(denominator=np.float32(-1), _impl="cpu"))
    soft = np.array([[1, 99]] * 7), np.full((7, 2), 0.5, np.float32)
    assert np.isnan(jax.jit(lambda ids: linear_cross_entropy(e, c, soft_targets=(ids, soft[1])))(soft[0]))


F32 = np.float32


@pytest.mark.parametrize("change", [
    {"labels": np.zeros(6, int)}, {"labels": np.zeros((7, 1), int)}, {"labels": np.int64(3)}, {"labels": np.zeros(7, F32)},
    {"labels": np.zeros(7, bool)}, {"e": np.ones((7, 4), F32)}, {"e": np.ones((7, 5), np.complex64)},
    {"c": np.ones((5, 11), F32)}, {"c": np.ones(0, F32)}, {"c": np.ones((11, 5), np.int32)}, {"e": F32(1)},
    {"head_layout": "dv"}, {"head_layout": "VD"}, {"bias": np.ones(10, F32)}, {"bias": np.ones(11, int)},
    {"token_weights": np.ones(6)}, {"token_weights": np.ones(7, complex)}, {"token_weights": "abc"},
    {"class_weights": np.ones(10)}, {"softcap": "30"}, {"z_loss": None}, {"label_smoothing": np.ones(1)},
    {"logit_scale": True}, {"reduction": "avg"}, {"mode": "dense"}, {"filter": "x"}, {"metrics": "perplexity"},
    {"metrics": "top_k=0"}, {"metrics": 5}, {"budget": "12 parsecs"}, {"budget": -1}, {"budget": 1.5},
    {"threads": 1.5}, {"seed": 1.0}, {"seed": -1}, {"ignore_index": None}, {"shift": 1.5},
    {"vocab_order": np.arange(3)}, {"vocab_order": np.ones(11)}, {"soft_targets": 3},
    {"soft_targets": (np.ones((7, 2), int), np.ones((7, 3), F32))}, {"soft_targets": (np.ones(7, int), np.ones(7))},
    {"soft_targets": (np.ones((7, 2), int), None)}, {"soft_targets": (None, np.ones((7, 2)))}, {"soft_targets": (None, None)},
    {"e": None}, {"c": None}, {"e": "abc"}, {"c": [[1.0], [1.0, 2.0]]}, {"bias": [[1.0], 2.0]},
    {"threads": 2**70}, {"metrics": ("top_k=5", "top_k=3")},
    {"soft_targets": (np.ones((7, 0), int), np.ones((7, 0)))}, {"soft_targets": (np.ones((7, 2)), np.ones((7, 2)))},
], ids="-".join)
def test_numpy_has_another_error(change):
    e, c, labels, _ = arguments({})
    given = {"e": e, "c": c, "labels": labels, **change}
    if "soft_targets" in change:
        given["labels"] = None
    with pytest.raises((ValueError, TypeError)) as wanted:
        cutloss.linear_cross_entropy(**given)
    names = {"e": "x", "c": "w", **NAMES}
    with pytest.raises(wanted.type) as caught:
        linear_cross_entropy(**{names.get(name, name): value for name, value in given.items()})
    text = str(wanted.value)
    for ours, theirs in names.items():
        text = re.sub(rf"(?<![\w'@])\b{ours}\b(?![\w'@])", theirs, text)
    assert str(caught.value) == text
