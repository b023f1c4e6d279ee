"""FLUX.2 klein on tiny-random pipelines of its own classes, against loops written with diffusers' pieces."""

import numpy as np
import pytest
import torch
from diffusers.pipelines.flux2 import pipeline_flux2_klein
from tiny_pipelines import FLUX2_KLEIN_SIZE, build_tiny_flux2_klein, connect

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
from tests.tolerances import LATENTS, LOG_PROBS, MEANS

HEIGHT, WIDTH = FLUX2_KLEIN_SIZE
SHAPE = (4, 6, 16)
LENGTH = 32
PROMPTS = ["cat", "two dogs"]
GUIDED = Guidance(guidance_scale=3.0)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(build_tiny_flux2_klein(tmp_path_factory.mktemp("flux2_klein")))


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
            **sampling,
        },
        "rollout": {"prompts_per_step": 2, "n": 2},
        "actor": {"mini_batches": 1, "lr": 1e-3},
    }


def noise(seed=0, batch=2):
    return torch.randn(batch, *SHAPE, generator=torch.Generator().manual_seed(seed))


def spatial(latents):
    """`[B, rows, columns, channels]` as the pipeline takes initial latents: `[B, channels, rows, columns]`."""
    return latents.permute(0, 3, 1, 2)


@torch.no_grad()
def pipeline_velocity(pipe, latents, timestep, prompt, guidance_scale):
    """One prompt alone, with the pipeline's own position ids, guided as its `__call__` does."""
    tokens, image_ids = pipe.prepare_latents(
        1, SHAPE[-1] // 4, HEIGHT, WIDTH, torch.float32, "cpu", None, spatial(latents[None])
    )

    def predict(text):
        embeds, text_ids = pipe.encode_prompt([text], max_sequence_length=LENGTH)
        return pipe.transformer(
            hidden_states=tokens,
            timestep=torch.tensor([timestep]) / 1000,
            guidance=None,
            encoder_hidden_states=embeds,
            txt_ids=text_ids,
            img_ids=image_ids,
            return_dict=False,
        )[0]

    velocity = predict(prompt)
    if guidance_scale > 1:
        negative = predict("")
        velocity = negative + guidance_scale * (velocity - negative)
    return velocity.reshape(1, *SHAPE)


def pipeline_schedule(pipe, steps, tokens):
    """Sigmas and timesteps with the calls that `Flux2KleinPipeline.__call__` makes."""
    mu = pipeline_flux2_klein.compute_empirical_mu(image_seq_len=tokens, num_steps=steps)
    timesteps, _ = pipeline_flux2_klein.retrieve_timesteps(
        pipe.scheduler, steps, "cpu", sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu
    )
    return pipe.scheduler.sigmas.tolist(), timesteps.tolist()


def test_latent_shape(family):
    assert family.name == "flux2_klein"
    assert family.latent_shape(HEIGHT, WIDTH) == SHAPE
    assert family.latent_shape(None, None) == (64, 64, 16)  # default_sample_size 128, patches of 2


@pytest.mark.parametrize(("steps", "shape"), [(1, SHAPE), (5, SHAPE), (10, (64, 64, 16)), (10, (80, 64, 16))])
def test_the_schedule_is_the_pipelines(family, steps, shape):
    schedule = family.schedule(steps, shape)
    sigmas, timesteps = pipeline_schedule(family.pipeline, steps, shape[0] * shape[1])
    assert schedule.sigmas == pytest.approx(sigmas, abs=1e-7)
    assert schedule.timesteps == pytest.approx(timesteps, abs=1e-4)
    assert (schedule.sigmas[0], schedule.sigmas[-1]) == (1.0, 0.0)


def test_encode_is_the_pipelines_own(family):
    got = family.encode(prompts_of(PROMPTS), Guidance(guidance_scale=3.0, negative_prompt="bad"))
    assert got.keys() == {"prompt_embeds", "negative_prompt_embeds"}
    assert got["prompt_embeds"].shape == (2, LENGTH, 96)  # three layers of width 32
    for name, prompts in (("prompt_embeds", PROMPTS), ("negative_prompt_embeds", ["bad", "bad"])):
        expected, _ = family.pipeline.encode_prompt(prompts, max_sequence_length=LENGTH)
        torch.testing.assert_close(got[name], expected, **MEANS)
    assert family.encode(prompts_of(PROMPTS), Guidance()).keys() == {"prompt_embeds"}


@pytest.mark.parametrize("guidance", [Guidance(), GUIDED])
@torch.no_grad()
def test_velocity_is_the_pipelines(family, guidance):
    latents, timesteps = noise(), torch.tensor([912.5, 303.0])
    conditioning = family.encode(prompts_of(PROMPTS), guidance)
    got = family.velocity(family.transformer, latents, timesteps, conditioning, guidance)
    for row, prompt in enumerate(PROMPTS):
        expected = pipeline_velocity(
            family.pipeline, latents[row], timesteps[row].item(), prompt, guidance.guidance_scale
        )
        torch.testing.assert_close(got[row : row + 1], expected, **MEANS)
    assert got.std() > 0.1


@torch.no_grad()
def test_velocity_depends_on_prompt_and_place(family):
    conditioning = family.encode(prompts_of(PROMPTS), Guidance())
    same = noise(batch=1).expand(2, *SHAPE)
    timesteps = torch.full((2,), 500.0)
    got = family.velocity(family.transformer, same, timesteps, conditioning, Guidance())
    assert (got[0] - got[1]).abs().max() > 1e-3
    turned = family.velocity(family.transformer, same.transpose(1, 2), timesteps, conditioning, Guidance())
    assert (turned.transpose(1, 2) - got).abs().max() > 1e-5


@pytest.mark.parametrize("guidance", [Guidance(), GUIDED])
def test_sampled_images_are_those_of_the_pipelines_own_call(family, guidance):
    """The pipeline returns latents that it has scaled for the VAE, so images are compared as well as those."""
    conditioning = family.encode(prompts_of(PROMPTS), guidance)
    final = sample_ode(
        lambda latents, timesteps: family.velocity(
            family.transformer, latents, timesteps, conditioning, guidance
        ),
        noise(),
        family.schedule(4, SHAPE),
    )
    asked = {
        "prompt": PROMPTS,
        "guidance_scale": guidance.guidance_scale,
        "height": HEIGHT,
        "width": WIDTH,
        "num_inference_steps": 4,
        "latents": spatial(noise()),
        "max_sequence_length": LENGTH,
    }
    vae = family.pipeline.vae
    scaled = final * (vae.bn.running_var + vae.config.batch_norm_eps).sqrt() + vae.bn.running_mean
    expected = family.pipeline(**asked, output_type="latent").images
    torch.testing.assert_close(family.unpack(scaled), expected, **LATENTS)
    images = decode(family, final)[0].numpy()
    assert np.abs(images - family.pipeline(**asked, output_type="np").images * 255).max() <= 0.6
    assert images.shape == (2, HEIGHT, WIDTH, 3)
    assert images.std() > 5


def test_a_distilled_model_refuses_guidance(tmp_path):
    path = build_tiny_flux2_klein(tmp_path, is_distilled=True)
    distilled = load_family(ModelConfig(path=str(path), max_sequence_length=LENGTH))
    assert distilled.encode(prompts_of(PROMPTS), Guidance()).keys() == {"prompt_embeds"}
    with pytest.raises(ConfigError, match=r"sampling\.guidance_scale=3\.0 .* 1, .*FLUX\.2-klein-base"):
        distilled.encode(prompts_of(PROMPTS), GUIDED)


def test_log_probs_equal_an_independent_loop(path, make_config):
    connected = connect(make_config(**settings(path)), PROMPTS)
    schedule = pipeline_schedule(connected[0].pipeline, 5, SHAPE[0] * SHAPE[1])
    assert_log_probs_are_those_of_a_loop(
        connected, PROMPTS, schedule, lambda *inputs: pipeline_velocity(*inputs, GUIDED.guidance_scale)
    )


def test_one_update_and_its_adapter_loads_into_a_pipeline(path, make_config, tmp_path):
    connected = family, actor, _, _ = connect(make_config(**settings(path)), PROMPTS)
    assert len(actor.weights.parameters) == 2 * (
        12 + 1
    )  # (A, B) of a double block's targets and a single block's
    fresh = load_family(ModelConfig(path=path, max_sequence_length=LENGTH))
    inputs = (noise(), torch.tensor([900.0, 300.0]), family.encode(prompts_of(PROMPTS), GUIDED), GUIDED)
    assert_an_adapter_is_learned_and_loads(connected, fresh, inputs, tmp_path, FLUX2_KLEIN_SIZE)


@torch.no_grad()
def test_a_bfloat16_transformer_computes_with_the_timesteps_of_its_schedule(path):
    family = load_family(ModelConfig(path=path, dtype="bfloat16", max_sequence_length=LENGTH))
    conditioning = family.encode(prompts_of(PROMPTS[:1]), Guidance())
    exact = family.schedule(10, SHAPE)
    rounded = family.in_dtype(exact, torch.bfloat16)
    assert rounded.timesteps == pytest.approx(exact.timesteps, rel=2**-7)
    assert rounded.timesteps != exact.timesteps
    for timesteps in zip(exact.timesteps, rounded.timesteps, strict=True):
        first, second = (
            family.velocity(family.transformer, noise(batch=1), torch.tensor([t]), conditioning, Guidance())
            for t in timesteps
        )
        assert torch.equal(first, second)


def test_bfloat16(path, make_config):
    sections = in_bfloat16(settings(path, sde_window_range=(1, 4)))
    connected = connect(make_config(**sections), PROMPTS)
    assert_both_stacks_round_alike(connected)


# With reference images ------------------------------------------------------------------------------------


EDITED = (64, 96)  # the smallest reference images that the pipeline takes
EDITED_SHAPE = (16, 24, 16)


@pytest.fixture(scope="module")
def editor(path):
    return load_family(ModelConfig(path=path, max_sequence_length=LENGTH), reference_size=EDITED)


@torch.no_grad()
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_with_references_the_ode_sampler_is_the_pipelines_own_call(editor, count, scale):
    prompts, guidance = prompts_of(PROMPTS, images=count), Guidance(guidance_scale=scale)
    conditioning = editor.encode(prompts, guidance)
    assert conditioning["references"].shape == (2, count, *EDITED_SHAPE)
    drawn = torch.randn(2, *EDITED_SHAPE, generator=torch.Generator().manual_seed(0))
    got = sample_ode(
        lambda latents, timesteps: editor.velocity(
            editor.transformer, latents, timesteps, conditioning, guidance
        ),
        drawn,
        editor.schedule(4, EDITED_SHAPE),
    )
    for row, prompt in enumerate(prompts):
        expected = editor.pipeline(
            [image.fitted(*EDITED) for image in prompt.images],
            prompt.text,
            height=EDITED[0],
            width=EDITED[1],
            num_inference_steps=4,
            guidance_scale=scale,
            latents=spatial(drawn[row : row + 1]),
            max_sequence_length=LENGTH,
            output_type="latent",
        ).images
        vae = editor.pipeline.vae
        std = (vae.bn.running_var + vae.config.batch_norm_eps).sqrt()
        scaled = got[row : row + 1] * std + vae.bn.running_mean
        torch.testing.assert_close(editor.unpack(scaled), expected, **LATENTS)


def test_with_references_both_stacks_agree_and_learn(path, make_config):
    prompts = prompts_of(PROMPTS, images=2)
    _, actor, engine, conditioning = connect(make_config(**settings(path)), prompts)
    rollout = engine.sample(conditioning, [0, 1], training_step=1, with_means=True)
    torch.testing.assert_close(actor.log_probs(rollout).log_probs, rollout.log_probs, **LOG_PROBS)
    _, _, plain, without = connect(make_config(**settings(path)), prompts_of(PROMPTS))
    other = plain.sample(without, [0, 1], training_step=1, with_means=True)
    assert (rollout.window.means - other.window.means).abs().max() > 1e-3
