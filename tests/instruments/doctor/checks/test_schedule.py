"""Captured schedules beside the model's own."""

import pytest
import torch

from flowcorr.instruments.doctor.checks.run import check_captured
from flowcorr.instruments.doctor.checks.schedule import UNLESS_MEANT, check_captured_schedule

NOT_REPLAYED = dict.fromkeys(("latents", "next_latents", "log_probs"))


def test_the_models_own(captured_of):
    assert check_captured_schedule(captured_of()).level == "healthy"


def test_a_table_that_was_not_used(captured_of, captured):
    """The sigmas are the model's own, and the replay agrees only with rounded timesteps."""
    fed = captured["timesteps"].clone()
    fed[2] += 100.0
    found = check_captured(captured_of(timesteps=fed))["schedule"]
    assert (found.cause, found.level) == ("timesteps", "serious")


def test_equal_steps_are_another_habit_and_no_fault(captured_of):
    found = check_captured_schedule(captured_of(sigmas=[1.0, 0.8, 0.6, 0.4, 0.2, 0.0], **NOT_REPLAYED))
    assert found.level == "healthy"
    assert found.numbers["sigma_gap"] > 0.01
    shifted = [3 * sigma / (1 + 2 * sigma) for sigma in (1.0, 0.8, 0.6, 0.4, 0.2, 0.0)]
    assert check_captured_schedule(captured_of(sigmas=shifted)).cause == "wrong_shift"


@pytest.mark.parametrize("shift", [2.2, 0.4])
def test_a_shift_is_measured(shift, captured_of, captured):
    own = captured["sigmas"].double()
    found = check_captured_schedule(captured_of(sigmas=shift * own / (1 + (shift - 1) * own)))
    assert (found.cause, found.level) == ("wrong_shift", "serious")
    assert found.numbers["fitted"] == pytest.approx(shift, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_is_told(dtype, captured_of, captured):
    found = check_captured_schedule(captured_of(sigmas=captured["sigmas"].to(dtype).float()))
    assert (found.cause, found.numbers["dtype"]) == ("rounded_sigmas", str(dtype)[6:])
    assert found.numbers["confidence"] == "certain"


def test_another_schedule_may_be_meant(captured_of):
    found = check_captured_schedule(captured_of(sigmas=[1.0, 0.9, 0.85, 0.3, 0.1, 0.0]))
    assert (found.cause, found.numbers["confidence"]) == ("other_schedule", UNLESS_MEANT)


def test_the_scheduler_is_put_back(captured_of):
    samples = captured_of(sigmas=[1.0, 0.9, 0.85, 0.3, 0.1, 0.0])
    before = samples.stack.family.pipeline.scheduler
    check_captured_schedule(samples)
    assert samples.stack.family.pipeline.scheduler is before
