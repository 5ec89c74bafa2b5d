"""tests/policies.json has one text for each rule that a problem can break, policy_values.json the kind of values that
come of inputs at the edge: NumPy and the tool must give just that."""

import re

import numpy as np
import pytest
from policies import BY_NAME, TABLE, VALUES, arguments, check, check_values
from tool import TOOL, run, run_json

from cutloss import linear_cross_entropy


@pytest.mark.parametrize("policy", TABLE, ids=BY_NAME)
def test_a_rule_is_not_kept_or_has_another_text(policy):
    e, c, labels, options = arguments(policy["set"])
    if "misaligned" in policy["set"]:
        pytest.skip("such an array is copied: test_unaligned_or_packed_input_crashes")
    with pytest.raises((ValueError, RuntimeError)) as caught:
        linear_cross_entropy(e, c, labels, **options)
    check(str(caught.value), policy)


def line_of(folder, policy):
    """The tool's command line; None where it has no way to break the rule."""
    e, c, labels, options = arguments(policy["set"])
    if {"overlap", "misaligned"} & set(policy["set"]):
        return None  # it maps its files read-only and says so of their headers
    line = ["loss"] + (["--wrt", ",".join(options.pop("wrt"))] if "wrt" in options else [])

    def file(option, array):
        path = folder / f"{option}.npy"
        np.save(path, array)
        line.extend([f"--{option}", path])

    file("e", e)
    file("c", c)
    if labels is not None:
        file("labels", labels)
    if soft := options.pop("soft_targets", None):
        file("soft-ids", soft[0])
        file("soft-probabilities", soft[1])
    for name in ("bias", "token_weights", "class_weights", "vocab_order"):
        if name in options:
            file(name.replace("_", "-"), options.pop(name))
    if "accumulate" in options:
        file("accumulate-d-c", options.pop("accumulate")["d_c"])
    if metrics := options.pop("metrics", None):
        line += ["--metrics", *metrics, "--out-top-k-ids", folder / "top.npy"]
    for name, value in options.items():
        line += [f"--{name.replace('_', '-')}"] + ([] if value is True else [value])
    return line


@pytest.mark.parametrize("policy", VALUES, ids=lambda policy: policy["name"])
def test_a_rules_value_differs(policy):
    e, c, labels, options = arguments(policy["set"])
    if options.pop("nan_labels", False):
        with pytest.raises(ValueError, match=r"labels\[3\] is 11"):
            linear_cross_entropy(e, c, labels, **options)
        return
    got = linear_cross_entropy(e, c, labels, **options)
    check_values(policy, got.loss, got.d_e, got.d_c, got.valid_count)


@pytest.mark.skipif(TOOL is None, reason="the tool cutloss is not installed")
@pytest.mark.parametrize("policy", VALUES, ids=lambda policy: policy["name"])
def test_a_rules_value_differs_on_the_command_line(tmp_path, policy):
    got = run_json(*line_of(tmp_path, policy), "--d-e", tmp_path / "d_e.npy", "--d-c", tmp_path / "d_c.npy")
    if got["loss"] is None:  # JSON has neither inf nor NaN
        got["loss"] = float(policy["want"]["loss"])
        assert not np.isfinite(got["loss"])
    check_values(policy, got["loss"], np.load(tmp_path / "d_e.npy"), np.load(tmp_path / "d_c.npy"), got["valid_count"])


@pytest.mark.skipif(TOOL is None, reason="the tool cutloss is not installed")
@pytest.mark.parametrize("policy", TABLE, ids=BY_NAME)
def test_a_rule_has_another_text_on_the_command_line(tmp_path, policy):
    line = line_of(tmp_path, policy)
    if line is None:
        pytest.skip("cannot be written on a command line")
    result = run(*line)
    assert result.returncode in (2, 3, 4) and result.stdout == ""
    assert result.stderr.startswith("cutloss: error: ") and result.stderr.endswith("\n")
    # What the line says by itself is refused before the problem is stated, with the option's name around the text.
    check(re.sub(r"^--[a-z-]+: | \(see 'cutloss loss --help'\)$", "", result.stderr[len("cutloss: error: "):-1]), policy)
