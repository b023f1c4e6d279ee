"""Qwen-Image-Edit and its pipeline for several images, on tiny pipelines of their own classes."""

import pytest
import torch
from tiny_pipelines import FAMILIES, QWEN_EDIT_SIZE, connect

from flowcorr.models import Guidance
from flowcorr.models.prompt_cache import PromptCache
from flowcorr.rollout import sample_ode
from flowcorr.trainer.setup import load_model
from tests.models.learning import (
    assert_an_adapter_is_learned_and_loads,
    assert_both_stacks_round_alike,
    assert_log_probs_are_those_of_a_loop,
    in_bfloat16,
)
from tests.models.packed import QWEN
from tests.prompts import prompts_of
from tests.tolerances import LATENTS

pytest.importorskip("torchvision")  # which the pipelines' processor needs

HEIGHT, WIDTH = QWEN_EDIT_SIZE
SHAPE = (2, 3, 16)
GUIDANCE = Guidance(true_cfg_scale=3.0, negative_prompt="bad")


@pytest.fixture(scope="module", params=["qwen_image_edit", "qwen_image_edit_plus"])
def name(request):
    return request.param


@pytest.fixture(scope="module")
def path(name, tmp_path_factory):
    return str(FAMILIES[name].build(tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="module")
def prompts(name):
    return prompts_of(["cat", "two dogs"], images=FAMILIES[name].images)


@pytest.fixture(scope="module")
def family(path, module_config):
    return load_model(module_config(**settings(path)))


@pytest.fixture(scope="module")
def module_config():
    from flowcorr.config import ModelConfig
    from flowcorr.config.schema import Config, SamplingConfig

    def make(model, sampling, **_):
        return Config(model=ModelConfig(**model), sampling=SamplingConfig(**sampling))

    return make


def settings(path, **sampling):
    steps = {"num_inference_steps": 5, "sde_window_size": 3, "sde_window_range": (0, 4)}
    scale = {"true_cfg_scale": GUIDANCE.true_cfg_scale, "negative_prompt": GUIDANCE.negative_prompt}
    return {
        "model": {"path": path, "max_sequence_length": 96},
        "sampling": {"height": HEIGHT, "width": WIDTH, **steps, **scale, **sampling},
        "rollout": {"prompts_per_step": 2, "n": 2},
        "actor": {"mini_batches": 1, "lr": 1e-3},
    }


def noise(batch=2):
    return torch.randn(batch, *SHAPE, generator=torch.Generator().manual_seed(0))


def as_given(family, prompt):
    """The prompt's images for the pipeline, of the proportions that are drawn."""
    images = family.fitted_references(prompt)
    return images if len(images) > 1 else images[0]


def test_what_encoder_and_transformer_see(name, family, prompts):
    conditioning = family.encode(prompts, GUIDANCE)
    count = FAMILIES[name].images
    assert family.latent_shape(HEIGHT, WIDTH) == SHAPE
    assert conditioning["references"].shape == (2, count, 26, 39, 16)  # 832 x 1248 pixels
    assert not torch.equal(*conditioning["negative_prompt_embeds"])  # of one text, beside other images
    lengths = conditioning["prompt_embeds_mask"].sum(1)
    assert (lengths > count * {"qwen_image_edit": 1300, "qwen_image_edit_plus": 180}[name]).all()


@torch.no_grad()
@pytest.mark.parametrize("guidance", [Guidance(), GUIDANCE], ids=["plain", "guided"])
def test_the_ode_sampler_is_the_pipelines_own_call(family, prompts, guidance):
    conditioning = family.encode(prompts, guidance)
    got = sample_ode(
        lambda latents, timesteps: family.velocity(
            family.transformer, latents, timesteps, conditioning, guidance
        ),
        noise(),
        family.schedule(2, SHAPE),
    )
    for row, prompt in enumerate(prompts):
        expected = family.pipeline(
            image=as_given(family, prompt),
            prompt=prompt.text,
            negative_prompt=guidance.negative_prompt if guidance.true_cfg_scale > 1 else None,
            true_cfg_scale=guidance.true_cfg_scale,
            height=HEIGHT,
            width=WIDTH,
            num_inference_steps=2,
            latents=noise()[row : row + 1].flatten(1, 2),
            output_type="latent",
        ).images
        torch.testing.assert_close(got[row : row + 1].flatten(1, 2), expected, **LATENTS)


def test_log_probs_equal_an_independent_loop(path, prompts, make_config):
    """With the pipeline's pieces, the two halves of guidance one after the other."""
    connected = connect(make_config(**settings(path)), prompts)
    encoded = {}

    @torch.no_grad()
    def velocity(pipe, latents, timestep, prompt):
        if prompt.key not in encoded:
            images = connected[0].fitted_references(prompt)
            seen = [connected[0].seen_by_encoder(image) for image in images]
            pixels = [pipe.image_processor.preprocess(image).unsqueeze(2) for image in images]
            _, references = pipe.prepare_latents(
                pixels if len(pixels) > 1 else pixels[0], 1, 4, HEIGHT, WIDTH, torch.float32, "cpu", None
            )
            texts = [
                pipe.encode_prompt([text], image=seen)[0] for text in (prompt.text, GUIDANCE.negative_prompt)
            ]
            encoded[prompt.key] = references, texts
        references, texts = encoded[prompt.key]
        packed = latents.reshape(1, -1, SHAPE[-1])
        own, negative = (
            pipe.transformer(
                hidden_states=torch.cat([packed, references], dim=1),
                timestep=torch.tensor([timestep]) / 1000,
                encoder_hidden_states=text,
                encoder_hidden_states_mask=None,
                img_shapes=[[(1, *SHAPE[:2]), *[(1, 26, 39)] * len(prompt.images)]],
                return_dict=False,
            )[0][:, : packed.shape[1]]
            for text in texts
        )
        mixed = negative + GUIDANCE.true_cfg_scale * (own - negative)
        mixed = mixed * (own.norm(dim=-1, keepdim=True) / mixed.norm(dim=-1, keepdim=True))
        return mixed.reshape(1, *SHAPE)

    schedule = QWEN.schedule(connected[0].pipeline, 5, SHAPE[0] * SHAPE[1])
    assert_log_probs_are_those_of_a_loop(connected, prompts, schedule, velocity)


def test_one_update_and_its_adapter_loads_into_a_pipeline(
    path, prompts, family, make_config, module_config, tmp_path
):
    connected = connect(make_config(**settings(path)), prompts)
    inputs = (noise(), torch.tensor([900.0, 300.0]), family.encode(prompts, GUIDANCE), GUIDANCE)
    fresh = load_model(module_config(**settings(path)))
    assert_an_adapter_is_learned_and_loads(connected, fresh, inputs, tmp_path, QWEN_EDIT_SIZE)


def test_bfloat16(path, prompts, make_config):
    sections = in_bfloat16(settings(path, sde_window_range=(1, 4)))
    assert_both_stacks_round_alike(connect(make_config(**sections), prompts))


def test_the_cache_keeps_each_prompts_own_negative(path, prompts, module_config, monkeypatch):
    monkeypatch.setattr("flowcorr.models.prompt_cache.CHUNK", 1)
    family = load_model(module_config(**settings(path)))
    expected = family.encode(prompts, GUIDANCE)
    found = PromptCache(family, GUIDANCE, prompts)(prompts)
    assert found.keys() == expected.keys()
    for key, values in found.items():
        length = values.shape[1]
        torch.testing.assert_close(values, expected[key][:, :length], rtol=0, atol=1e-5)
        assert key == "references" or not expected[key][:, length:].any()
