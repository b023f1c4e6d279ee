"""Every family does what its pipeline's own call does, and each part of an adapter that does not is named."""

import pytest
import torch
from tiny_pipelines import PIPELINES

from flowcorr.models import CannotCompare, ModelFamily
from tests.models.adapters import (
    compared,
    load,
    with_conditioning,
    with_decoding,
    with_guidance,
    with_inputs,
    with_steps,
    with_timesteps,
    with_velocity,
)


@pytest.mark.parametrize("name", PIPELINES)
def test_every_family_is_its_pipeline(adapter_of, name):
    family = adapter_of(name)
    state, forward = torch.get_rng_state(), family.transformer.forward
    result = compared(family, name)
    assert result.differences == ()
    assert result.velocity_gap < 1e-4
    assert result.pixel_gap < 1e-2
    assert result.guided == (not name.startswith("flux") or name == "flux2_klein")
    assert torch.equal(torch.get_rng_state(), state)
    assert family.transformer.forward == forward
    assert "step" not in vars(family.pipeline.scheduler)


@pytest.mark.parametrize("name", ["wan", "qwen_image"])
def test_rounding_is_no_difference(name, tmp_path):
    """Wan keeps some of its weights in float32."""
    folder = str(PIPELINES[name].build(tmp_path, torch.bfloat16, seed=7))
    result = compared(load(folder, name, "bfloat16"), name)
    assert result.differences == ()
    assert 1e-5 < result.velocity_gap < 0.1


def negatives_of_prompts(conditioning):
    return {
        name: conditioning[name.removeprefix("negative_")] if name.startswith("negative_") else rows
        for name, rows in conditioning.items()
    }


def other_rows(name):
    return lambda conditioning: {**conditioning, name: conditioning[name].flip(0)}


def unmasked(conditioning):
    return {
        name: torch.ones_like(rows) if name.endswith("mask") else rows for name, rows in conditioning.items()
    }


def plain_guide(self, negative, positive, scale):
    return negative + scale * (positive - negative)


def counted_from_zero(self, negative, positive, scale):
    return positive + scale * (positive - negative)


def without_shift(self, latents):
    vae = self.pipeline.vae
    return vae.decode(latents / vae.config.scaling_factor, return_dict=False)[0]


def transposed(ids):
    return ids[:, [0, 2, 1]]


WRONG = {
    "timesteps 2 % off": ("flux2_klein", with_timesteps(lambda t: 1.02 * t), "timesteps"),
    "timesteps .02 % off": ("wan", with_timesteps(lambda t: 1.0002 * t), "timesteps"),
    "timesteps a thousandth": ("sd3", with_inputs(timestep=lambda t: t / 1000), "timesteps"),
    "timesteps times 1000": ("ovis_image", with_inputs(timestep=lambda t: t * 1000), "timesteps"),
    "sigmas for timesteps": ("sd35", with_timesteps(lambda t: t / 1000), "timesteps"),
    "time runs backwards": ("z_image", with_inputs(t=lambda t: 1 - t), "timesteps"),
    "schedule": ("qwen_image", {"schedule": with_steps}, "schedule"),
    "prompts of other samples": ("wan", with_conditioning(other_rows("prompt_embeds")), "prompt"),
    "pooled embeddings of others": (
        "flux",
        with_conditioning(other_rows("pooled_prompt_embeds")),
        "pooled_prompt",
    ),
    "embeddings 1 % off": ("sd3", with_inputs(encoder_hidden_states=lambda x: 1.01 * x), "prompt"),
    "no mask": ("qwen_image", with_conditioning(unmasked), "mask"),
    "no mask of captions": ("z_image", with_conditioning(unmasked), "prompt"),
    "fewer tokens": (
        "ovis_image",
        with_conditioning(lambda rows: {name: value[:, :-1] for name, value in rows.items()}),
        "prompt",
    ),
    "places of image tokens": ("flux", with_inputs(img_ids=transposed), "positions"),
    "places of text tokens": ("ovis_image", with_inputs(txt_ids=torch.zeros_like), "positions"),
    "image shapes": ("qwen_image", with_inputs(img_shapes=lambda x: [[(1, 6, 4)]] * len(x)), "positions"),
    "latents 1 % off": ("wan", with_inputs(hidden_states=lambda x: 1.01 * x), "latents"),
    "rows of tokens exchanged": ("flux2_klein", with_inputs(hidden_states=lambda x: x.flip(1)), "latents"),
    "sign": ("z_image", with_velocity(torch.neg), "velocity"),
    "velocity 1 % off": ("sd3", with_velocity(lambda velocity: 1.01 * velocity), "velocity"),
    "distilled guidance": ("flux", with_inputs(guidance=lambda scale: 1.01 * scale), "guidance"),
    "no reference": (
        "flux_kontext",
        with_conditioning(lambda rows: {name: x for name, x in rows.items() if name != "references"}),
        "latents",
    ),
    "reference of others": ("flux_kontext", with_conditioning(other_rows("references")), "latents"),
    "negative prompt forgotten": ("sd3", with_guidance(negative_prompt=""), "negative_prompt"),
    "negative prompt of others": ("wan", with_guidance(negative_prompt="good"), "negative_prompt"),
    "negative is the prompt": ("ovis_image", with_conditioning(negatives_of_prompts), "negative_prompt"),
    "norm not kept": ("qwen_image", {"guide": plain_guide}, "guidance"),
    "guidance counted from 0": ("flux2_klein", {"guide": counted_from_zero}, "guidance"),
    "convention of the pipeline": (
        "z_image",
        {"call_arguments": ModelFamily.call_arguments},
        "guidance",
    ),
    "VAE without shift": ("sd3", {"decode": without_shift}, "decode"),
    "VAE 1 % off": ("wan", with_decoding(lambda latents: 1.01 * latents), "decode"),
    "packed otherwise": ("flux", with_decoding(lambda latents: latents.flip(-1)), "decode"),
    "rows exchanged": ("qwen_image", with_decoding(lambda latents: latents.flip(1)), "decode"),
    "red and blue": ("ovis_image", with_decoding(after=lambda pixels: pixels.flip(1)), "pixels"),
    "pixels from 0 to 1": ("sd3", with_decoding(after=lambda pixels: (pixels + 1) / 2), "pixels"),
}


@pytest.mark.parametrize(("name", "methods", "part"), WRONG.values(), ids=WRONG)
def test_a_wrong_adapter_is_named(adapter_of, name, methods, part):
    result = compared(adapter_of(name, **methods), name)
    assert [difference.part for difference in result.differences][:1] == [part]
    first = result.differences[0]
    assert first.value > first.limit


def test_a_pipeline_that_cannot_be_called_is_no_difference(adapter_of):
    family = adapter_of("sd3", call_arguments=lambda self, prompt, guidance: {"prompt": 3})
    with pytest.raises(
        CannotCompare, match=r"StableDiffusion3Pipeline cannot be called.*Wrong\.call_arguments"
    ):
        compared(family, "sd3")
