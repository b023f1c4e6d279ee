"""A plain sampling loop of a trainer's own, with faults planted in it: diffusers and peft, and nothing of flowcorr."""

import copy
import math
from functools import lru_cache

import peft
import torch
from diffusers import StableDiffusion3Pipeline

import flowcorr
from flowcorr.models import quiet_loaders
from tests.shallow import SHALLOW

PROMPTS = ("cat", "dog", "sun", "bee", "owl", "fox", "ant", "elk")
SIZE, LENGTH, LEVEL, ALPHA = (16, 32), 16, 0.7, 8.0
TARGETS = ["attn.to_q", "attn.to_k", "attn.to_v"]
WINDOWS = {"whole": None, "middle": [1, 3]}
"""Places of the SDE steps; the others of the five are Euler steps."""


@lru_cache
def loaded():
    """The pipeline as it lies on disk, which nothing may change."""
    with quiet_loaders():
        return StableDiffusion3Pipeline.from_pretrained(SHALLOW)


def load(*, trained=True):
    """The pipeline, with an adapter that has learned something, or one that has not."""
    parts = loaded().components
    changed = {name: copy.deepcopy(parts[name]) for name in ("transformer", "scheduler")}
    pipeline = StableDiffusion3Pipeline(**parts | changed)
    pipeline.set_progress_bar_config(disable=True)
    draw = torch.Generator().manual_seed(3)
    pipeline.transformer.add_adapter(
        peft.LoraConfig(r=2, lora_alpha=ALPHA, target_modules=TARGETS, init_lora_weights="gaussian")
    )
    for name, parameter in pipeline.transformer.named_parameters():
        if "lora_" in name:
            scale = 0.3 if "lora_A" in name or trained else 0.0
            parameter.data = scale * torch.randn(parameter.shape, generator=draw)
    return pipeline


class Loop:
    """Training steps that only sample; `fault` names what is wrong with them."""

    def __init__(self, fault=None, *, window="whole", seed=0, trained=True, guidance=3.0, num_steps=5):
        self.fault, self.guidance, self.num_steps = fault, guidance, num_steps
        self.window = list(range(num_steps)) if WINDOWS[window] is None else WINDOWS[window]
        self.pipeline = load(trained=trained)
        self.draw = torch.Generator().manual_seed(seed)
        self.past = None
        scheduler = self.pipeline.scheduler
        if fault == "wrong_shift":
            self.pipeline.scheduler = type(scheduler).from_config(scheduler.config, shift=5.0)
        if fault == "other_schedule":
            self.pipeline.scheduler = type(scheduler).from_config(scheduler.config, use_karras_sigmas=True)

    def normal(self, *shape):
        return torch.randn(*shape, generator=self.draw)

    @torch.no_grad()
    def sample(self):
        """What one step captured: a mapping of the fields of `ReplaySamples`."""
        pipeline, fault, count = self.pipeline, self.fault, len(PROMPTS)
        pipeline.scheduler.set_timesteps(self.num_steps)
        sigmas, timesteps = pipeline.scheduler.sigmas, pipeline.scheduler.timesteps
        embeds, negative, pooled, negative_pooled = pipeline.encode_prompt(
            list(PROMPTS), None, None, max_sequence_length=LENGTH
        )
        if fault == "stale_prompts":
            embeds, pooled = embeds.roll(-1, 0), pooled.roll(-1, 0)
        if fault == "adapter_off":
            pipeline.transformer.disable_adapters()
        shape = (4, SIZE[0] // 4, SIZE[1] // 4)
        initial = self.normal(count, *shape)
        if fault == "noise_reused":
            initial = torch.randn(1, *shape, generator=torch.Generator().manual_seed(9)).expand(count, *shape)
        latents, befores, afters, log_probs = initial, [], [], []
        for index in range(self.num_steps):
            fed = timesteps[index].bfloat16().float() if fault == "rounded_timesteps" else timesteps[index]
            velocity = pipeline.transformer(
                hidden_states=torch.cat([latents, latents]),
                timestep=fed.expand(2 * count),
                encoder_hidden_states=torch.cat([negative, embeds]),
                pooled_projections=torch.cat([negative_pooled, pooled]),
                return_dict=False,
            )[0]
            without, with_prompt = velocity.chunk(2)
            scale = 1.0 if fault == "guidance_off" else self.guidance
            velocity = without + scale * (with_prompt - without)
            table = sigmas.half().float() if fault == "half_sigma" else sigmas
            sigma, following = table[index], table[index + 1]
            step = sigma - following
            if index not in self.window:
                latents = latents - step * velocity
                continue
            level = LEVEL * (sigma / (1 - (following if sigma == 1 else sigma))).sqrt()
            drift = velocity + level**2 / (2 * sigma) * (latents + (1 - sigma) * velocity)
            mean, std = latents - drift * step, level * step.sqrt()
            befores.append(latents)
            latents = mean + std * self.normal(*mean.shape)
            afters.append(latents)
            squares = (latents - mean) ** 2 / (2 * std**2) + std.log() + math.log(2 * math.pi) / 2
            log_probs.append(
                -(squares.flatten(1).sum(1) if fault == "summed" else squares.flatten(1).mean(1))
            )
        pipeline.transformer.enable_adapters()
        images = self.decode(latents)
        if fault == "swapped_images":
            images = images.roll(1, 0)
        if fault == "swapped_with_others":
            images = images.roll(4, 0)
        if fault == "red_and_blue":
            images = images.flip(1)
        images, self.past = (
            (self.past if fault == "images_of_step_before" and self.past is not None else images),
            images,
        )
        return {
            "prompts": PROMPTS,
            "negative_prompt": "",
            "guidance_scale": self.guidance,
            "max_sequence_length": LENGTH,
            "initial_noise": initial,
            "latents": torch.stack(befores, 1),
            "next_latents": torch.stack(afters, 1),
            "log_probs": torch.stack(log_probs, 1),
            "step_indices": self.window,
            "final_latents": latents,
            "images": images,
            "rewards": images.flatten(1).mean(1),
            "sigmas": sigmas,
            "timesteps": timesteps,
            "noise_level": LEVEL,
            "adapter": peft.get_peft_model_state_dict(pipeline.transformer),
            "adapter_alpha": ALPHA,
            "dtype": "float32",
        }

    def decode(self, latents):
        vae = self.pipeline.vae
        if self.fault != "decoder_unscaled":
            latents = latents / vae.config.scaling_factor + (vae.config.shift_factor or 0.0)
        return (vae.decode(latents, return_dict=False)[0] / 2 + 0.5).clamp(0, 1)


def dump_steps(folder, fault=None, *, steps=1, without=(), changes=None, **options):
    """A dump of so many steps; `without` and `changes` alter what is captured."""
    loop = Loop(fault, **options)
    for step in range(steps):
        captured = {name: value for name, value in loop.sample().items() if name not in without}
        rewards = captured.get("rewards", torch.zeros(8))
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        log_probs = captured.get("log_probs", torch.zeros(8, 2))
        flowcorr.dump(
            folder,
            step,
            rollout_log_probs=log_probs,
            old_log_probs=log_probs,
            advantages=advantages + (1.0 if fault == "not_centred" else 0.0),
            replay=flowcorr.ReplaySamples(**captured | (changes or {})),
        )
    return folder
