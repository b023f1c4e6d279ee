"""Captured schedules beside the model's own, and captured noise."""

import pytest
import torch

from flowcorr.instruments.doctor.replayed.legs import Legs
from flowcorr.instruments.doctor.replayed.schedules import examine_noise, examine_schedule


def test_the_models_own(stack_of):
    assert examine_schedule(stack_of(), 0).status == "PASS"


def test_equal_steps_are_another_habit_and_no_fault(stack_of):
    found = examine_schedule(stack_of(sigmas=[1.0, 0.8, 0.6, 0.4, 0.2, 0.0]), 0)
    assert (found.status, found.message.split(",")[0]) == ("PASS", "equal steps from 1 to 1 / N")
    shifted = [3 * sigma / (1 + 2 * sigma) for sigma in (1.0, 0.8, 0.6, 0.4, 0.2, 0.0)]
    assert examine_schedule(stack_of(sigmas=shifted), 0).cause == "wrong_shift"


@pytest.mark.parametrize("shift", [2.2, 0.4])
def test_a_shift_is_measured(shift, stack_of, captured):
    own = captured["sigmas"].double()
    found = examine_schedule(stack_of(sigmas=shift * own / (1 + (shift - 1) * own)), 0)
    assert (found.cause, found.status) == ("wrong_shift", "FAIL")
    assert f"shifted by {shift:g} times the model's own" in found.message


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_is_told(dtype, stack_of, captured):
    found = examine_schedule(stack_of(sigmas=captured["sigmas"].to(dtype).float()), 0)
    assert (found.cause, found.message) == ("rounded_sigmas", f"sigmas were rounded to {str(dtype)[6:]}")


def test_another_schedule_is_only_likely(stack_of):
    found = examine_schedule(stack_of(sigmas=[1.0, 0.9, 0.85, 0.3, 0.1, 0.0]), 0)
    assert (found.cause, found.confidence) == ("other_schedule", "likely")


def test_the_scheduler_is_put_back(stack_of):
    stack = stack_of(sigmas=[1.0, 0.9, 0.85, 0.3, 0.1, 0.0])
    before = stack.family.pipeline.scheduler
    examine_schedule(stack, 0)
    assert stack.family.pipeline.scheduler is before


def noise_verdict(stack, earlier=()):
    return examine_noise(stack, Legs(stack), 4, dict(earlier))


def test_noise_of_a_step_before(stack_of):
    stack = stack_of()
    found = noise_verdict(stack, {1: stack.samples})
    assert (found.cause, found.message) == ("noise_reused", "the initial noise is that of training step 1")


def test_samples_of_one_prompt_may_share_their_noise(stack_of, captured):
    same = captured["initial_noise"].clone()
    same[1] = same[0]
    found = noise_verdict(stack_of(initial_noise=same, prompts=("cat", "cat", "sun", "bee")))
    assert (found.status, found.message) == (
        "PASS",
        "standard normal, and drawn once; samples of one prompt begin with the same noise",
    )


def test_noise_that_is_not_standard_normal(stack_of, captured):
    found = noise_verdict(stack_of(initial_noise=captured["initial_noise"] * 1.3))
    assert (found.cause, found.status) == ("noise_scale", "FAIL")


def test_noise_that_is_not_a_number_is_no_noise(stack_of, captured):
    broken = captured["initial_noise"].clone()
    broken[1, 0, 0, 0] = torch.nan
    found = noise_verdict(stack_of(initial_noise=broken))
    assert (found.cause, found.status) == ("noise_scale", "FAIL")
