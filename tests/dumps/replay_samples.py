"""Samples as a trainer's sampling loop has them, drawn at random."""

import torch

from flowcorr import ReplaySamples

L = (4, 6, 8)


def given(**changes):
    """Six samples of a schedule of four steps, with a window of two; None takes a field away."""
    draw = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=draw)

    fields = {
        "prompts": [f"a cat number {index}" for index in range(6)],
        "initial_noise": normal(6, *L),
        "images": torch.rand(6, 3, 12, 16, generator=draw),
        "negative_prompt": "blurry",
        "guidance_scale": 4.5,
        "sigmas": [1.0, 0.9, 0.7, 0.4, 0.0],
        "timesteps": [1000.0, 900.0, 700.0, 400.0],
        "noise_level": 0.7,
        "latents": normal(6, 2, *L),
        "next_latents": normal(6, 2, *L).half(),
        "log_probs": normal(6, 2),
        "step_indices": [1, 2],
        "sigma_indices": [0, 1, 2, 4, 6],
        "final_latents": normal(6, *L),
        "references": torch.rand(6, 2, 12, 16, 3, generator=draw),
        "rewards": [0.0, 0.1, 0.2, 0.3, 0.4, 0.5],
        "adapter": {"blocks.0.to_q.lora_A.weight": normal(2, 8).bfloat16()},
        "adapter_alpha": 4.0,
        "max_sequence_length": 128,
        "dtype": "bfloat16",
    }
    return {name: value for name, value in (fields | changes).items() if value is not None}


def samples(**changes):
    return ReplaySamples(**given(**changes))
