"""A small Flow-GRPO loop around a tiny Stable Diffusion 3, whose parts can be another project's functions.

The engine samples with its own copy of the transformer, and the trainer scores the window's steps with PEFT's adapter.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusion3Pipeline
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor, nn

import flowcorr
from flowcorr import sde

NUM_STEPS, WINDOW, LEVEL, GUIDANCE, SIZE = 5, (1, 2), 0.8, 4.5, 64
PROMPTS, GROUP, TOKENS = ("cat", "dog"), 4, 32
ALPHA, RANK = 8, 4
TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]
Condition = dict[str, Tensor]


def load_adapter(engine: nn.Module, trainer: nn.Module) -> None:
    """Give the engine the trainer's adapter."""
    if not getattr(engine, "peft_config", None):
        engine.add_adapter(trainer.peft_config["default"])
    set_peft_model_state_dict(engine, get_peft_model_state_dict(trainer))


def gaussian(velocity, latents, sigma, sigma_next, level, seeds, given):
    """Flow-GRPO's step: the next latents, and their log-prob."""
    count = len(latents)
    step = sde.transition("sde", latents, velocity, sigma.expand(count), sigma_next.expand(count), level)
    following = (
        step.mean + step.std[:, None, None, None] * noise_of(latents, seeds) if given is None else given
    )
    return following, sde.log_prob(following, step)


def noise_of(like: Tensor, seeds: Sequence[int]) -> Tensor:
    """Standard normal noise, one seed a sample."""
    return torch.stack(
        [torch.randn(like.shape[1:], generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    )


def centred(rewards: Tensor, groups: Tensor) -> Tensor:
    """Rewards less the mean of their group, over the std of all."""
    means = torch.stack([rewards[groups == group].mean() for group in groups])
    return (rewards - means) / (rewards.std() + 1e-4)


def jpeg_sizes(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """A reward without a model: the images' mean red less their mean blue."""
    del prompts
    return (images[..., 0].float() - images[..., 2].float()).mean((1, 2)) / 255


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts that may be another project's.

    Attributes:
        seeds: of the samples of a training step.
        schedule: sigmas and timesteps with which the engine samples, of those of the model's scheduler.
        levels: the noise level of each step of the engine.
        transition: of both sides, with its `sde_type`.
        sync: gives the engine the trainer's weights.
        trained_level: the noise level with which the trainer scores.
        trained_condition: its conditioning, of that of the engine, `[positive; negative]`.
        trained_schedule: its sigmas and timesteps.
        trained_guidance: by step, its guidance; `guidance` that of the engine.
        advantages: of rewards and groups.
        reward: of images `[B, H, W, 3]` and prompts.
        returned: what the engine returns of latents and log-probs.
        decoded: latents as the decoder gets them, of final ones and the VAE's configuration.
        unsynced: rows that a replica of the engine samples which never gets the trainer's weights.
        scheduler: changes of the model's scheduler, on either side.
    """

    seeds: Callable[[int], list[int]] = lambda step: [
        1000 * step + row for row in range(len(PROMPTS) * GROUP)
    ]
    schedule: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = lambda sigmas, timesteps: (
        sigmas,
        timesteps,
    )
    levels: Callable[[Tensor], list[float]] = lambda timesteps: [
        LEVEL if step in WINDOW else 0.0 for step in range(len(timesteps))
    ]
    transition: Callable[..., tuple[Tensor, Tensor]] = gaussian
    sde_type: str = "sde"
    sync: Callable[[nn.Module, nn.Module], None] = load_adapter
    trained_level: float = LEVEL
    trained_condition: Callable[[Condition], Condition] = lambda condition: condition
    trained_schedule: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    guidance: Callable[[float], float] = lambda sigma: GUIDANCE
    trained_guidance: Callable[[float], float] | None = None
    trained_dtype: torch.dtype = torch.float32
    advantages: Callable[[Tensor, Tensor], Tensor] = centred
    reward: Callable[[Tensor, Sequence[str]], Tensor] = jpeg_sizes
    returned: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda values: values
    decoded: Callable[[Tensor, Any], Tensor] = lambda latents, config: (
        latents / config.scaling_factor + config.shift_factor
    )
    unsynced: Sequence[int] = ()
    scheduler: Mapping[str, Any] = field(default_factory=dict)


def changed(model: Path, changes: Mapping[str, Any], folder: Path) -> Path:
    """The model, or a copy of it in a folder whose scheduler has other options."""
    if not changes:
        return model
    shutil.copytree(model, folder)
    path = folder / "scheduler/scheduler_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(changes)))
    return folder


def run(model: Path, folder: Path, parts: Parts, steps: int = 2) -> None:
    """Sample, score, dump and train, `steps` times."""
    torch.manual_seed(0)
    pipeline = StableDiffusion3Pipeline.from_pretrained(model)
    engine = pipeline.transformer.requires_grad_(False)
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS, init_lora_weights=False)
    trainer, replica = get_peft_model(deepcopy(engine), config), deepcopy(engine)
    optimizer = torch.optim.AdamW(
        [weight for weight in trainer.parameters() if weight.requires_grad], lr=1e-3
    )
    prompts = list(PROMPTS) * GROUP
    groups = torch.arange(len(prompts)) % len(PROMPTS)
    condition = _encoded(pipeline, prompts)
    pipeline.scheduler.set_timesteps(NUM_STEPS)
    own = pipeline.scheduler.sigmas, pipeline.scheduler.timesteps
    for step in range(steps):
        with torch.no_grad():
            parts.sync(engine, trainer)
            adapter = get_peft_model_state_dict(trainer)
            adapter = {name: value.clone() for name, value in adapter.items()}
            sampled = _sample(pipeline, (engine, replica), condition, parts, parts.seeds(step), own)
            pixels = sampled.pop("pixels")
            rewards = parts.reward(pixels, prompts)
            sampled = parts.returned(sampled)
            old = _score(trainer, condition, parts, sampled, own)
        advantages = parts.advantages(rewards, groups)
        rows = list(range(len(prompts)))
        shared = {
            "rollout_log_probs": sampled["log_probs"],
            "old_log_probs": old,
            "advantages": advantages,
            "rewards": rewards,
            "group_ids": groups,
            "step_indices": torch.tensor(WINDOW).expand(len(rows), -1),
            "sigmas": sampled["sigmas"][list(WINDOW)],
            "num_elements": sampled["noise"][0].numel(),
            "clip_ratio": 1e-4,
        }
        replay = flowcorr.ReplaySamples(
            prompts=prompts,
            negative_prompt="",
            guidance_scale=GUIDANCE,
            max_sequence_length=TOKENS,
            initial_noise=sampled["noise"],
            latents=sampled["latents"],
            next_latents=sampled["next_latents"],
            final_latents=sampled["final"],
            log_probs=sampled["log_probs"],
            step_indices=list(WINDOW),
            images=pixels,
            rewards=rewards,
            sigmas=sampled["sigmas"],
            timesteps=sampled["timesteps"],
            noise_level=LEVEL,
            sde_type=parts.sde_type,
            adapter=adapter,
            adapter_alpha=ALPHA,
            dtype="float32",
        )
        flowcorr.dump(folder, step, **shared, replay=replay)
        current = _score(trainer, condition, parts, sampled, own)
        ratios = (current - old).exp()
        optimizer.zero_grad()
        torch.maximum(
            -advantages[:, None] * ratios, -advantages[:, None] * ratios.clamp(0.9999, 1.0001)
        ).mean().backward()
        optimizer.step()


def _encoded(pipeline, prompts) -> Condition:
    with torch.no_grad():
        made = pipeline.encode_prompt(
            prompts,
            None,
            None,
            negative_prompt="",
            max_sequence_length=TOKENS,
            do_classifier_free_guidance=True,
        )
    positive, negative, pooled, negative_pooled = made
    return {
        "encoder_hidden_states": torch.cat([positive, negative]),
        "pooled_projections": torch.cat([pooled, negative_pooled]),
    }


def _velocity(model, latents, timestep, condition: Condition, scale: float) -> Tensor:
    count = len(latents)
    halves = [
        model(
            hidden_states=latents,
            timestep=timestep.expand(count).to(latents.dtype),
            return_dict=False,
            **{name: value[half * count :][:count].to(latents.dtype) for name, value in condition.items()},
        )[0]
        for half in (0, 1)
    ]
    return halves[1] + scale * (halves[0] - halves[1])


def _sample(pipeline, engines, condition, parts: Parts, seeds, own) -> dict[str, Any]:
    (engine, replica), (sigmas, timesteps) = engines, parts.schedule(*own)
    like = torch.empty(len(seeds), engine.config.in_channels, *[SIZE // pipeline.vae_scale_factor] * 2)
    noise = noise_of(like, seeds)
    latents, before, after, log_probs = noise, [], [], []
    for place, level in enumerate(parts.levels(timesteps)):
        inputs = latents, timesteps[place], condition, parts.guidance(float(sigmas[place]))
        velocity = _velocity(engine, *inputs)
        if parts.unsynced:
            velocity[list(parts.unsynced)] = _velocity(replica, *inputs)[list(parts.unsynced)]
        sigma, sigma_next = sigmas[place], sigmas[place + 1]
        previous = latents
        if level:
            step_seeds = [7919 * (place + 1) + 31 * seed for seed in seeds]
            latents, log_prob = parts.transition(
                velocity, latents, sigma, sigma_next, level, step_seeds, None
            )
        else:
            latents, log_prob = latents + (sigma_next - sigma) * velocity, torch.zeros(len(latents))
        if place in WINDOW:
            before.append(previous)
            after.append(latents)
            log_probs.append(log_prob)
    decoded = pipeline.vae.decode(parts.decoded(latents, pipeline.vae.config), return_dict=False)[0]
    return {
        "noise": noise,
        "latents": torch.stack(before, 1),
        "next_latents": torch.stack(after, 1),
        "final": latents,
        "log_probs": torch.stack(log_probs, 1),
        "sigmas": sigmas,
        "timesteps": timesteps,
        "pixels": ((decoded / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1),
    }


def _score(trainer, condition, parts: Parts, sampled, own) -> Tensor:
    sigmas, timesteps = sampled["sigmas"], sampled["timesteps"]
    if parts.trained_schedule is not None:
        sigmas, timesteps = parts.trained_schedule(*own)
    guidance, condition = parts.trained_guidance or parts.guidance, parts.trained_condition(condition)
    scores = []
    for column, place in enumerate(WINDOW):
        latents = sampled["latents"][:, column]
        dtype = parts.trained_dtype
        velocity = _velocity(
            trainer,
            latents.to(dtype).float(),
            timesteps[place].to(dtype).float(),
            condition,
            guidance(float(sigmas[place])),
        )
        _, score = parts.transition(
            velocity,
            latents,
            sigmas[place],
            sigmas[place + 1],
            parts.trained_level,
            [],
            sampled["next_latents"][:, column],
        )
        scores.append(score)
    return torch.stack(scores, 1)
