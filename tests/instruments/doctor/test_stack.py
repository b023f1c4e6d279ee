"""Captured samples on a model: their latents, their inputs, their adapter."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_pipelines import FAMILIES

from flowcorr import ReplaySamples
from flowcorr.config import ModelConfig
from flowcorr.errors import ConfigError
from flowcorr.instruments.doctor.stack import Stack, prompt_pool
from flowcorr.lora import adapter_state
from flowcorr.models import Guidance, load_family
from flowcorr.rewards.references import references_of
from tests.prompts import prompts_of


def test_each_input_changes_the_velocity(stack_of):
    stack = stack_of()
    latents, rows = stack.tensor("initial_noise"), [0, 1, 2, 3]
    plain = stack.velocity(latents, [0] * 4, rows, stack.captured)
    for changes in (
        {"adapter": 0.0},
        {"adapter": 2.0},
        {"swapped": True},
        {"negative_zeros": True},
        {"guidance_scale": 1.0},
        {"negative_prompts": ("dog",) * 4},
        {"prompts": ("elk",) * 4},
        {"timesteps": (500.0,) * 5},
    ):
        other = stack.velocity(latents, [0] * 4, rows, replace(stack.captured, **changes))
        assert not torch.allclose(plain, other, rtol=1e-3, atol=1e-4), changes
    again = stack.velocity(latents, [0] * 4, rows, stack.captured)
    torch.testing.assert_close(again, plain)


def test_each_sample_has_its_own_negative_prompt(stack_of):
    own, shared = stack_of(negative_prompt=["dog", "", "sun", "dog"] * 2), stack_of(negative_prompt="dog")
    latents, rows = own.tensor("initial_noise"), [0, 1, 2, 3]
    mixed, dog = (one.velocity(latents, [0] * 4, rows, one.captured) for one in (own, shared))
    same = [torch.allclose(left, right, rtol=1e-3, atol=1e-4) for left, right in zip(mixed, dog, strict=True)]
    assert same == [True, False, False, True]


def test_packed_latents_are_laid_out_as_the_family_has_them(stack_of, captured):
    flat = captured["initial_noise"].flatten(1)
    others = dict.fromkeys(("latents", "next_latents", "final_latents"))
    found = stack_of(initial_noise=flat, **others).tensor("initial_noise")
    torch.testing.assert_close(found, captured["initial_noise"][:4])


def test_a_captured_adapter_may_have_the_names_of_wrappers(stack_of, captured):
    plain = adapter_state(stack_of().family.transformer)
    wrapped = {
        f"module.base_model.model._orig_mod.{name.replace('.weight', '.default.weight')}": value
        for name, value in captured["adapter"].items()
    }
    found = adapter_state(stack_of(adapter=wrapped).family.transformer)
    assert found.keys() == plain.keys()
    assert all(torch.equal(found[name], plain[name]) for name in plain)


DOWN, UP = "elsewhere.to_q.lora_A.weight", "elsewhere.to_q.lora_B.weight"


@pytest.mark.parametrize(
    ("adapter", "named"),
    [
        ({DOWN: torch.zeros(2, 8), UP: torch.zeros(8, 2)}, r"model\.lora\.targets: 'elsewhere\.to_q' "),
        ({DOWN: torch.zeros(2, 8)}, r"1 of them lora_A\.weight, .* \[2\]; .*get_peft_model_state_dict"),
    ],
)
def test_an_adapter_of_another_model_is_refused(stack_of, adapter, named):
    with pytest.raises(ConfigError, match=named):
        stack_of(adapter=adapter)


def test_all_prompts_are_collected_from_the_nearest_step_on(stack_of):
    samples = stack_of().samples
    others = replace(samples, prompts=("owl", "cat", "fox", "ant"))
    assert prompt_pool({0: others, 7: samples}, 7) == ["cat", "dog", "sun", "bee", "owl", "fox", "ant"]
    assert prompt_pool({0: others, 7: samples}, 1) == ["owl", "cat", "fox", "ant", "dog", "sun", "bee"]


@torch.no_grad()
def test_captured_references_are_those_of_the_velocity(tmp_path):
    tiny = FAMILIES["flux_kontext"]
    model = ModelConfig(path=str(tiny.build(tmp_path)), max_sequence_length=12)
    family = load_family(model, reference_size=tiny.size)
    guidance, prompts = Guidance(guidance_scale=2.5), prompts_of(["make it red", "add a cat"], images=1)
    noise = torch.randn(2, *family.latent_shape(*tiny.size), generator=torch.Generator().manual_seed(0))
    expected = family.velocity(
        family.transformer, noise, torch.tensor([1000.0] * 2), family.encode(prompts, guidance), guidance
    )
    references = np.stack([np.array(own) for own in references_of(prompts, *tiny.size)])
    samples = ReplaySamples(
        prompts=[prompt.text for prompt in prompts],
        initial_noise=noise,
        images=np.zeros((2, *tiny.size, 3), dtype=np.uint8),
        guidance_scale=2.5,
        timesteps=[1000.0, 500.0],
        references=references,
        max_sequence_length=12,
    )
    stack = Stack(load_family(model), samples)
    torch.testing.assert_close(
        stack.velocity(noise, [0, 0], [0, 1], stack.captured), expected, rtol=1e-4, atol=1e-5
    )
    swapped = replace(stack.captured, prompts=stack.captured.prompts[::-1])
    turned = family.velocity(
        family.transformer,
        noise,
        torch.tensor([1000.0] * 2),
        family.encode(prompts[::-1], guidance),
        guidance,
    )
    torch.testing.assert_close(stack.velocity(noise, [0, 0], [0, 1], swapped), turned, rtol=1e-4, atol=1e-5)


def test_too_many_captured_references_are_refused(stack_of):
    with pytest.raises(ConfigError, match="'cat' has 1 .* sd3 takes 0;"):
        stack_of(references=np.zeros((8, 1, 32, 32, 3), dtype=np.uint8))
