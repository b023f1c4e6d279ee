"""Sizes and schedules of Wan 2.1 and 2.2; tests of all families are in `test_families.py`."""

import inspect

import pytest
import torch

from flowcorr.errors import ConfigError
from flowcorr.models.wan import Wan
from tests.models.families import WAN, WAN22


@pytest.fixture(params=[WAN, WAN22], ids=lambda case: case.name)
def case(request):
    return request.param


@pytest.fixture
def family(case, tiny_folders):
    return case.load(tiny_folders(case.name))


def test_each_model_has_the_frame_rate_that_it_was_trained_on(case, family):
    assert family.frames_per_second == {"wan": 16, "wan22_ti2v": 24}[case.name]


def test_native_sizes_are_those_of_the_pipelines_call(family):
    defaults = inspect.signature(type(family.pipeline).__call__).parameters
    sizes = [defaults[argument].default for argument in ("height", "width", "num_frames")]
    assert family.sample_shape(None, None, None) == family.sample_shape(*sizes)


def test_frames_are_one_more_than_the_vae_packs(tiny_folders):
    family = WAN.load(tiny_folders("wan"))
    assert family.sample_shape(*WAN.tiny.size, 1) == (16, 1, 4, 6)
    assert family.image_tokens(WAN.native) == 21 * 30 * 52
    with pytest.raises(ConfigError, match=r"^sampling\.num_frames=10 .* 9 or 13$"):
        family.sample_shape(*WAN.tiny.size, 10)


def test_euler_takes_the_noise_levels_of_the_published_scheduler(family):
    from diffusers import UniPCMultistepScheduler

    published = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    published.set_timesteps(5)
    schedule = family.schedule(5, ())
    assert schedule.sigmas == pytest.approx(published.sigmas.tolist())
    assert schedule.timesteps == pytest.approx(published.timesteps.tolist())


def test_a_dynamic_shift_which_the_pipeline_does_not_give_is_refused(family, monkeypatch):
    plain = family.pipeline.scheduler
    dynamic = type(plain).from_config(plain.config, use_dynamic_shifting=True)
    monkeypatch.setattr(family.pipeline, "scheduler", dynamic)
    with pytest.raises(ConfigError, match="use_dynamic_shifting=True .*flow_shift"):
        family.schedule(5, ())


def test_a_model_with_two_transformers_is_refused(family):
    family.pipeline.transformer_2 = family.transformer
    with pytest.raises(ConfigError, match="transformer_2"):
        Wan(family.pipeline, dtype=torch.float32)
