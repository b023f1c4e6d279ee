import pytest
import torch

from flowcorr.config import ModelConfig
from flowcorr.errors import ConfigError
from flowcorr.models import Guidance, load_family
from flowcorr.rollout import decode
from tests.prompts import prompts_of

SHAPE = (4, 8, 16)


@pytest.fixture(scope="module")
def family():
    return load_family(ModelConfig(path="tiny_ocr", max_sequence_length=8))


def inputs(seed=0, batch=2):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(batch, *SHAPE, generator=draw), torch.tensor([900.0, 300.0])[:batch]


def test_latent_shape(family):
    assert family.latent_shape(32, 64) == SHAPE
    native = family.transformer.config.sample_size
    assert family.latent_shape(None, None) == (4, native, native)


@pytest.mark.parametrize(
    ("height", "width", "named"),
    [(30, 64, "height=30 .* 8, .* 24$"), (32, 60, "width=60 .* 8, .* 56$"), (32, 256, "width=256 .* 128$")],
)
def test_a_size_between_patches_or_beyond_the_positions_is_an_error(family, height, width, named):
    with pytest.raises(ConfigError, match=rf"^sampling\.{named}"):
        family.latent_shape(height, width)


@pytest.mark.parametrize("num_steps", [1, 4, 10])
def test_the_schedule_is_the_schedulers_own(family, num_steps):
    schedule = family.schedule(num_steps, SHAPE)
    scheduler = family.pipeline.scheduler
    scheduler.set_timesteps(num_steps)
    assert schedule.sigmas == tuple(scheduler.sigmas.tolist())
    assert schedule.timesteps == tuple(scheduler.timesteps.tolist())
    assert len(schedule.sigmas) == num_steps + 1
    assert schedule.sigmas[-1] == 0.0


def test_dynamic_shifting_depends_on_the_latent_shape(family):
    pipeline = family.pipeline
    plain = pipeline.scheduler
    pipeline.scheduler = type(plain).from_config(plain.config, use_dynamic_shifting=True)
    try:
        small, large = family.schedule(4, (4, 8, 16)), family.schedule(4, (4, 128, 128))
    finally:
        pipeline.scheduler = plain
    assert large.sigmas[1] > small.sigmas[1]


def test_encode_is_the_pipelines_own(family):
    got = family.encode(prompts_of(["cat", "dog"]), Guidance())
    embeds, _, pooled, _ = family.pipeline.encode_prompt(
        prompt=["cat", "dog"], prompt_2=None, prompt_3=None, do_classifier_free_guidance=False,
        max_sequence_length=8,
    )  # fmt: skip
    assert got.keys() == {"prompt_embeds", "pooled_prompt_embeds"}
    assert torch.equal(got["prompt_embeds"], embeds)
    assert torch.equal(got["pooled_prompt_embeds"], pooled)


def test_encode_adds_the_negative_prompt_under_guidance(family):
    got = family.encode(prompts_of(["cat", "dog"]), Guidance(guidance_scale=3.0, negative_prompt="bad"))
    alone = family.encode(prompts_of(["bad"]), Guidance())
    torch.testing.assert_close(got["negative_prompt_embeds"][1], alone["prompt_embeds"][0])
    torch.testing.assert_close(got["negative_pooled_prompt_embeds"][0], alone["pooled_prompt_embeds"][0])


@torch.no_grad()
def test_velocity_is_the_transformers_output(family):
    latents, timesteps = inputs()
    conditioning = family.encode(prompts_of(["cat", "dog"]), Guidance())
    got = family.velocity(family.transformer, latents, timesteps, conditioning, Guidance())
    expected = family.transformer(
        hidden_states=latents,
        timestep=timesteps,
        encoder_hidden_states=conditioning["prompt_embeds"],
        pooled_projections=conditioning["pooled_prompt_embeds"],
    ).sample
    assert torch.equal(got, expected)
    assert got.std() > 0.1


@torch.no_grad()
def test_guidance_is_two_velocities_in_one_forward(family):
    latents, timesteps = inputs()
    guidance = Guidance(guidance_scale=2.5, negative_prompt="bad")
    calls = []
    hook = family.transformer.register_forward_hook(lambda *_: calls.append(1))
    conditioning = family.encode(prompts_of(["cat", "dog"]), guidance)
    got = family.velocity(family.transformer, latents, timesteps, conditioning, guidance)
    assert len(calls) == 1
    hook.remove()

    def alone(texts):
        rows = family.encode(prompts_of(texts), Guidance())
        return family.velocity(family.transformer, latents, timesteps, rows, Guidance())

    positive, negative = alone(["cat", "dog"]), alone(["bad", "bad"])
    torch.testing.assert_close(got, negative + 2.5 * (positive - negative), rtol=1e-4, atol=5e-5)


def test_velocity_is_float32_in_a_bfloat16_model():
    family = load_family(ModelConfig(path="tiny_ocr", dtype="bfloat16", max_sequence_length=8))
    latents, timesteps = inputs()
    conditioning = family.encode(prompts_of(["cat", "dog"]), Guidance())
    assert conditioning["prompt_embeds"].dtype == torch.bfloat16
    assert (
        family.velocity(family.transformer, latents, timesteps, conditioning, Guidance()).dtype
        == torch.float32
    )


@torch.no_grad()
def test_decode_is_the_pipelines_own(family):
    latents, _ = inputs()
    got, finite = decode(family, latents)
    vae, config = family.pipeline.vae, family.pipeline.vae.config
    pixels = vae.decode(latents / config.scaling_factor + config.shift_factor).sample
    expected = family.pipeline.image_processor.postprocess(pixels, output_type="np")
    assert got.shape == (2, 32, 64, 3)
    assert got.dtype == torch.uint8
    assert finite.all()
    assert abs(got.numpy() - expected * 255).max() <= 0.51
