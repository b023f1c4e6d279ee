"""FLUX.1 on tiny-random pipelines of its own classes, against loops written with diffusers' pieces."""

import numpy as np
import pytest
import torch
from diffusers.pipelines.flux import pipeline_flux
from tiny_pipelines import FLUX_SIZE, build_tiny_flux, connect, flow_grpo_log_prob, stir

from flowcorr.config import ModelConfig
from flowcorr.errors import ConfigError
from flowcorr.models import Guidance, load_family
from flowcorr.records import ActorBatch
from flowcorr.rollout import sample_ode
from tests.tolerances import LATENTS, LOG_PROBS, MEANS

HEIGHT, WIDTH = FLUX_SIZE
SHAPE = (4, 6, 16)
LENGTH = 12
PROMPTS = ["cat", "two dogs"]
GUIDANCE = Guidance(guidance_scale=3.5)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(build_tiny_flux(tmp_path_factory.mktemp("flux")))


@pytest.fixture(scope="module")
def family(path):
    return load_family(ModelConfig(path=path, max_sequence_length=LENGTH))


@pytest.fixture(scope="module")
def schnell(tmp_path_factory):
    path = build_tiny_flux(tmp_path_factory.mktemp("schnell"), guidance_embeds=False)
    return load_family(ModelConfig(path=str(path), max_sequence_length=LENGTH))


def settings(path, **sampling):
    return {
        "model": {"path": path, "max_sequence_length": LENGTH},
        "sampling": {
            "height": HEIGHT,
            "width": WIDTH,
            "num_inference_steps": 5,
            "sde_window_size": 3,
            "sde_window_range": (0, 4),
            "guidance_scale": 3.5,
            **sampling,
        },
        "rollout": {"prompts_per_step": 2, "n": 2},
        "actor": {"mini_batches": 1, "lr": 1e-3},
    }


def noise(seed=0, batch=2):
    return torch.randn(batch, *SHAPE, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def pipeline_velocity(pipe, latents, timestep, prompt, guidance_scale):
    """One prompt alone, with the pipeline's own position ids."""
    embeds, pooled, text_ids = pipe.encode_prompt([prompt], None, max_sequence_length=LENGTH)
    _, image_ids = pipe.prepare_latents(
        1, SHAPE[-1] // 4, HEIGHT, WIDTH, embeds.dtype, "cpu", None, latents.reshape(1, -1, SHAPE[-1])
    )
    guidance = torch.tensor([guidance_scale]) if pipe.transformer.config.guidance_embeds else None
    return pipe.transformer(
        hidden_states=latents.reshape(1, -1, SHAPE[-1]),
        timestep=torch.tensor([timestep]) / 1000,
        guidance=guidance,
        pooled_projections=pooled,
        encoder_hidden_states=embeds,
        txt_ids=text_ids,
        img_ids=image_ids,
        return_dict=False,
    )[0].reshape(1, *SHAPE)


def pipeline_schedule(pipe, steps, tokens):
    """Sigmas and timesteps with the calls that `FluxPipeline.__call__` makes."""
    config = pipe.scheduler.config
    mu = pipeline_flux.calculate_shift(
        tokens, config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift
    )
    timesteps, _ = pipeline_flux.retrieve_timesteps(
        pipe.scheduler, steps, "cpu", sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu
    )
    return pipe.scheduler.sigmas.tolist(), timesteps.tolist()


def test_latent_shape(family):
    assert family.name == "flux"
    assert family.latent_shape(HEIGHT, WIDTH) == SHAPE
    assert family.latent_shape(None, None) == (64, 64, 16)  # default_sample_size 128, patches of 2


@pytest.mark.parametrize(("key", "size"), [("height", (18, 24)), ("width", (16, 22))])
def test_a_size_between_patches_is_an_error(family, key, size):
    with pytest.raises(ConfigError, match=rf"sampling\.{key}=.* must be a multiple of 4, such as"):
        family.latent_shape(*size)


@pytest.mark.parametrize(("steps", "shape"), [(1, SHAPE), (5, SHAPE), (10, (64, 64, 16))])
def test_the_schedule_is_the_pipelines(family, steps, shape):
    schedule = family.schedule(steps, shape)
    sigmas, timesteps = pipeline_schedule(family.pipeline, steps, shape[0] * shape[1])
    assert schedule.sigmas == pytest.approx(sigmas, abs=1e-7)
    assert schedule.timesteps == pytest.approx(timesteps, abs=1e-4)
    assert (schedule.sigmas[0], schedule.sigmas[-1]) == (1.0, 0.0)


def test_larger_images_get_more_noise(family):
    small, large = family.schedule(4, SHAPE), family.schedule(4, (64, 64, 16))
    assert all(a < b for a, b in zip(small.sigmas[1:4], large.sigmas[1:4], strict=True))


def test_encode_is_the_pipelines_own(family):
    got = family.encode(PROMPTS, GUIDANCE)
    embeds, pooled, _ = family.pipeline.encode_prompt(PROMPTS, None, max_sequence_length=LENGTH)
    assert got.keys() == {"prompt_embeds", "pooled_prompt_embeds"}
    assert got["prompt_embeds"].shape == (2, LENGTH, 32)
    assert torch.equal(got["prompt_embeds"], embeds)
    assert torch.equal(got["pooled_prompt_embeds"], pooled)


@pytest.mark.parametrize("variant", ["family", "schnell"])
@torch.no_grad()
def test_velocity_is_the_pipelines(request, variant):
    family = request.getfixturevalue(variant)
    latents, timesteps = noise(), torch.tensor([912.5, 303.0])
    conditioning = family.encode(PROMPTS, GUIDANCE)
    got = family.velocity(family.transformer, latents, timesteps, conditioning, GUIDANCE)
    for row, prompt in enumerate(PROMPTS):
        expected = pipeline_velocity(family.pipeline, latents[row], timesteps[row].item(), prompt, 3.5)
        torch.testing.assert_close(got[row : row + 1], expected, **MEANS)
    assert got.std() > 0.1


@pytest.mark.parametrize(("variant", "reads"), [("family", True), ("schnell", False)])
@torch.no_grad()
def test_only_dev_reads_the_guidance_scale(request, variant, reads):
    family = request.getfixturevalue(variant)
    inputs = (family.transformer, noise(), torch.tensor([912.5, 303.0]), family.encode(PROMPTS, GUIDANCE))
    weak, strong = (family.velocity(*inputs, Guidance(guidance_scale=scale)) for scale in (1.0, 7.0))
    assert ((weak - strong).abs().max() > 1e-3) == reads


@torch.no_grad()
def test_velocity_depends_on_prompt_and_place(family):
    conditioning = family.encode(PROMPTS, GUIDANCE)
    same = noise(batch=1).expand(2, *SHAPE)
    timesteps = torch.full((2,), 500.0)
    got = family.velocity(family.transformer, same, timesteps, conditioning, GUIDANCE)
    assert (got[0] - got[1]).abs().max() > 1e-3
    turned = family.velocity(family.transformer, same.transpose(1, 2), timesteps, conditioning, GUIDANCE)
    assert (turned.transpose(1, 2) - got).abs().max() > 1e-5


@pytest.mark.parametrize("variant", ["family", "schnell"])
def test_the_ode_sampler_is_the_pipelines_own_call(request, variant):
    family = request.getfixturevalue(variant)
    conditioning = family.encode(PROMPTS, GUIDANCE)
    got = sample_ode(
        lambda latents, timesteps: family.velocity(
            family.transformer, latents, timesteps, conditioning, GUIDANCE
        ),
        noise(),
        family.schedule(4, SHAPE),
    )
    expected = family.pipeline(
        PROMPTS,
        guidance_scale=3.5,
        height=HEIGHT,
        width=WIDTH,
        num_inference_steps=4,
        latents=noise().flatten(1, 2),
        max_sequence_length=LENGTH,
        output_type="latent",
    ).images
    torch.testing.assert_close(got.flatten(1, 2), expected, **LATENTS)


@torch.no_grad()
def test_decode_is_the_pipelines_own(family):
    pipe, latents = family.pipeline, noise()
    got = family.decode(latents)
    unpacked = pipe._unpack_latents(latents.flatten(1, 2), HEIGHT, WIDTH, pipe.vae_scale_factor)
    pixels = pipe.vae.decode(unpacked / pipe.vae.config.scaling_factor + pipe.vae.config.shift_factor).sample
    expected = pipe.image_processor.postprocess(pixels, output_type="np")
    assert got.shape == (2, HEIGHT, WIDTH, 3)
    assert got.dtype == torch.uint8
    assert np.abs(got.numpy() - expected * 255).max() <= 0.51
    assert got.float().std() > 5


def test_log_probs_equal_an_independent_loop(path, make_config):
    family, actor, engine, conditioning = connect(make_config(**settings(path)), PROMPTS)
    stir(actor)
    rollout = engine.sample(conditioning, [0, 1], training_step=1, with_means=True)
    scored = actor.log_probs(rollout).log_probs
    torch.testing.assert_close(scored, rollout.log_probs, **LOG_PROBS)
    assert rollout.latents.shape == (4, 4, *SHAPE)

    sigmas, timesteps = pipeline_schedule(family.pipeline, 5, SHAPE[0] * SHAPE[1])
    for sample in range(4):
        for t in range(3):
            index = int(rollout.step_indices[sample, t])
            latents, following = rollout.latents[sample, t], rollout.latents[sample, t + 1]
            velocity = pipeline_velocity(
                family.pipeline, latents, timesteps[index], PROMPTS[sample // 2], 3.5
            )
            expected = flow_grpo_log_prob(
                latents[None], following[None], velocity, sigmas[index], sigmas[index + 1], 0.7
            )
            assert rollout.log_probs[sample, t].item() == pytest.approx(
                expected.item(), abs=LOG_PROBS["atol"]
            )


def test_one_update_and_its_adapter_loads_into_a_pipeline(path, make_config, tmp_path):
    family, actor, engine, conditioning = connect(make_config(**settings(path)), PROMPTS)
    assert len(actor.weights.parameters) == 2 * (
        12 + 3
    )  # (A, B) of a double block's targets and a single block's
    rollout = engine.sample(conditioning, [0, 1], training_step=1, with_means=True)
    assert rollout.images.shape == (4, HEIGHT, WIDTH, 3)
    scores = actor.log_probs(rollout, with_means=True)
    batch = ActorBatch(
        rollout=rollout,
        advantages=torch.tensor([1.0, -1.0, 0.5, -0.5]),
        old_log_probs=scores.log_probs,
        old_means=scores.means,
    )
    metrics = actor.update(batch, actor.config.algorithm.rollout_correction, training_step=1).compute()
    assert actor.weights.version == 1
    assert metrics["actor/grad_norm"] > 0
    stir(actor)
    actor.weights.save(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["pytorch_lora_weights.safetensors"]

    fresh = load_family(ModelConfig(path=path, max_sequence_length=LENGTH))
    fresh.pipeline.load_lora_weights(str(tmp_path))
    inputs = (noise(), torch.tensor([900.0, 300.0]), family.encode(PROMPTS, GUIDANCE), GUIDANCE)
    with torch.no_grad():
        trained = family.velocity(family.transformer, *inputs)
        torch.testing.assert_close(fresh.velocity(fresh.transformer, *inputs), trained, **MEANS)
        fresh.pipeline.unload_lora_weights()
        assert (fresh.velocity(fresh.transformer, *inputs) - trained).abs().max() > 1e-2


@torch.no_grad()
def test_a_bfloat16_transformer_computes_with_the_timesteps_of_its_schedule(path):
    family = load_family(ModelConfig(path=path, dtype="bfloat16", max_sequence_length=LENGTH))
    conditioning = family.encode(PROMPTS[:1], GUIDANCE)
    exact = family.schedule(10, SHAPE)
    rounded = family.in_dtype(exact, torch.bfloat16)
    assert rounded.sigmas == exact.sigmas
    assert rounded.timesteps != exact.timesteps
    assert rounded.timesteps == pytest.approx(exact.timesteps, rel=2**-7)
    assert family.in_dtype(exact, torch.float32).timesteps == pytest.approx(exact.timesteps, rel=1e-7)
    for timesteps in zip(exact.timesteps, rounded.timesteps, strict=True):
        first, second = (
            family.velocity(family.transformer, noise(batch=1), torch.tensor([t]), conditioning, GUIDANCE)
            for t in timesteps
        )
        assert torch.equal(first, second)


def test_bfloat16(path, make_config):
    """Engine and actor call the transformer with the same batches, one step at a time, and so round alike."""
    sections = settings(path, sde_window_range=(1, 4))
    sections["model"]["dtype"] = sections["rollout"]["dtype"] = "bfloat16"
    sections["actor"]["fold_steps"] = False
    _, actor, engine, conditioning = connect(make_config(**sections), PROMPTS)
    assert conditioning["prompt_embeds"].dtype == torch.bfloat16
    rollout = engine.sample(conditioning, [0, 1], training_step=1, with_means=False)
    assert rollout.latents.dtype == torch.float32
    assert torch.equal(actor.log_probs(rollout).log_probs, rollout.log_probs)


def test_free_text_encoders(path):
    family = load_family(ModelConfig(path=path, max_sequence_length=LENGTH))
    family.free_text_encoders()
    assert family.pipeline.text_encoder is None
    assert family.pipeline.text_encoder_2 is None
