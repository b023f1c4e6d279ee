"""Schedule and guidance of FLUX.2 klein; tests of all families are in `test_families.py`."""

from dataclasses import replace

import numpy as np
import pytest
from diffusers.pipelines.flux2 import pipeline_flux2_klein
from tiny_pipelines import build_tiny_flux2_klein

from flowcorr.errors import ConfigError
from flowcorr.models import Guidance
from tests.models.families import KLEIN, KLEIN_EDIT, assert_is_the_pipelines_own_call


@pytest.mark.parametrize(("steps", "shape"), [(10, (64, 64, 16)), (10, (80, 64, 16))])
def test_the_schedule_of_more_tokens_is_the_pipelines(tiny_folders, steps, shape):
    """Its shift grows otherwise beyond 4300 tokens."""
    family = KLEIN.load(tiny_folders("flux2_klein"))
    tokens, scheduler = shape[0] * shape[1], family.pipeline.scheduler
    mu = pipeline_flux2_klein.compute_empirical_mu(image_seq_len=tokens, num_steps=steps)
    sigmas = np.linspace(1.0, 1 / steps, steps)
    timesteps, _ = pipeline_flux2_klein.retrieve_timesteps(scheduler, steps, "cpu", sigmas=sigmas, mu=mu)
    schedule = family.schedule(steps, shape)
    assert schedule.sigmas == pytest.approx(scheduler.sigmas.tolist(), abs=1e-7)
    assert schedule.timesteps == pytest.approx(timesteps.tolist(), abs=1e-4)


def test_a_distilled_model_refuses_guidance(tmp_path):
    distilled = KLEIN.load(str(build_tiny_flux2_klein(tmp_path, is_distilled=True)))
    assert distilled.encode(KLEIN.prompts, Guidance()).keys() == {"prompt_embeds"}
    with pytest.raises(ConfigError, match=r"sampling\.guidance_scale=3\.0 .* 1, .*FLUX\.2-klein-base"):
        distilled.encode(KLEIN.prompts, KLEIN.guided)


def test_with_one_reference_it_is_the_pipelines_own_call(tiny_folders):
    case = replace(KLEIN_EDIT, changes={**KLEIN_EDIT.changes, "images": 1})
    assert_is_the_pipelines_own_call(case, case.load(tiny_folders("flux2_klein")), case.guided, 2)
