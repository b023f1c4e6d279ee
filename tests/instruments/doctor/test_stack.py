"""Captured samples on a model: their latents, their inputs, their adapter."""

from dataclasses import replace

import pytest
import torch

from flowcorr.errors import ConfigError
from flowcorr.instruments.doctor.stack import prompt_pool


def test_each_input_changes_the_velocity(stack_of):
    stack = stack_of()
    latents, rows = stack.tensor("initial_noise"), [0, 1, 2, 3]
    plain = stack.velocity(latents, [0] * 4, rows, stack.captured)
    for changes in (
        {"adapter": False},
        {"guidance_scale": 1.0},
        {"negative_prompt": "dog"},
        {"prompts": ("elk",) * 4},
        {"timesteps": (500.0,) * 5},
    ):
        other = stack.velocity(latents, [0] * 4, rows, replace(stack.captured, **changes))
        assert not torch.allclose(plain, other, rtol=1e-3, atol=1e-4), changes
    again = stack.velocity(latents, [0] * 4, rows, stack.captured)
    torch.testing.assert_close(again, plain)


def test_packed_latents_are_laid_out_as_the_family_has_them(stack_of, captured):
    flat = captured["initial_noise"].flatten(1)
    others = dict.fromkeys(("latents", "next_latents", "final_latents"))
    found = stack_of(initial_noise=flat, **others).tensor("initial_noise")
    torch.testing.assert_close(found, captured["initial_noise"][:4])


def test_an_adapter_of_another_model_is_refused(stack_of):
    odd = {
        "elsewhere.to_q.lora_A.weight": torch.zeros(2, 8),
        "elsewhere.to_q.lora_B.weight": torch.zeros(8, 2),
    }
    with pytest.raises(ConfigError, match="names no linear layer"):
        stack_of(adapter=odd)
    with pytest.raises(
        ConfigError, match="capture peft.get_peft_model_state_dict of a plain LoRA of one rank"
    ):
        stack_of(adapter={"elsewhere.to_q.lora_A.weight": torch.zeros(2, 8)})


def test_all_prompts_are_collected(stack_of):
    samples = stack_of().samples
    assert prompt_pool({0: samples, 1: samples}) == ["cat", "dog", "sun", "bee"]
