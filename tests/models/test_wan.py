"""Wan on tiny-random pipelines of its own classes, against loops written with diffusers' pieces."""

import inspect
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_pipelines import PIPELINES, WAN_FRAMES, WAN_SIZE, connect

from flowcorr.config import ModelConfig
from flowcorr.errors import ConfigError
from flowcorr.models import Guidance, load_family
from flowcorr.models.wan import Wan
from flowcorr.rollout import decode, sample_ode
from tests.models.learning import (
    assert_an_adapter_is_learned_and_loads,
    assert_both_stacks_round_alike,
    assert_log_probs_are_those_of_a_loop,
    in_bfloat16,
)
from tests.prompts import prompts_of
from tests.tolerances import LATENTS, MEANS

MODELS = ("wan", "wan22_ti2v")
LENGTH = 12
PROMPTS = ["cat", "two dogs"]
GUIDED = Guidance(guidance_scale=3.0, negative_prompt="bad")
GUIDANCES = (Guidance(), GUIDED)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return {name: str(PIPELINES[name].build(tmp_path_factory.mktemp(name))) for name in MODELS}


@pytest.fixture(params=MODELS)
def name(request):
    return request.param


@pytest.fixture
def family(paths, name):
    return load_family(ModelConfig(path=paths[name], max_sequence_length=LENGTH))


def shape_of(family, name):
    return family.sample_shape(*PIPELINES[name].size, WAN_FRAMES)


def settings(path, name, **sampling):
    height, width = PIPELINES[name].size
    return {
        "model": {"path": path, "max_sequence_length": LENGTH},
        "sampling": {
            "height": height,
            "width": width,
            "num_frames": WAN_FRAMES,
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


def noise(shape, seed=0, batch=2):
    return torch.randn(batch, *shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def pipeline_velocity(pipe, latents, timestep, prompt, guidance):
    """One prompt alone, the two halves of guidance one after the other, as in `WanPipeline.__call__`."""
    embeds, negative = pipe.encode_prompt([prompt], [guidance.negative_prompt], max_sequence_length=LENGTH)
    time = torch.tensor([timestep])
    if pipe.config.expand_timesteps:
        time = torch.full_like(latents[0, :, ::2, ::2], timestep).flatten()[None]

    def predict(text):
        return pipe.transformer(
            hidden_states=latents[None], timestep=time, encoder_hidden_states=text, return_dict=False
        )[0]

    if guidance.guidance_scale <= 1:
        return predict(embeds)
    without = predict(negative)
    return without + guidance.guidance_scale * (predict(embeds) - without)


def test_each_model_has_the_frame_rate_that_it_was_trained_on(family, name):
    assert family.frames_per_second == {"wan": 16, "wan22_ti2v": 24}[name]


def test_native_sizes_are_those_of_the_pipelines_call(family):
    defaults = inspect.signature(type(family.pipeline).__call__).parameters
    sizes = [defaults[argument].default for argument in ("height", "width", "num_frames")]
    assert family.sample_shape(None, None, None) == family.sample_shape(*sizes)


def test_shape_of_a_sample(paths):
    family = load_family(ModelConfig(path=paths["wan"], max_sequence_length=LENGTH))
    assert family.name == "wan"
    assert family.sample_shape(*WAN_SIZE, WAN_FRAMES) == (16, 3, 4, 6)
    assert family.sample_shape(None, None, None) == (16, 21, 60, 104)  # 480 x 832, 81 frames
    assert family.sample_shape(*WAN_SIZE, 1) == (16, 1, 4, 6)
    assert family.image_tokens((16, 21, 60, 104)) == 21 * 30 * 52
    with pytest.raises(ConfigError, match=r"^sampling\.num_frames=10 .* 9 or 13$"):
        family.sample_shape(*WAN_SIZE, 10)
    with pytest.raises(ConfigError, match=r"^sampling\.width=56 .* 16, .* 48$"):
        family.sample_shape(32, 56, WAN_FRAMES)


def test_euler_takes_the_noise_levels_of_the_published_scheduler(family):
    from diffusers import UniPCMultistepScheduler

    published = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    published.set_timesteps(5)
    schedule = family.schedule(5, ())
    assert schedule.sigmas == pytest.approx(published.sigmas.tolist())
    assert schedule.timesteps == pytest.approx(published.timesteps.tolist())


def test_a_dynamic_shift_which_the_pipeline_does_not_give_is_refused(family, monkeypatch):
    plain = family.pipeline.scheduler
    dynamic = type(plain).from_config(plain.config, use_dynamic_shifting=True)
    monkeypatch.setattr(family.pipeline, "scheduler", dynamic)
    with pytest.raises(ConfigError, match="use_dynamic_shifting=True .*flow_shift"):
        family.schedule(5, ())


def test_a_model_with_two_transformers_is_refused(family):
    family.pipeline.transformer_2 = family.transformer
    with pytest.raises(ConfigError, match="transformer_2"):
        Wan(family.pipeline, dtype=torch.float32)


def test_encode_is_the_pipelines_own(family):
    got = family.encode(prompts_of(PROMPTS), GUIDED)
    expected = family.pipeline.encode_prompt(PROMPTS, ["bad", "bad"], max_sequence_length=LENGTH)
    assert list(got) == ["prompt_embeds", "negative_prompt_embeds"]
    for tensor, other in zip(got.values(), expected, strict=True):
        torch.testing.assert_close(tensor, other, **MEANS)
    assert family.encode(prompts_of(PROMPTS), Guidance()).keys() == {"prompt_embeds"}


@pytest.mark.parametrize("guidance", GUIDANCES, ids=["plain", "guided"])
@torch.no_grad()
def test_velocity_is_the_pipelines_in_one_forward(family, name, guidance):
    """Also of a pipeline that feeds a timestep a token."""
    latents, timesteps, calls = noise(shape_of(family, name)), torch.tensor([912.0, 303.0]), []
    conditioning = family.encode(prompts_of(PROMPTS), guidance)
    hook = family.transformer.register_forward_hook(lambda *_: calls.append(1))
    got = family.velocity(family.transformer, latents, timesteps, conditioning, guidance)
    hook.remove()
    assert len(calls) == 1
    for row, prompt in enumerate(PROMPTS):
        expected = pipeline_velocity(family.pipeline, latents[row], timesteps[row].item(), prompt, guidance)
        torch.testing.assert_close(got[row : row + 1], expected, **MEANS)
    assert (got[0] - got[1]).abs().max() > 1e-2


@pytest.mark.parametrize("guidance", GUIDANCES, ids=["plain", "guided"])
def test_the_ode_sampler_is_the_pipelines_own_call(family, name, guidance):
    shape, conditioning = shape_of(family, name), family.encode(prompts_of(PROMPTS), guidance)
    got = sample_ode(
        lambda latents, timesteps: family.velocity(
            family.transformer, latents, timesteps, conditioning, guidance
        ),
        noise(shape),
        family.schedule(4, shape),
    )
    height, width = PIPELINES[name].size
    expected = family.pipeline(
        PROMPTS,
        negative_prompt=["bad"] * 2,
        guidance_scale=guidance.guidance_scale,
        height=height,
        width=width,
        num_frames=WAN_FRAMES,
        num_inference_steps=4,
        latents=noise(shape),
        max_sequence_length=LENGTH,
        output_type="latent",
    ).frames
    torch.testing.assert_close(got, expected, **LATENTS)


@torch.no_grad()
def test_decode_is_the_pipelines_own(family, name):
    pipe, latents = family.pipeline, noise(shape_of(family, name))
    got, finite = decode(family, latents)
    mean, std = (
        torch.tensor(values).view(1, -1, 1, 1, 1)
        for values in (pipe.vae.config.latents_mean, pipe.vae.config.latents_std)
    )
    pixels = pipe.vae.decode(latents * std + mean, return_dict=False)[0]
    expected = pipe.video_processor.postprocess_video(pixels, output_type="np")
    assert got.shape == (2, WAN_FRAMES, *PIPELINES[name].size, 3)
    assert got.dtype == torch.uint8
    assert finite.all()
    assert np.abs(got.numpy() - expected * 255).max() <= 0.51
    assert got.float().std() > 5


@pytest.mark.parametrize("guidance", GUIDANCES, ids=["plain", "guided"])
def test_log_probs_equal_an_independent_loop(paths, name, make_config, guidance):
    sections = settings(paths[name], name, guidance_scale=guidance.guidance_scale)
    connected = connect(make_config(**sections), PROMPTS)
    schedule = connected[0].schedule(5, ())
    assert_log_probs_are_those_of_a_loop(
        connected,
        PROMPTS,
        (schedule.sigmas, schedule.timesteps),
        lambda *inputs: pipeline_velocity(*inputs, replace(guidance, negative_prompt="bad")),
    )


def test_one_update_and_its_adapter_loads_into_a_pipeline(paths, name, family, make_config, tmp_path):
    connected = _, actor, _, _ = connect(make_config(**settings(paths[name], name)), PROMPTS)
    assert len(actor.weights.parameters) == 2 * 2 * 8  # blocks x (A, B) x targets
    shape = shape_of(family, name)
    inputs = (noise(shape), torch.tensor([900.0, 300.0]), family.encode(prompts_of(PROMPTS), GUIDED), GUIDED)
    fresh = load_family(ModelConfig(path=paths[name], max_sequence_length=LENGTH))
    size = (WAN_FRAMES, *PIPELINES[name].size)
    assert_an_adapter_is_learned_and_loads(connected, fresh, inputs, tmp_path, size)


def test_bfloat16(paths, name, make_config):
    sections = in_bfloat16(settings(paths[name], name, sde_window_range=(1, 4)))
    connected = connect(make_config(**sections), PROMPTS)
    family, schedule = connected[0], connected[0].schedule(5, ())
    assert (
        family.in_dtype(schedule, torch.bfloat16) == schedule
    )  # the transformer embeds timesteps in float32
    assert_both_stacks_round_alike(connected)
