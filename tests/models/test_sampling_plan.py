"""The facts that an engine samples by."""

import pytest
import torch

from flowcorr.config.schema import ModelConfig, SamplingConfig
from flowcorr.errors import ConfigError
from flowcorr.models import Guidance, SamplingPlan, load_family


@pytest.fixture(scope="module")
def family():
    return load_family(ModelConfig(path="tiny_ocr"))


def sampling(**changes):
    return SamplingConfig(
        **{"height": 32, "width": 64, "num_inference_steps": 6, "sde_window_range": (0, 4)} | changes
    )


def test_a_plan_holds_shape_schedule_and_guidance(family):
    plan = SamplingPlan.of(family, sampling(guidance_scale=3.0, negative_prompt="bad"))
    assert plan.latent_shape == (4, 8, 16)
    assert plan.schedule == family.schedule(6, plan.latent_shape)
    assert plan.guidance == Guidance(guidance_scale=3.0, negative_prompt="bad")


@pytest.mark.parametrize(("stride", "steps"), [(2, [0, 1, 2, 4]), (3, [0, 1, 2, 5]), (4, [0, 1, 2])])
def test_longer_steps_end_where_the_schedule_does(family, stride, steps):
    plan = SamplingPlan.of(family, sampling(sde_window_range=(0, 2), post_window_stride=stride))
    full = family.schedule(6, plan.latent_shape)
    assert plan.schedule.timesteps == tuple(full.timesteps[step] for step in steps)
    assert plan.schedule.sigmas == (*(full.sigmas[step] for step in steps), 0.0)


def test_windows_follow_the_sampling_section(family):
    plan = SamplingPlan.of(family, sampling(sde_window_size=3, window_per="sample"))
    windows = plan.windows([0] * 8, range(8), seed=1, training_step=2)
    assert windows.shape == (8, 3)
    assert windows.max() < 4
    assert len(windows.unique(dim=0)) == 2
    assert torch.equal(windows, plan.windows([0] * 8, range(8), seed=1, training_step=2))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"sde_type": "cps", "sde_window_range": (2, 6)}, r"sde_window_range=\[2, 6\] .* step 5, .*sigma=0,"),
        ({"height": 33}, "height=33 .* 8, .* 32$"),
    ],
)
def test_what_cannot_be_sampled_is_refused(family, changes, named):
    with pytest.raises(ConfigError, match=rf"^sampling\.{named}"):
        SamplingPlan.of(family, sampling(**changes))
