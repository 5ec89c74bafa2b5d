"""tests/policies.json has one text for each rule that a problem can break: NumPy and the tool must give just that."""

import numpy as np
import pytest
from policies import BY_NAME, TABLE, arguments, check
from tool import TOOL, run

from cutloss import linear_cross_entropy


@pytest.mark.parametrize("policy", TABLE, ids=BY_NAME)
def test_a_rule_is_not_kept_or_has_another_text(policy):
    e, c, labels, options = arguments(policy["set"])
    with pytest.raises((ValueError, RuntimeError)) as caught:
        linear_cross_entropy(e, c, labels, **options)
    check(str(caught.value), policy)


def line_of(folder, policy):
    """The tool's command line; None where it has no way to break the rule."""
    e, c, labels, options = arguments(policy["set"])
    wrt = options.pop("wrt", ["e", "c"])
    if "bias" in wrt or policy["set"].get("overlap"):
        return None  # it wants the gradient of a bias that there is, and maps its files read-only
    line = ["loss"] + (["--frozen"] if wrt == ["e"] else [])

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
    for name in ("class_weights", "vocab_order"):
        if name in options:
            file(name.replace("_", "-"), options.pop(name))
    if "accumulate" in options:
        file("accumulate-d-c", options.pop("accumulate")["d_c"])
    if metrics := options.pop("metrics", None):
        line += ["--metrics", *metrics, "--out-top-k-ids", folder / "top.npy"]
    for name, value in options.items():
        line += [f"--{name.replace('_', '-')}", value]
    return line


@pytest.mark.skipif(TOOL is None, reason="the tool cutloss is not installed")
@pytest.mark.parametrize("policy", TABLE, ids=BY_NAME)
def test_a_rule_has_another_text_on_the_command_line(tmp_path, policy):
    line = line_of(tmp_path, policy)
    if line is None:
        pytest.skip("cannot be written on a command line")
    result = run(*line)
    assert result.returncode in (2, 3, 4) and result.stdout == ""
    assert result.stderr.startswith("cutloss: error: ") and result.stderr.endswith("\n")
    check(result.stderr[len("cutloss: error: "):-1], policy)
