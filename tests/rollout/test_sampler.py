import math

import pytest
import torch
from torch.distributions import Normal

from flowcorr.config import ModelConfig
from flowcorr.config.schema import SamplingConfig
from flowcorr.models import Guidance, load_family
from flowcorr.rollout import decode, sample_ode, sample_sde_window
from flowcorr.rollout.sampler import MISSING, to_images
from tests.prompts import prompts_of
from tests.tolerances import LATENTS, LOG_PROBS

PROMPTS = ["cat", "dog"]
STEPS = 6


@pytest.fixture(scope="module")
def family():
    return load_family(ModelConfig(path="tiny_ocr", max_sequence_length=8))


@pytest.fixture
def initial():
    return torch.randn(2, 4, 8, 16, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    ("shape", "images", "sizes"),
    [
        ((4, 8, 16), 20, [16, 4]),
        ((16, 48, 48), 10, [7, 3]),  # 384 x 384 pixels
        ((32, 32, 64), 6, [4, 2]),  # 512 x 512
        ((64, 64, 64), 2, [1, 1]),  # 1024 x 1024
        ((96, 96, 64), 2, [1, 1]),
    ],
)
def test_the_larger_the_images_the_fewer_are_decoded_at_a_time(shape, images, sizes):
    class Family:
        def decode(self, latents):
            decoded.append(len(latents))
            return torch.zeros(len(latents), 3, 8, 16)

    decoded = []
    found, finite = decode(Family(), torch.zeros(images, *shape))
    assert found.shape == (images, 8, 16, 3)
    assert finite.tolist() == [True] * images
    assert decoded == sizes


def test_pixels_are_rounded_and_clamped():
    pixels = torch.tensor([-2.0, -1.0, 0.0, 1.0, 3.0]).expand(1, 3, 1, 5)
    images, finite = to_images(pixels)
    assert images.shape == (1, 1, 5, 3)
    assert images[0, 0, :, 0].tolist() == [0, 0, 128, 255, 255]
    assert finite.tolist() == [True]


def test_a_video_is_its_frames():
    pixels = torch.rand(2, 3, 4, 5, 6) * 2 - 1
    videos, finite = to_images(pixels)
    frames, _ = to_images(pixels.transpose(1, 2).flatten(0, 1))
    assert torch.equal(videos, frames.view(2, 4, 5, 6, 3))
    pixels[1, 0, 2, 0, 0] = math.nan
    videos, finite = to_images(pixels)
    assert finite.tolist() == [True, False]
    assert (videos[1] == torch.tensor(MISSING)).all()  # none of its frames is one


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_pixel_that_is_not_finite_leaves_no_picture(bad, dtype):
    pixels = torch.zeros(3, 3, 4, 5, dtype=dtype)
    pixels[1, 2, 3, 4] = bad
    images, finite = to_images(pixels)
    assert finite.tolist() == [True, False, True]
    assert (images[1] == torch.tensor(MISSING)).all()
    assert (images[[0, 2]] == 128).all()


def bound_velocity(family, guidance):
    conditioning = family.encode(prompts_of(PROMPTS), guidance)

    def velocity(latents, timesteps, rows=slice(None)):
        chosen = {name: values[rows] for name, values in conditioning.items()}
        return family.velocity(family.transformer, latents, timesteps, chosen, guidance)

    return velocity


def step_noise(index, rows):
    """Noise `[b, *L]` that names its step and sample."""
    shape = (4, 8, 16)
    seeds = [1000 * index + int(row) for row in rows]
    return torch.stack([torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds])


@torch.no_grad()
def transformer_velocity(pipeline, latents, timestep, scale, negative_prompt):
    """The velocity by two separate calls of the transformer."""
    embeds, negative, pooled, negative_pooled = pipeline.encode_prompt(
        prompt=PROMPTS, prompt_2=None, prompt_3=None, negative_prompt=negative_prompt, max_sequence_length=8
    )

    def call(text, pooled_text):
        return pipeline.transformer(
            hidden_states=latents,
            timestep=timestep.expand(len(latents)),
            encoder_hidden_states=text,
            pooled_projections=pooled_text,
        ).sample

    conditional = call(embeds, pooled)
    if scale <= 1:
        return conditional
    unconditional = call(negative, negative_pooled)
    return unconditional + scale * (conditional - unconditional)


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_ode_is_the_pipeline_itself(family, initial, scale):
    guidance = Guidance(guidance_scale=scale, negative_prompt="bad")
    got = sample_ode(bound_velocity(family, guidance), initial, family.schedule(STEPS, (4, 8, 16)))
    expected = family.pipeline(
        prompt=PROMPTS,
        negative_prompt=["bad", "bad"],
        height=32,
        width=64,
        num_inference_steps=STEPS,
        guidance_scale=scale,
        latents=initial,
        output_type="latent",
        max_sequence_length=8,
    ).images
    torch.testing.assert_close(got, expected, **LATENTS)


@pytest.mark.parametrize("windows", [[[0, 1], [2, 3]], [[0, 3], [2, 5]]], ids=["consecutive", "scattered"])
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_sde_window_is_a_loop_over_scheduler_and_transformer(family, initial, scale, windows):
    eta = 0.6
    guidance = Guidance(guidance_scale=scale, negative_prompt="bad")
    sampling = SamplingConfig(noise_level=eta, num_inference_steps=STEPS)
    got, log_probs, final = sample_sde_window(
        bound_velocity(family, guidance), initial, family.schedule(STEPS, (4, 8, 16)), sampling,
        torch.tensor(windows), step_noise, with_means=True,
    )  # fmt: skip

    scheduler = family.pipeline.scheduler
    scheduler.set_timesteps(STEPS)
    latents = initial
    for index, timestep in enumerate(scheduler.timesteps):
        velocity = transformer_velocity(family.pipeline, latents, timestep, scale, "bad")
        sigma, sigma_next = scheduler.sigmas[index], scheduler.sigmas[index + 1]
        dt = sigma_next - sigma
        c = eta * torch.sqrt(sigma / (1 - (sigma_next if sigma == 1 else sigma)))
        following = scheduler.step(velocity, timestep, latents, return_dict=False)[0]
        for row, window in enumerate(windows):
            if index not in window:
                continue
            column = window.index(index)
            x, v = latents[row], velocity[row]
            mean = x * (1 + c**2 / (2 * sigma) * dt) + v * (1 + c**2 * (1 - sigma) / (2 * sigma)) * dt
            std = c * torch.sqrt(-dt)
            following[row] = mean + std * step_noise(index, [row])[0]
            torch.testing.assert_close(got.latents[row, column], x, **LATENTS)
            torch.testing.assert_close(got.next_latents[row, column], following[row], **LATENTS)
            torch.testing.assert_close(got.means[row, column], mean, **LATENTS)
            torch.testing.assert_close(got.stds[row, column], std)
            expected = Normal(mean, std).log_prob(following[row]).mean()
            torch.testing.assert_close(log_probs[row, column], expected, **LOG_PROBS)
            assert got.sigmas[row, column] == sigma
            assert got.sigmas_next[row, column] == sigma_next
            assert got.timesteps[row, column] == timestep
            assert got.step_indices[row, column] == index
        latents = following
    torch.testing.assert_close(final, latents, **LATENTS)


@pytest.mark.parametrize(("sde_type", "eta"), [("sde", 0.7), ("cps", 0.8), ("dance_sde", 0.3)])
def test_log_probs_are_those_of_the_normal_distribution(family, initial, sde_type, eta):
    sampling = SamplingConfig(sde_type=sde_type, noise_level=eta, num_inference_steps=STEPS)
    got, log_probs, final = sample_sde_window(
        bound_velocity(family, Guidance()), initial, family.schedule(STEPS, (4, 8, 16)), sampling,
        torch.tensor([[1, 2], [0, 4]]), step_noise, with_means=True,
    )  # fmt: skip
    std = got.stds[..., None, None, None]
    expected = Normal(got.means.double(), std.double()).log_prob(got.next_latents.double())
    torch.testing.assert_close(log_probs.double(), expected.mean((2, 3, 4)), **LOG_PROBS)


def test_means_are_left_out_unless_asked_for(family, initial):
    sampling = SamplingConfig(num_inference_steps=STEPS)
    got, log_probs, final = sample_sde_window(
        bound_velocity(family, Guidance()), initial, family.schedule(STEPS, (4, 8, 16)), sampling,
        torch.tensor([[0, 1], [0, 1]]), step_noise,
    )  # fmt: skip
    assert got.means is None
    assert got.stds.shape == log_probs.shape == (2, 2)


def test_little_noise_leads_where_the_ode_leads(family, initial):
    schedule = family.schedule(STEPS, (4, 8, 16))
    velocity = bound_velocity(family, Guidance())
    sampling = SamplingConfig(noise_level=1e-6, num_inference_steps=STEPS)
    *_, final = sample_sde_window(
        velocity, initial, schedule, sampling, torch.tensor([[1, 2], [2, 4]]), step_noise
    )
    torch.testing.assert_close(final, sample_ode(velocity, initial, schedule), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("windows", [[[0, 3], [2, 5]], [[0, 1], [3, 4]]])
def test_steps_with_noise_outside_the_window_are_those_of_a_longer_window(family, initial, windows):
    schedule, velocity = family.schedule(STEPS, (4, 8, 16)), bound_velocity(family, Guidance())
    sampling = SamplingConfig(num_inference_steps=STEPS, sde_noise_range=(0, STEPS))
    every = torch.arange(STEPS).repeat(2, 1)
    whole, log_probs, final = sample_sde_window(
        velocity, initial, schedule, sampling, every, step_noise, with_means=True
    )
    part, part_log_probs, part_final = sample_sde_window(
        velocity, initial, schedule, sampling, torch.tensor(windows), step_noise, with_means=True
    )
    rows = torch.arange(2)[:, None]
    for name in ("latents", "next_latents", "means"):
        torch.testing.assert_close(getattr(part, name), getattr(whole, name)[rows, windows], **LATENTS)
    torch.testing.assert_close(part_log_probs, log_probs[rows, windows], **LOG_PROBS)
    torch.testing.assert_close(part.stds, whole.stds[rows, windows])
    torch.testing.assert_close(part_final, final, **LATENTS)
    quiet = SamplingConfig(num_inference_steps=STEPS)
    *_, other_final = sample_sde_window(velocity, initial, schedule, quiet, torch.tensor(windows), step_noise)
    assert not torch.allclose(other_final, part_final, atol=0.1)


@pytest.mark.parametrize(
    ("noise_range", "distinct"),
    [((1, 3), [1, 1, 4, 4, 4, 4]), ((4, 6), [1, 1, 1, 3, 4, 4]), (None, [1, 1, 1, 3, 4, 4])],
)
def test_twins_part_where_the_first_of_them_gets_noise(family, initial, noise_range, distinct):
    called = []

    def velocity(latents, timesteps, rows):
        called.append(len(latents))
        return torch.zeros_like(latents)

    sampling = SamplingConfig(num_inference_steps=STEPS, sde_noise_range=noise_range)
    windows = torch.tensor([[2, 4], [3, 4], [2, 3], [3, 5]])
    sample_sde_window(
        velocity, initial[:1].repeat(4, 1, 1, 1), family.schedule(STEPS, (4, 8, 16)), sampling, windows,
        step_noise, twins=[0] * 4,
    )  # fmt: skip
    assert called == distinct


@pytest.mark.parametrize("second", [1, 2])
@pytest.mark.parametrize("starts", [[2, 2, 0, 2, 3, 1], [0] * 6])
def test_twins_share_what_is_the_same(family, starts, second):
    """Rows 0, 1, 3 and 2, 4 are twins; each waits for its own window, whose `second` step comes so much later."""
    twins, windows = [7, 7, 5, 7, 5, 9], torch.tensor([[start, start + second] for start in starts])
    guidance = Guidance(guidance_scale=3.0)
    conditioning = family.encode(prompts_of(["cat", "cat", "dog", "cat", "dog", "sun"]), guidance)
    noises = torch.randn(10, 4, 8, 16, generator=torch.Generator().manual_seed(3))
    called = []

    def velocity(latents, timesteps, rows):
        called.append(len(latents))
        chosen = {name: values[rows] for name, values in conditioning.items()}
        return family.velocity(family.transformer, latents, timesteps, chosen, guidance)

    sampling = SamplingConfig(num_inference_steps=STEPS)
    arguments = (velocity, noises[twins], family.schedule(STEPS, (4, 8, 16)), sampling, windows, step_noise)
    together, *together_rest = sample_sde_window(*arguments, twins=twins, with_means=True)
    shared, called = called, []
    alone, *alone_rest = sample_sde_window(*arguments, with_means=True)
    assert called == [6] * STEPS
    # Distinct at step i: every row whose window began before, and one of each set of the other twins.
    assert shared == ([3, 4, 4, 6, 6, 6] if any(starts) else [3, 6, 6, 6, 6, 6])
    for name in ("latents", "next_latents", "means"):
        torch.testing.assert_close(getattr(together, name), getattr(alone, name), **LATENTS, msg=name)
    for found, expected, tolerance in zip(together_rest, alone_rest, (LOG_PROBS, LATENTS), strict=True):
        torch.testing.assert_close(found, expected, **tolerance)
    for name in ("step_indices", "timesteps", "sigmas", "sigmas_next", "stds"):
        assert torch.equal(getattr(together, name), getattr(alone, name)), name
