"""Guidance of FLUX.1 dev and schnell; tests of all families are in `test_families.py`."""

import pytest
import torch
from tiny_pipelines import build_tiny_flux

from flowcorr.errors import ConfigError
from flowcorr.models import Guidance
from tests.models.families import FLUX, assert_is_the_pipelines_own_call

GUIDANCE, PROMPTS = FLUX.guided, FLUX.prompts


@pytest.fixture
def family(tiny_folders):
    return FLUX.load(tiny_folders("flux"))


@pytest.fixture(scope="module")
def schnell(tmp_path_factory):
    return FLUX.load(str(build_tiny_flux(tmp_path_factory.mktemp("schnell"), guidance_embeds=False)))


def test_schnell_is_the_pipelines(schnell):
    assert_is_the_pipelines_own_call(FLUX, schnell, Guidance(), 4)


def test_guidance_that_schnell_does_not_read_is_refused(schnell):
    with pytest.raises(ConfigError, match=r"sampling\.guidance_scale=3\.5 .* 1, .*distills_guidance"):
        schnell.encode(PROMPTS, GUIDANCE)


@pytest.mark.parametrize(("variant", "reads"), [("family", True), ("schnell", False)])
@torch.no_grad()
def test_only_dev_reads_the_guidance_scale(request, variant, reads):
    family = request.getfixturevalue(variant)
    conditioning = family.encode(PROMPTS, Guidance())
    inputs = (family.transformer, FLUX.noise(), torch.tensor([912.5, 303.0]), conditioning)
    weak, strong = (family.velocity(*inputs, Guidance(guidance_scale=scale)) for scale in (1.0, 7.0))
    assert ((weak - strong).abs().max() > 1e-3) == reads


def embedded_scale(family, scale, dtype):
    """What the transformer embeds where guidance is fed at `scale` to weights of `dtype`."""
    seen = []
    embed = family.transformer.time_text_embed
    handle = embed.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1]))
    family.transformer.to(dtype)
    conditioning = {name: rows.to(dtype) for name, rows in family.encode(PROMPTS, GUIDANCE).items()}
    timesteps, guidance = torch.tensor([912.5, 303.0]), Guidance(guidance_scale=scale)
    with torch.no_grad():
        family.velocity(family.transformer, FLUX.noise(), timesteps, conditioning, guidance)
    family.transformer.to(torch.float32)
    handle.remove()
    return seen[0][0].item()


def test_an_actor_in_float32_is_guided_as_the_engine_in_bfloat16_is(family):
    exact = Guidance(guidance_scale=3.5)
    rounded = family.guidance_in_dtype(exact, torch.bfloat16)
    assert embedded_scale(family, 3.5, torch.bfloat16) == 3504
    assert embedded_scale(family, 3.5, torch.float32) == 3500
    assert embedded_scale(family, rounded.guidance_scale, torch.float32) == pytest.approx(3504, rel=1e-7)
    assert embedded_scale(family, rounded.guidance_scale, torch.bfloat16) == 3504
    assert family.guidance_in_dtype(exact, torch.float32) == exact


def test_guidance_that_is_not_embedded_is_not_rounded(schnell):
    assert schnell.guidance_in_dtype(Guidance(guidance_scale=3.3), torch.bfloat16).guidance_scale == 3.3


def test_guidance_of_one_pass_amplifies_no_rounding(family, schnell):
    for model in (family, schnell):
        assert model.amplification(Guidance(guidance_scale=3.5)) == 1


def test_free_text_encoders(family):
    family.free_text_encoders()
    assert family.pipeline.text_encoder is None
    assert family.pipeline.text_encoder_2 is None
