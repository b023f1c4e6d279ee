"""A plain sampling loop of a trainer's own, with faults planted in it: diffusers and peft, and of flowcorr its step."""

import copy
import math
from functools import lru_cache

import peft
import torch
from diffusers import StableDiffusion3Pipeline

import flowcorr
from flowcorr import sde
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
    """Training steps that only sample; `fault` names what is wrong with them.

    `plant` maps places of the loop, the names that `at` is called with, to functions of the loop and the value there:
    what they return takes its place. Nothing of that is captured, which tells the configured values. `places` in the
    schedule of the noise levels between which the loop steps are the captured `sigma_indices`. The transformer computes
    in `dtype`, under autocast.
    """

    def __init__(
        self,
        fault=None,
        *,
        window="whole",
        seed=0,
        trained=True,
        guidance=3.0,
        num_steps=5,
        negative="",
        plant=None,
        places=None,
        dtype="float32",
    ):
        self.dtype = dtype
        self.fault, self.guidance, self.num_steps = fault, guidance, num_steps
        self.negative, self.plant, self.index = negative, plant or {}, 0
        self.places = places
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

    def at(self, place, value):
        """The value at a place of the loop, or that of the fault which is planted there."""
        return self.plant[place](self, value) if place in self.plant else value

    def embed(self, prompts, negative):
        """Embeddings of the prompts and of the negative prompt: those of the tokens, then the pooled ones."""
        embeds, negatives, pooled, negative_pooled = self.pipeline.encode_prompt(
            list(prompts), None, None, negative_prompt=negative, max_sequence_length=LENGTH
        )
        return {"prompt": (embeds, pooled), "negative": (negatives, negative_pooled)}

    def velocity(self, latents, timestep, text, scale):
        """Under guidance, of the adapter as it is now."""
        embeds, pooled = (torch.cat(pair) for pair in zip(text["negative"], text["prompt"], strict=True))
        with torch.autocast("cpu", torch.bfloat16, enabled=self.dtype == "bfloat16"):
            velocity = self.pipeline.transformer(
                hidden_states=torch.cat([latents, latents]),
                timestep=timestep.expand(2 * len(latents)),
                encoder_hidden_states=embeds,
                pooled_projections=pooled,
                return_dict=False,
            )[0]
        without, with_prompt = velocity.float().chunk(2)
        self.plain = with_prompt
        return without + scale * (with_prompt - without)

    def step(self, latents, velocity, sigma, following, level=LEVEL, kind="sde", sigma_max=None):
        """Mean and std of the next latents."""
        count = len(latents)
        step = sde.transition(
            kind, latents, velocity, sigma.expand(count), following.expand(count), level, sigma_max=sigma_max
        )
        return step.mean, step.std[0]

    def log_prob(self, latents, mean, std):
        """The terms of a log-prob, one an element."""
        return -((latents - mean) ** 2 / (2 * std**2) + std.log() + math.log(2 * math.pi) / 2)

    @torch.no_grad()
    def sample(self):
        """What one step captured: a mapping of the fields of `ReplaySamples`."""
        pipeline, fault, count = self.pipeline, self.fault, len(PROMPTS)
        pipeline.scheduler.set_timesteps(self.num_steps)
        sigmas, timesteps = pipeline.scheduler.sigmas, pipeline.scheduler.timesteps
        if self.places is not None:
            sigmas, timesteps = sigmas[self.places], timesteps[self.places[:-1]]
        table, times = self.at("schedule", (sigmas, timesteps))
        pipeline = self.at("pipeline", pipeline)
        text = self.embed(self.at("prompts", PROMPTS), self.at("negative", self.negative))
        if fault == "stale_prompts":
            text["prompt"] = tuple(rows.roll(-1, 0) for rows in text["prompt"])
        text = self.at("text", text)
        if fault == "adapter_off":
            pipeline.transformer.disable_adapters()
        shape = (4, SIZE[0] // 4, SIZE[1] // 4)
        initial = self.normal(count, *shape)
        if fault == "noise_reused":
            initial = torch.randn(1, *shape, generator=torch.Generator().manual_seed(9)).expand(count, *shape)
        latents, befores, afters, log_probs = self.at("initial", initial), [], [], []
        table = table.half().float() if fault == "half_sigma" else table
        for index in range(len(timesteps)):
            self.index = index
            fed = times[index].bfloat16().float() if fault == "rounded_timesteps" else times[index]
            scale = self.at("scale", 1.0 if fault == "guidance_off" else self.guidance)
            velocity = self.at("velocity", self.velocity(latents, fed, text, scale))
            sigma, following = table[index], table[index + 1]
            if index not in self.window:
                self.latest = latents, velocity, sigma, following
                latents = self.at("outside", latents - (sigma - following) * velocity)
                continue
            mean, std = self.step(latents, velocity, sigma, following, **self.at("step", {}))
            befores.append(latents)
            latents = self.at("next", mean + std * self.at("noise", self.normal(*mean.shape)))
            afters.append(latents)
            scored = self.log_prob(latents, mean, self.at("scored_std", std)).flatten(1)
            log_probs.append(scored.sum(1) if fault == "summed" else self.at("pooled", scored.mean(1)))
            latents = self.at("kept", latents)
        pipeline.transformer.enable_adapters()
        images = self.decode(self.at("final", latents))
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
        images = self.at("images", images)
        return self.at(
            "captured",
            {
                "prompts": PROMPTS,
                "negative_prompt": self.negative,
                "guidance_scale": self.guidance,
                "max_sequence_length": LENGTH,
                "initial_noise": initial,
                "latents": torch.stack(befores, 1),
                "next_latents": torch.stack(afters, 1),
                "log_probs": self.at("log_probs", torch.stack(log_probs, 1)),
                "step_indices": self.window,
                "sigma_indices": self.places,
                "final_latents": latents,
                "images": images,
                "rewards": self.at("rewards", images.flatten(1).mean(1)),
                "sigmas": sigmas,
                "timesteps": timesteps,
                "noise_level": LEVEL,
                "adapter": self.at("adapter", peft.get_peft_model_state_dict(pipeline.transformer)),
                "adapter_alpha": ALPHA,
                "dtype": self.dtype,
            },
        )

    @torch.no_grad()
    def rescore(self, captured):
        """The log-probs `[B, T]` that a trainer recomputes of captured samples, as this loop samples."""
        self.pipeline.scheduler.set_timesteps(self.num_steps)
        sigmas, timesteps = self.at(
            "schedule", (self.pipeline.scheduler.sigmas, self.pipeline.scheduler.timesteps)
        )
        text, found = self.embed(PROMPTS, self.negative), []
        for place, index in enumerate(self.window):
            self.index = index
            before, after = (captured[name][:, place] for name in ("latents", "next_latents"))
            velocity = self.velocity(before, timesteps[index], text, self.guidance)
            sigma, following = sigmas[index], sigmas[index + 1]
            mean, std = self.step(before, velocity, sigma, following, **self.at("step", {}))
            found.append(self.log_prob(after, mean, std).flatten(1).mean(1))
        return torch.stack(found, 1)

    def decode(self, latents):
        vae = self.pipeline.vae
        if self.fault != "decoder_unscaled":
            scale, shift = self.at("vae", (vae.config.scaling_factor, vae.config.shift_factor or 0.0))
            latents = latents / scale + shift
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
