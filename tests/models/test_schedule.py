"""The sigma tables of the pipelines' own schedulers."""

import numpy as np
import pytest

from flowcorr.errors import ConfigError
from flowcorr.models.schedule import linear_schedule


@pytest.mark.parametrize("spacing", ["", "use_karras_sigmas", "use_exponential_sigmas"])
@pytest.mark.parametrize(
    "config",
    [
        {"shift": 1.0},
        {"shift": 3.0},
        {"use_dynamic_shifting": True, "max_shift": 0.9, "max_image_seq_len": 8192, "shift_terminal": 0.02},
        {"use_dynamic_shifting": True, "time_shift_type": "linear"},
    ],
)
def test_a_linear_schedule_is_diffusers_own(config, spacing):
    from diffusers import FlowMatchEulerDiscreteScheduler
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift, retrieve_timesteps

    options = {**config, **({spacing: True} if spacing else {})}
    for num_steps, tokens in ((4, 4096), (10, 256), (28, 6889)):
        ours, theirs = (FlowMatchEulerDiscreteScheduler(**options) for _ in range(2))
        keys = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
        shift = calculate_shift(tokens, *(theirs.config[key] for key in keys))
        equal = np.linspace(1, 1 / num_steps, num_steps)
        timesteps, _ = retrieve_timesteps(theirs, num_steps, "cpu", sigmas=equal, mu=shift)
        schedule = linear_schedule(ours, num_steps, tokens)
        assert schedule.sigmas == tuple(theirs.sigmas.tolist())
        assert schedule.timesteps == tuple(timesteps.tolist())


def test_a_scheduler_that_takes_no_sigmas_is_refused():
    from diffusers import DPMSolverMultistepScheduler

    scheduler = DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, solver_order=1
    )
    with pytest.raises(ConfigError, match="DPMSolverMultistepScheduler .*FlowMatchEulerDiscreteScheduler "):
        linear_schedule(scheduler, 4, 256)


@pytest.mark.parametrize("key", ["base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift"])
def test_a_dynamic_shift_needs_its_numbers_and_a_fixed_one_does_not(key):
    from diffusers import FlowMatchEulerDiscreteScheduler

    dynamic = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, **{key: None})
    with pytest.raises(ConfigError, match=rf"{key}=None in scheduler/scheduler_config\.json"):
        linear_schedule(dynamic, 4, 256)
    assert linear_schedule(dynamic, 4, 256, shift=0.5).sigmas[0] == 1.0
    fixed = FlowMatchEulerDiscreteScheduler(shift=3.0, **{key: None})
    assert linear_schedule(fixed, 2, 256).sigmas == pytest.approx((1.0, 0.75, 0.0))


def test_a_terminal_shift_needs_two_steps():
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(shift_terminal=0.02)
    assert linear_schedule(scheduler, 2, 256).sigmas == pytest.approx((1.0, 0.02, 0.0))
    with pytest.raises(ConfigError, match=r"num_inference_steps=1 .*shift_terminal=0\.02; .* 2$"):
        linear_schedule(scheduler, 1, 256)


def test_a_linear_schedule_is_shifted_by_the_number_of_tokens():
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15)
    few, many = linear_schedule(scheduler, 4, 256), linear_schedule(scheduler, 4, 4096)
    assert few.sigmas[0] == many.sigmas[0] == 1.0
    assert few.sigmas[-1] == many.sigmas[-1] == 0.0
    assert all(low < high for low, high in zip(few.sigmas[1:-1], many.sigmas[1:-1], strict=True))
    assert linear_schedule(scheduler, 4, 256, shift=1.15).sigmas == pytest.approx(many.sigmas)
    assert few.timesteps == pytest.approx([1000 * sigma for sigma in few.sigmas[:-1]])
