"""FLUX.1 on tiny-random pipelines of its own classes; what it shares with Qwen-Image is in `test_packed.py`."""

import pytest
import torch
from tiny_pipelines import build_tiny_flux

from flowcorr.errors import ConfigError
from flowcorr.models import Guidance
from tests.models.packed import (
    FLUX,
    PROMPTS,
    SHAPE,
    assert_ode_is_the_pipelines,
    assert_velocity_is_the_pipelines,
    noise,
)
from tests.prompts import prompts_of

GUIDANCE = FLUX.guidance


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(build_tiny_flux(tmp_path_factory.mktemp("flux")))


@pytest.fixture(scope="module")
def family(path):
    return FLUX.load(path)


@pytest.fixture(scope="module")
def schnell(tmp_path_factory):
    return FLUX.load(str(build_tiny_flux(tmp_path_factory.mktemp("schnell"), guidance_embeds=False)))


def test_larger_images_get_more_noise(family):
    small, large = family.schedule(4, SHAPE), family.schedule(4, (64, 64, 16))
    assert all(a < b for a, b in zip(small.sigmas[1:4], large.sigmas[1:4], strict=True))


def test_encode_is_the_pipelines_own(family):
    got = family.encode(prompts_of(PROMPTS), GUIDANCE)
    embeds, pooled, _ = family.pipeline.encode_prompt(PROMPTS, None, max_sequence_length=FLUX.length)
    assert got.keys() == {"prompt_embeds", "pooled_prompt_embeds"}
    assert got["prompt_embeds"].shape == (2, FLUX.length, 32)
    assert torch.equal(got["prompt_embeds"], embeds)
    assert torch.equal(got["pooled_prompt_embeds"], pooled)


def test_schnell_is_the_pipelines(schnell):
    assert_velocity_is_the_pipelines(FLUX, schnell, Guidance())
    assert_ode_is_the_pipelines(FLUX, schnell, Guidance())


def test_guidance_that_schnell_does_not_read_is_refused(schnell):
    with pytest.raises(ConfigError, match=r"sampling\.guidance_scale=3\.5 .* 1, .*distills_guidance"):
        schnell.encode(prompts_of(PROMPTS), GUIDANCE)


@pytest.mark.parametrize(("variant", "reads"), [("family", True), ("schnell", False)])
@torch.no_grad()
def test_only_dev_reads_the_guidance_scale(request, variant, reads):
    family = request.getfixturevalue(variant)
    inputs = (
        family.transformer,
        noise(),
        torch.tensor([912.5, 303.0]),
        family.encode(prompts_of(PROMPTS), Guidance()),
    )
    weak, strong = (family.velocity(*inputs, Guidance(guidance_scale=scale)) for scale in (1.0, 7.0))
    assert ((weak - strong).abs().max() > 1e-3) == reads


def embedded_scale(family, scale, dtype):
    """What the transformer embeds where guidance is fed at `scale` to weights of `dtype`."""
    seen = []
    embed = family.transformer.time_text_embed
    handle = embed.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1]))
    family.transformer.to(dtype)
    conditioning = {
        name: rows.to(dtype) for name, rows in family.encode(prompts_of(PROMPTS), GUIDANCE).items()
    }
    timesteps, guidance = torch.tensor([912.5, 303.0]), Guidance(guidance_scale=scale)
    with torch.no_grad():
        family.velocity(family.transformer, noise(), timesteps, conditioning, guidance)
    family.transformer.to(torch.float32)
    handle.remove()
    return seen[0][0].item()


def test_an_actor_in_float32_is_guided_as_the_engine_in_bfloat16_is(path):
    family = FLUX.load(path)
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


@torch.no_grad()
def test_velocity_depends_on_the_place(family):
    conditioning = family.encode(prompts_of(PROMPTS), GUIDANCE)
    same = noise(batch=1).expand(2, *SHAPE)
    timesteps = torch.full((2,), 500.0)
    got = family.velocity(family.transformer, same, timesteps, conditioning, GUIDANCE)
    turned = family.velocity(family.transformer, same.transpose(1, 2), timesteps, conditioning, GUIDANCE)
    assert (turned.transpose(1, 2) - got).abs().max() > 1e-5


def test_free_text_encoders(path):
    family = FLUX.load(path)
    family.free_text_encoders()
    assert family.pipeline.text_encoder is None
    assert family.pipeline.text_encoder_2 is None
