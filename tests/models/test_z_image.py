"""Z-Image on a tiny-random pipeline of its own classes, against loops written with diffusers' pieces."""

import numpy as np
import pytest
import torch
from diffusers.pipelines.z_image import pipeline_z_image
from tiny_pipelines import Z_IMAGE_SIZE, build_tiny_z_image, connect

from flowcorr.config import ModelConfig
from flowcorr.errors import ConfigError
from flowcorr.models import Guidance, load_family
from flowcorr.rollout import decode, sample_ode
from tests.models.learning import (
    assert_an_adapter_is_learned_and_loads,
    assert_both_stacks_round_alike,
    assert_log_probs_are_those_of_a_loop,
    in_bfloat16,
)
from tests.prompts import prompts_of
from tests.tolerances import LATENTS, MEANS

HEIGHT, WIDTH = Z_IMAGE_SIZE
SHAPE = (4, 8, 12)
TOKENS = 24  # 4 x 6 patches: not a multiple of 32, so the transformer pads images as well
LENGTH = 48
PROMPTS = ["cat", "two dogs on a very long sofa"]  # 17 and 38 tokens: padded to 32 and to 64
GUIDED = Guidance(guidance_scale=3.0, negative_prompt="bad")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(build_tiny_z_image(tmp_path_factory.mktemp("z_image")))


@pytest.fixture(scope="module")
def family(path):
    return load_family(ModelConfig(path=path, max_sequence_length=LENGTH))


def settings(path, **sampling):
    return {
        "model": {"path": path, "max_sequence_length": LENGTH},
        "sampling": {
            "height": HEIGHT,
            "width": WIDTH,
            "num_inference_steps": 5,
            "sde_window_size": 3,
            "sde_window_range": (0, 4),
            "guidance_scale": GUIDED.guidance_scale,
            "negative_prompt": GUIDED.negative_prompt,
            **sampling,
        },
        "rollout": {"prompts_per_step": 2, "n": 2},
        "actor": {"mini_batches": 1, "lr": 1e-3},
    }


def noise(seed=0, batch=2):
    return torch.randn(batch, *SHAPE, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def pipeline_velocity(pipe, latents, timestep, prompt, guidance):
    """One prompt alone, guided as `ZImagePipeline.__call__` does, which counts guidance from 0."""
    positive, negative = pipe.encode_prompt(
        [prompt], negative_prompt=[guidance.negative_prompt], max_sequence_length=LENGTH
    )
    time = torch.tensor([(1000 - timestep) / 1000])

    def predict(captions):
        return pipe.transformer([latents[:, None]], time, captions, return_dict=False)[0][0].float()

    prediction = predict(positive)
    if guidance.guidance_scale > 1:
        prediction = prediction + (guidance.guidance_scale - 1) * (prediction - predict(negative))
    return -prediction[None, :, 0]


def pipeline_schedule(pipe, steps, tokens):
    """Sigmas and timesteps with the calls that `ZImagePipeline.__call__` makes."""
    mu = pipeline_z_image.calculate_shift(tokens)
    timesteps, _ = pipeline_z_image.retrieve_timesteps(
        pipe.scheduler, steps, "cpu", sigmas=pipeline_z_image.get_default_z_image_sigmas(steps), mu=mu
    )
    return pipe.scheduler.sigmas.tolist(), timesteps.tolist()


def test_latent_shape(family):
    assert family.name == "z_image"
    assert family.latent_shape(HEIGHT, WIDTH) == SHAPE
    assert family.latent_shape(None, None) == (4, 512, 512)  # 1024 pixels, and a VAE that shrinks by 2


@pytest.mark.parametrize(
    ("height", "width", "named"), [(18, 24, "height=18 .* 4, .* 16$"), (16, 22, "width=22 .* 4, .* 20$")]
)
def test_a_size_between_patches_is_an_error(family, height, width, named):
    with pytest.raises(ConfigError, match=rf"^sampling\.{named}"):
        family.latent_shape(height, width)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("steps", [1, 5])
def test_the_schedule_is_the_pipelines(path, steps, dynamic):
    family = load_family(ModelConfig(path=path), text_encoders=False)
    family.pipeline.scheduler.register_to_config(use_dynamic_shifting=dynamic)
    schedule = family.schedule(steps, SHAPE)
    sigmas, timesteps = pipeline_schedule(family.pipeline, steps, TOKENS)
    assert schedule.sigmas == pytest.approx(sigmas, abs=1e-6)
    assert schedule.timesteps == pytest.approx(timesteps, abs=1e-3)
    assert (schedule.sigmas[0], schedule.sigmas[-1]) == (1.0, 0.0)


def test_encode_is_the_pipelines_own(family):
    got = family.encode(prompts_of(PROMPTS), GUIDED)
    positive, negative = family.pipeline.encode_prompt(
        list(PROMPTS), negative_prompt=["bad"] * 2, max_sequence_length=LENGTH
    )
    assert all(rows.shape[:2] == (2, LENGTH) for rows in got.values())
    for row in range(2):
        for prefix, expected in (("", positive[row]), ("negative_", negative[row])):
            embeds, mask = got[f"{prefix}prompt_embeds"][row], got[f"{prefix}prompt_embeds_mask"][row]
            assert mask.sum() == len(expected) < LENGTH
            torch.testing.assert_close(embeds[mask], expected, **MEANS)
            assert embeds[~mask].abs().max() == 0
    assert family.encode(prompts_of(PROMPTS), Guidance()).keys() == {"prompt_embeds", "prompt_embeds_mask"}


def test_a_long_prompt_is_cut_off_as_the_pipeline_does(family):
    mask = family.encode(prompts_of(["word " * 100, "cat"]), Guidance())["prompt_embeds_mask"]
    assert mask.sum(1).tolist() == [LENGTH, 17]


@pytest.mark.parametrize("guidance", [Guidance(), GUIDED])
@torch.no_grad()
def test_velocity_is_the_pipelines(family, guidance):
    latents, timesteps = noise(), torch.tensor([912.5, 303.0])
    conditioning = family.encode(prompts_of(PROMPTS), guidance)
    got = family.velocity(family.transformer, latents, timesteps, conditioning, guidance)
    for row, prompt in enumerate(PROMPTS):
        expected = pipeline_velocity(family.pipeline, latents[row], timesteps[row].item(), prompt, guidance)
        torch.testing.assert_close(got[row : row + 1], expected, **MEANS)
    assert got.std() > 0.1


@torch.no_grad()
def test_velocity_depends_on_the_prompt_and_on_its_length(family):
    conditioning = family.encode(prompts_of([PROMPTS[1]] * 2), Guidance())
    conditioning["prompt_embeds_mask"][1, 20:] = False
    same = noise(batch=1).expand(2, *SHAPE)
    got = family.velocity(family.transformer, same, torch.full((2,), 500.0), conditioning, Guidance())
    assert (got[0] - got[1]).abs().max() > 1e-3


@pytest.mark.parametrize("guidance", [Guidance(), GUIDED])
def test_the_ode_sampler_is_the_pipelines_own_call(family, guidance):
    conditioning = family.encode(prompts_of(PROMPTS), guidance)
    got = sample_ode(
        lambda latents, timesteps: family.velocity(
            family.transformer, latents, timesteps, conditioning, guidance
        ),
        noise(),
        family.schedule(4, SHAPE),
    )
    expected = family.pipeline(
        list(PROMPTS),
        negative_prompt=["bad"] * 2,
        guidance_scale=guidance.guidance_scale - 1,
        height=HEIGHT,
        width=WIDTH,
        num_inference_steps=4,
        latents=noise(),
        max_sequence_length=LENGTH,
        output_type="latent",
    ).images
    torch.testing.assert_close(got, expected, **LATENTS)


@torch.no_grad()
def test_decode_is_the_pipelines_own(family):
    pipe, latents = family.pipeline, noise()
    got, finite = decode(family, latents)
    pixels = pipe.vae.decode(latents / pipe.vae.config.scaling_factor + pipe.vae.config.shift_factor).sample
    expected = pipe.image_processor.postprocess(pixels, output_type="np")
    assert got.shape == (2, HEIGHT, WIDTH, 3)
    assert got.dtype == torch.uint8
    assert finite.all()
    assert np.abs(got.numpy() - expected * 255).max() <= 0.51
    assert got.float().std() > 5


def test_log_probs_equal_an_independent_loop(path, make_config):
    connected = connect(make_config(**settings(path)), PROMPTS)
    schedule = pipeline_schedule(connected[0].pipeline, 5, TOKENS)
    assert_log_probs_are_those_of_a_loop(
        connected, PROMPTS, schedule, lambda *inputs: pipeline_velocity(*inputs, GUIDED)
    )


def test_one_update_and_its_adapter_loads_into_a_pipeline(path, make_config, tmp_path):
    connected = family, actor, _, _ = connect(make_config(**settings(path)), PROMPTS)
    assert len(actor.weights.parameters) == 2 * 7 * 4  # (A, B) of the targets of two layers and two refiners
    fresh = load_family(ModelConfig(path=path, max_sequence_length=LENGTH))
    inputs = (noise(), torch.tensor([900.0, 300.0]), family.encode(prompts_of(PROMPTS), GUIDED), GUIDED)
    assert_an_adapter_is_learned_and_loads(connected, fresh, inputs, tmp_path, Z_IMAGE_SIZE)


def test_bfloat16(path, make_config):
    sections = in_bfloat16(settings(path, sde_window_range=(1, 4)))
    connected = connect(make_config(**sections), PROMPTS)
    schedule = connected[0].schedule(5, SHAPE)
    assert (
        connected[0].in_dtype(schedule, torch.bfloat16) == schedule
    )  # the transformer takes timesteps in float32
    assert_both_stacks_round_alike(connected)
