"""The rows of what may be wrong: each inputs once, about what was captured."""

import pytest

from flowcorr.instruments.doctor.checks import CHECK_OF, CHECKS
from flowcorr.instruments.doctor.hypotheses import hypotheses
from flowcorr.instruments.doctor.legs import Legs

POOL = ["cat", "dog", "sun", "bee"]


def rows(stack):
    return list(hypotheses(Legs(stack), POOL))


@pytest.fixture(scope="module")
def causes_of():
    return lambda stack: {row.cause for row in rows(stack)}


def test_no_inputs_are_tried_twice_or_are_the_captured_ones(stack_of):
    stack = stack_of()
    whole = [inputs for row in rows(stack) if row.whole for inputs in row.inputs]
    assert len(whole) == len({*whole}) > 20
    assert stack.captured not in whole


def test_every_row_has_a_check_of_captured_samples_and_a_cause_with_a_meaning(stack_of):
    judged = {check.name for check in CHECKS if check.captured}
    for row in rows(stack_of(negative_prompt="dog")):
        assert CHECK_OF[row.cause] in judged
        assert bool(row.inputs) != (row.number is not None)


def test_rows_are_about_what_was_captured(stack_of, causes_of):
    without = causes_of(stack_of(guidance_scale=1.0, adapter=None, adapter_alpha=None))
    assert not without & {"guidance_off", "guidance_swapped", "negative_prompt", "adapter_scale", "sigma_max"}
    assert {"negative_prompt", "adapter_scale", "noise_level"} <= causes_of(stack_of(negative_prompt="dog"))
    assert not causes_of(stack_of(noise_level=None)) & {"noise_level", "sde_type"}


def test_a_number_gives_inputs_that_differ_in_it_alone(stack_of):
    stack = stack_of()
    for row in rows(stack):
        if row.number is not None:
            low, high = (row.number.inputs(value) for value in (row.number.low, row.number.high))
            assert low != high
            assert all(row.number.low <= start <= row.number.high for start in row.number.starts)


def test_no_shift_is_looked_for_where_the_timesteps_alone_are_not_the_models_own(stack_of):
    captured = stack_of().samples
    stack = stack_of(timesteps=0.9 * captured.tensors()["timesteps"])
    own = [row for row in rows(stack) if any(one.timesteps == stack.own.timesteps for one in row.inputs)]
    number = next(row for row in rows(stack) if row.cause == "wrong_shift")
    assert {(row.cause, row.about) for row in own} == {("timesteps", number.about)}
