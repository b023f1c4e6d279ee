"""Positions and shift of Stable Diffusion 3; tests of all families are in `test_families.py`."""

import pytest
import torch

from flowcorr.config import ModelConfig
from flowcorr.errors import ConfigError
from flowcorr.models import Guidance, load_family
from tests.models.families import SD3, assert_is_the_pipelines_own_call


@pytest.fixture(scope="module")
def family():
    return load_family(ModelConfig(path="tiny_ocr", max_sequence_length=8))


def test_a_size_beyond_the_positions_is_an_error(family):
    with pytest.raises(ConfigError, match=r"^sampling\.width=256 .* 128$"):
        family.latent_shape(32, 256)


def test_dynamic_shifting_depends_on_the_latent_shape_as_in_the_pipelines_own_call(tiny_folders):
    family = SD3.load(tiny_folders("sd3"))
    family.pipeline.scheduler.register_to_config(use_dynamic_shifting=True)
    assert_is_the_pipelines_own_call(SD3, family, Guidance(), 2)
    small, large = family.schedule(4, (4, 8, 16)), family.schedule(4, (4, 128, 128))
    assert large.sigmas[1] > small.sigmas[1]


def test_velocity_is_float32_in_a_bfloat16_model():
    family = SD3.load("tiny_ocr", dtype="bfloat16")
    conditioning = family.encode(SD3.prompts, Guidance())
    assert conditioning["prompt_embeds"].dtype == torch.bfloat16
    inputs = (SD3.noise(), torch.tensor([900.0, 300.0]), conditioning, Guidance())
    assert family.velocity(family.transformer, *inputs).dtype == torch.float32
