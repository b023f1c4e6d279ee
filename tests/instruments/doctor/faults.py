"""Faults that are planted in an engine that really has them."""

import copy
from dataclasses import replace

import torch

from flowcorr.instruments.doctor import examine
from flowcorr.instruments.page import exit_code
from tests.planted.mistakes import without_normaliser
from tests.planted.plants import feeding, own_engine, rounded
from tests.prompts import prompts_of

SMALL = {"n": 2}
# Faults stand out of more elements than the images of other tests have.
SHORT = {"height": 32, "width": 64, "num_inference_steps": 3, "sde_window_range": (0, 2)}
GUIDED = {"guidance_scale": 4.0}
WHOLE = {"path": "tiny_ocr"}  # where a fault has to stand out of what all four blocks add


def separate(run):
    """An engine with weights and a pipeline of its own, on which a fault can be planted."""
    return own_engine(run.actor, run.config)


def check(run, engine, *, float32=None):
    """The report on `engine`, which has the weights that the actor has now."""
    engine.sync(run.actor.weights.snapshot())
    return examine(run.actor, engine, run.conditioning, float32=float32)


def assert_named(report, name, **numbers):
    """The fault is named with these numbers, and no other."""
    assert report.causes() == [name]
    assert exit_code(report) == 2
    found = finding_of(report, name)
    assert found.remedy
    assert {key: found.numbers.get(key) for key in numbers} == numbers


def finding_of(report, name):
    return next(finding for finding in report.findings if finding.cause == name)


def another_guidance(**changes):
    def plant(engine):
        engine.plan = replace(engine.plan, guidance=replace(engine.plan.guidance, **changes))

    return plant


def shifted(engine):
    scheduler = engine.family.pipeline.scheduler
    engine.family.pipeline.scheduler = type(scheduler).from_config(scheduler.config, shift=2.0)
    return engine.family.schedule(engine.plan.sampling.num_inference_steps, engine.plan.latent_shape)


def another_checkpoint(tensors, merge):
    """Every matrix moved by half of its size, as a longer training would."""
    draw = torch.Generator().manual_seed(5)
    return {
        name: value + 0.5 * value.std() * torch.randn(value.shape, generator=draw)
        if value.dim() == 2
        else value
        for name, value in merge(tensors).items()
    }


def one_block_missing(tensors, merge):
    state = merge(tensors)
    return {
        name: torch.zeros_like(value) if "blocks.2.ff" in name else value for name, value in state.items()
    }


def no_vae_scaling(engine):
    engine.family.pipeline.vae = copy.deepcopy(engine.family.pipeline.vae)
    engine.family.pipeline.vae.register_to_config(scaling_factor=1.0, shift_factor=0.0)


def vae_scaling_off(factor):
    def plant(engine):
        vae = engine.family.pipeline.vae = copy.deepcopy(engine.family.pipeline.vae)
        vae.register_to_config(scaling_factor=factor * vae.config.scaling_factor)

    return plant


def cut(kept):
    return lambda engine, conditioning: {
        name: rows[:, :kept] if name == "prompt_embeds" else rows for name, rows in conditioning.items()
    }


def blank(kept):
    def change(engine, conditioning):
        embeds = conditioning["prompt_embeds"].clone()
        embeds[:, kept:] = 0
        return {**conditioning, "prompt_embeds": embeds}

    return change


def other_words(engine, conditioning):
    encoded = engine.family.encode(prompts_of(["pear", "lime"]), engine.plan.guidance)
    return {name: encoded[name][-len(rows) :] for name, rows in conditioning.items()}


def shorter(engine, conditioning):
    return {name: rows[:, :-1] if name == "prompt_embeds" else rows for name, rows in conditioning.items()}


def nudged(scale):
    """Next latents that moved after they were scored."""

    def change(rollout):
        noise = torch.randn(rollout.window.latents.shape, generator=torch.Generator().manual_seed(3))
        return rollout.window.next_latents + scale * noise

    return change


def rounded_after_scoring(rollout):
    return rounded(rollout.window.next_latents)


def of_another_sample(rollout):
    return rollout.log_probs.roll(1, 0)


def unscaled(rollout):
    return 2 * rollout.window.stds.square() * without_normaliser(rollout)


def coarse(tensors, merge):
    """Weights off by a hundred-thousandth, a few times what kernels of float32 differ by."""
    draw = torch.Generator().manual_seed(5)
    return {
        name: value * (1 + 1e-5 * torch.randn(value.shape, generator=draw))
        for name, value in merge(tensors).items()
    }


def jitter(scale):
    """An engine whose kernels do not add up in a fixed order."""

    def plant(engine):
        velocity, draw = engine.family.velocity, torch.Generator().manual_seed(0)

        def shaken(*args):
            exact = velocity(*args)
            return exact * (1 + scale * torch.randn(exact.shape, generator=draw))

        engine.family.velocity = shaken

    return plant


def rounded_by_the_model(engine):
    """Nothing but the timesteps is rounded, so that the small model shows it."""
    feeding(rounded)(engine)
    # A fault of an engine that has half of what float32 takes.
    engine.dtype, engine._copy = torch.float32, engine._copy.float()
