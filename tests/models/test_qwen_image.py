"""Qwen-Image on a tiny-random pipeline of its own classes, against loops written with diffusers' pieces."""

import numpy as np
import pytest
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage
from tiny_pipelines import QWEN_SIZE, build_tiny_qwen_image, connect, flow_grpo_log_prob, stir

from flowcorr.config import ModelConfig
from flowcorr.errors import ConfigError
from flowcorr.models import Guidance, load_family
from flowcorr.models.prompt_cache import PromptCache
from flowcorr.models.qwen_image import guided_at_equal_norm
from flowcorr.records import ActorBatch
from flowcorr.rollout import sample_ode
from tests.tolerances import LATENTS, LOG_PROBS, MEANS

HEIGHT, WIDTH = QWEN_SIZE
SHAPE = (4, 6, 16)
LENGTH = 24
PROMPTS = ["cat", "two dogs"]
GUIDED = Guidance(true_cfg_scale=3.0, negative_prompt="bad")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(build_tiny_qwen_image(tmp_path_factory.mktemp("qwen_image")))


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
            "true_cfg_scale": 3.0,
            "negative_prompt": "bad",
            **sampling,
        },
        "rollout": {"prompts_per_step": 2, "n": 2},
        "actor": {"mini_batches": 1, "lr": 1e-3},
    }


def noise(seed=0, batch=2):
    return torch.randn(batch, *SHAPE, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def pipeline_velocity(pipe, latents, timestep, prompt, guidance):
    """One prompt, alone and without padding, the two halves of guidance one after the other, as in the pipeline."""

    def predict(text):
        embeds, mask = pipe.encode_prompt([text], max_sequence_length=LENGTH)
        return pipe.transformer(
            hidden_states=latents.reshape(1, -1, SHAPE[-1]),
            timestep=torch.tensor([timestep]) / 1000,
            encoder_hidden_states=embeds,
            encoder_hidden_states_mask=mask,
            img_shapes=[[(1, *SHAPE[:2])]],
            return_dict=False,
        )[0]

    positive = predict(prompt)
    if guidance.true_cfg_scale > 1:
        negative = predict(guidance.negative_prompt)
        combined = negative + guidance.true_cfg_scale * (positive - negative)
        positive = combined * (
            torch.norm(positive, dim=-1, keepdim=True) / torch.norm(combined, dim=-1, keepdim=True)
        )
    return positive.reshape(1, *SHAPE)


def pipeline_schedule(pipe, steps, tokens):
    """Sigmas and timesteps with the calls that `QwenImagePipeline.__call__` makes."""
    config = pipe.scheduler.config
    mu = pipeline_qwenimage.calculate_shift(
        tokens, config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift
    )
    timesteps, _ = pipeline_qwenimage.retrieve_timesteps(
        pipe.scheduler, steps, "cpu", sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu
    )
    return pipe.scheduler.sigmas.tolist(), timesteps.tolist()


def test_latent_shape(family):
    assert family.name == "qwen_image"
    assert family.latent_shape(HEIGHT, WIDTH) == SHAPE
    assert family.latent_shape(None, None) == (64, 64, 16)  # default_sample_size 128, patches of 2


@pytest.mark.parametrize(("key", "size"), [("height", (36, 48)), ("width", (32, 44))])
def test_a_size_between_patches_is_an_error(family, key, size):
    with pytest.raises(ConfigError, match=rf"sampling\.{key}=.* must be a multiple of 8, such as"):
        family.latent_shape(*size)


@pytest.mark.parametrize(("steps", "shape"), [(2, SHAPE), (5, SHAPE), (10, (64, 64, 16))])
def test_the_schedule_is_the_pipelines(family, steps, shape):
    schedule = family.schedule(steps, shape)
    sigmas, timesteps = pipeline_schedule(family.pipeline, steps, shape[0] * shape[1])
    assert schedule.sigmas == pytest.approx(sigmas, abs=1e-7)
    assert schedule.timesteps == pytest.approx(timesteps, abs=1e-4)
    assert (schedule.sigmas[0], schedule.sigmas[-1]) == (1.0, 0.0)


def test_prompts_of_any_length_become_rows_of_one_shape(family):
    got = family.encode(PROMPTS, GUIDED)
    assert set(got) == {
        "prompt_embeds", "prompt_embeds_mask", "negative_prompt_embeds", "negative_prompt_embeds_mask"
    }  # fmt: skip
    for prefix, texts in (("prompt", PROMPTS), ("negative_prompt", ["bad", "bad"])):
        embeds, mask = got[f"{prefix}_embeds"], got[f"{prefix}_embeds_mask"]
        assert embeds.shape == (2, LENGTH, 32)
        assert mask.dtype == torch.bool
        for row, text in enumerate(texts):
            alone, _ = family.pipeline.encode_prompt([text], max_sequence_length=LENGTH)
            count = alone.shape[1]
            assert mask[row].tolist() == [True] * count + [False] * (LENGTH - count)
            torch.testing.assert_close(embeds[row, :count], alone[0])
            assert (embeds[row, count:] == 0).all()
    assert got["prompt_embeds_mask"][0].sum() < got["prompt_embeds_mask"][1].sum()
    assert set(family.encode(PROMPTS, Guidance(guidance_scale=4.0))) == {
        "prompt_embeds",
        "prompt_embeds_mask",
    }


def test_a_long_prompt_is_cut_and_said_so(family, caplog):
    family.encode(PROMPTS, Guidance())
    assert not caplog.records
    got = family.encode(["cat", "x" * 100], Guidance())
    assert got["prompt_embeds"].shape == (2, LENGTH, 32)
    assert got["prompt_embeds_mask"][1].all()
    assert "longer than model.max_sequence_length=24 tokens" in caplog.text


def test_prompts_can_be_cached(path):
    family = load_family(ModelConfig(path=path, max_sequence_length=LENGTH))
    direct = family.encode(PROMPTS, GUIDED)
    cached = PromptCache(family, GUIDED, PROMPTS)(PROMPTS[::-1])
    for name, rows in cached.items():
        assert torch.equal(rows, direct[name].flip(0)), name
    assert family.pipeline.text_encoder is None


@pytest.mark.parametrize("guidance", [Guidance(), GUIDED])
@torch.no_grad()
def test_velocity_is_the_pipelines_in_one_forward(family, guidance):
    latents, timesteps = noise(), torch.tensor([912.5, 303.0])
    calls = []
    conditioning = family.encode(PROMPTS, guidance)
    hook = family.transformer.register_forward_hook(lambda *_: calls.append(1))
    got = family.velocity(family.transformer, latents, timesteps, conditioning, guidance)
    hook.remove()
    assert len(calls) == 1
    for row, prompt in enumerate(PROMPTS):
        expected = pipeline_velocity(family.pipeline, latents[row], timesteps[row].item(), prompt, guidance)
        torch.testing.assert_close(got[row : row + 1], expected, **MEANS)
    assert got.std() > 0.1


@torch.no_grad()
def test_velocity_depends_on_the_prompt(family):
    conditioning = family.encode(PROMPTS, Guidance())
    same = noise(batch=1).expand(2, *SHAPE)
    got = family.velocity(family.transformer, same, torch.full((2,), 500.0), conditioning, Guidance())
    assert (got[0] - got[1]).abs().max() > 1e-3


def test_guidance_keeps_the_norm_of_every_token():
    positive, negative = noise(1).flatten(1, 2), noise(2).flatten(1, 2)
    guided = guided_at_equal_norm(torch.cat([negative, positive]), 3.0)
    torch.testing.assert_close(guided.norm(dim=-1), positive.norm(dim=-1))
    direction = negative + 3.0 * (positive - negative)
    torch.testing.assert_close(torch.cosine_similarity(guided, direction, dim=-1), torch.ones(2, 24))


@pytest.mark.parametrize("guidance", [Guidance(), GUIDED])
def test_the_ode_sampler_is_the_pipelines_own_call(family, guidance):
    conditioning = family.encode(PROMPTS, guidance)
    got = sample_ode(
        lambda latents, timesteps: family.velocity(
            family.transformer, latents, timesteps, conditioning, guidance
        ),
        noise(),
        family.schedule(4, SHAPE),
    )
    expected = family.pipeline(
        PROMPTS,
        negative_prompt=["bad", "bad"] if guidance.true_cfg_scale > 1 else None,
        true_cfg_scale=guidance.true_cfg_scale,
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
    mean, std = (
        torch.tensor(values).view(1, 4, 1, 1, 1)
        for values in (pipe.vae.config.latents_mean, pipe.vae.config.latents_std)
    )
    pixels = pipe.vae.decode(unpacked / (1 / std) + mean, return_dict=False)[0][:, :, 0]
    expected = pipe.image_processor.postprocess(pixels, output_type="np")
    assert got.shape == (2, HEIGHT, WIDTH, 3)
    assert got.dtype == torch.uint8
    assert np.abs(got.numpy() - expected * 255).max() <= 0.51
    assert got.float().std() > 5


@pytest.mark.parametrize("true_cfg_scale", [1.0, 3.0])
def test_log_probs_equal_an_independent_loop(path, make_config, true_cfg_scale):
    config = make_config(**settings(path, true_cfg_scale=true_cfg_scale))
    family, actor, engine, conditioning = connect(config, PROMPTS)
    stir(actor)
    rollout = engine.sample(conditioning, [0, 1], training_step=1, with_means=True)
    scored = actor.log_probs(rollout).log_probs
    torch.testing.assert_close(scored, rollout.log_probs, **LOG_PROBS)
    assert rollout.latents.shape == (4, 4, *SHAPE)

    sigmas, timesteps = pipeline_schedule(family.pipeline, 5, SHAPE[0] * SHAPE[1])
    guidance = Guidance(true_cfg_scale=true_cfg_scale, negative_prompt="bad")
    for sample in range(4):
        for t in range(3):
            index = int(rollout.step_indices[sample, t])
            latents, following = rollout.latents[sample, t], rollout.latents[sample, t + 1]
            velocity = pipeline_velocity(
                family.pipeline, latents, timesteps[index], PROMPTS[sample // 2], guidance
            )
            expected = flow_grpo_log_prob(
                latents[None], following[None], velocity, sigmas[index], sigmas[index + 1], 0.7
            )
            assert rollout.log_probs[sample, t].item() == pytest.approx(
                expected.item(), abs=LOG_PROBS["atol"]
            )


def test_one_update_and_its_adapter_loads_into_a_pipeline(path, make_config, tmp_path):
    config = make_config(**settings(path))
    family, actor, engine, conditioning = connect(config, PROMPTS)
    assert len(actor.weights.parameters) == 2 * 2 * 12  # blocks x (A, B) x targets
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
    inputs = (noise(), torch.tensor([900.0, 300.0]), family.encode(PROMPTS, GUIDED), GUIDED)
    with torch.no_grad():
        trained = family.velocity(family.transformer, *inputs)
        torch.testing.assert_close(fresh.velocity(fresh.transformer, *inputs), trained, **MEANS)
        fresh.pipeline.unload_lora_weights()
        assert (fresh.velocity(fresh.transformer, *inputs) - trained).abs().max() > 1e-2


@torch.no_grad()
def test_a_bfloat16_transformer_computes_with_the_timesteps_of_its_schedule(path):
    family = load_family(ModelConfig(path=path, dtype="bfloat16", max_sequence_length=LENGTH))
    conditioning = family.encode(PROMPTS[:1], GUIDED)
    exact = family.schedule(10, SHAPE)
    rounded = family.in_dtype(exact, torch.bfloat16)
    assert rounded.sigmas == exact.sigmas
    assert rounded.timesteps != exact.timesteps
    assert rounded.timesteps == pytest.approx(exact.timesteps, rel=2**-7)
    assert family.in_dtype(exact, torch.float32).timesteps == pytest.approx(exact.timesteps, rel=1e-7)
    for timesteps in zip(exact.timesteps, rounded.timesteps, strict=True):
        first, second = (
            family.velocity(family.transformer, noise(batch=1), torch.tensor([t]), conditioning, GUIDED)
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
