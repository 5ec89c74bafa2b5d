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
