"""What FLUX.1 Kontext adds to FLUX.1; velocities, latents and log-probs are those of `test_packed.py`."""

import pytest
import torch

from flowcorr.models import Guidance
from tests.models.packed import KONTEXT
from tests.prompts import prompts_of

GUIDANCE = Guidance(guidance_scale=3.5)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(KONTEXT.build(tmp_path_factory.mktemp("kontext")))


@pytest.fixture(scope="module")
def family(path):
    return KONTEXT.load(path)


def test_a_reference_has_the_shape_of_what_is_drawn(family):
    conditioning = family.encode(KONTEXT.prompts, GUIDANCE)
    assert conditioning["references"].shape == (2, 1, *family.latent_shape(*KONTEXT.size))


def test_a_prompts_conditioning_does_not_depend_on_its_batch(family):
    first, second = KONTEXT.prompts
    both = family.encode([first, second], GUIDANCE)["references"]
    for row, prompt in enumerate((first, second)):
        assert torch.equal(family.encode([prompt], GUIDANCE)["references"][0], both[row])


@torch.no_grad()
def test_it_draws_from_text_alone_as_its_pipeline_does(family):
    prompts, shape = prompts_of(["cat"]), family.latent_shape(*KONTEXT.size)
    conditioning = family.encode(prompts, GUIDANCE)
    assert "references" not in conditioning
    noise = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
    got = family.velocity(family.transformer, noise, torch.tensor([1000.0]), conditioning, GUIDANCE)
    schedule = family.schedule(1, shape)
    drawn = family.pipeline(
        prompt=["cat"],
        guidance_scale=3.5,
        num_inference_steps=1,
        height=KONTEXT.size[0],
        width=KONTEXT.size[1],
        max_area=KONTEXT.size[0] * KONTEXT.size[1],
        latents=noise.flatten(1, 2),
        max_sequence_length=KONTEXT.length,
        output_type="latent",
    ).images
    torch.testing.assert_close((noise - schedule.sigmas[0] * got).flatten(1, 2), drawn, rtol=1e-5, atol=1e-5)
