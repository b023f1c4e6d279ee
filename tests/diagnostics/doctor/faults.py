"""Faults that are planted in an engine that really has them."""

import copy
from dataclasses import replace

import torch

from flowcorr.diagnostics import examine
from flowcorr.models import Schedule
from flowcorr.rollout import InProcessEngine
from tests.rollouts import WINDOW

SMALL = {"n": 2}
# Faults stand out of more elements than the images of other tests have.
SHORT = {"height": 32, "width": 64, "num_inference_steps": 3, "sde_window_range": (0, 2)}
GUIDED = {"guidance_scale": 4.0}
WHOLE = {"path": "tiny_ocr"}  # where a fault has to stand out of what all four blocks add


def separate(run):
    """An engine with weights and a pipeline of its own, on which a fault can be planted."""
    family = copy.copy(run.family)
    family.pipeline = copy.copy(run.family.pipeline)
    own = run.family.transformer
    base = type(own).from_config(own.config).eval().requires_grad_(False)
    engine = InProcessEngine(
        family, run.config.rollout, run.config.sampling, seed=run.config.trainer.seed,
        merge=run.actor.weights.merged, base=base,
    )  # fmt: skip
    if engine.shared:
        engine._copy = base  # no configuration keeps a copy that is neither rounded nor older
    return engine


def check(run, engine, *, float32=None):
    """The report on `engine`, which has the weights that the actor has now."""
    engine.sync(run.actor.weights.snapshot())
    return examine(run.actor, engine, run.conditioning, float32=float32)


def assert_named(report, name, message=""):
    """The fault is named, and no other."""
    assert report.failed() == [name]
    assert report.exit_code == 2
    assert message in finding_of(report, name).message
    assert finding_of(report, name).remedy


def statuses(report, status):
    return [finding.check for finding in report.findings if finding.status == status]


def finding_of(report, name):
    return next(finding for finding in report.findings if finding.check == name)


def returning(**changes):
    """A fault in what is returned: fields of the `Rollout` or its window, each computed from the true one."""

    def plant(engine):
        sample = engine.sample

        def altered(*args, **kwargs):
            rollout = sample(*args, **kwargs)
            values = {name: change(rollout) for name, change in changes.items()}
            window = {name: values.pop(name) for name in WINDOW & values.keys()}
            return replace(rollout, window=replace(rollout.window, **window), **values)

        engine.sample = altered

    return plant


def another_schedule(make):
    """A fault in the schedule, made from the engine's own."""

    def plant(engine):
        engine.plan = replace(engine.plan, schedule=make(engine))

    return plant


def another_sampling(**changes):
    def plant(engine):
        engine.plan = replace(engine.plan, sampling=replace(engine.plan.sampling, **changes))

    return plant


def another_guidance(**changes):
    def plant(engine):
        engine.plan = replace(engine.plan, guidance=replace(engine.plan.guidance, **changes))

    return plant


def feeding(change):
    """A fault that the trajectory does not tell of: the model is fed other timesteps than are returned."""

    def plant(engine):
        velocity = engine.family.velocity
        engine.family.velocity = lambda transformer, latents, timesteps, *rest: velocity(
            transformer, latents, change(timesteps), *rest
        )

    return plant


def conditioned(change, *, told):
    """The engine samples with another conditioning, which it returns if `told`."""

    def plant(engine):
        sample = engine.sample

        def altered(conditioning, groups, **kwargs):
            rollout = sample(change(engine, conditioning), groups, **kwargs)
            return rollout if told else replace(rollout, conditioning=conditioning)

        engine.sample = altered

    return plant


def merging(change):
    """A fault in the weights: `change(tensors, merge)` gives the state that is loaded."""

    def plant(engine):
        merge = engine.merge
        engine.merge = lambda tensors: iter(change(tensors, lambda given: dict(merge(given))).items())

    return plant


def rounded(tensor):
    return tensor.to(torch.bfloat16).float()


def shifted(engine):
    scheduler = engine.family.pipeline.scheduler
    engine.family.pipeline.scheduler = type(scheduler).from_config(scheduler.config, shift=2.0)
    return engine.family.schedule(engine.plan.sampling.num_inference_steps, engine.plan.latent_shape)


def with_timesteps(change):
    return lambda engine: Schedule(
        sigmas=engine.plan.schedule.sigmas,
        timesteps=tuple(change(torch.tensor(engine.plan.schedule.timesteps)).tolist()),
    )


def scale_up(factor):
    """The adapter's effect times `factor`."""
    return lambda tensors, merge: merge(
        {name: factor * value if "lora_B" in name else value for name, value in tensors.items()}
    )


def without_layers(kept):
    return lambda tensors, merge: merge(
        {
            name: value if "lora_B" not in name or kept(name) else torch.zeros_like(value)
            for name, value in tensors.items()
        }
    )


def another_checkpoint(tensors, merge):
    """Every matrix moved by half of its size, as a longer training would."""
    draw = torch.Generator().manual_seed(5)
    return {
        name: value + 0.5 * value.std() * torch.randn(value.shape, generator=draw)
        if value.dim() == 2
        else value
        for name, value in merge(tensors).items()
    }


def head_missing(tensors, merge):
    """The first attention head of the first block gives 0."""
    state = merge(tensors)
    name = "transformer_blocks.0.attn.to_out.0.weight"
    state[name] = state[name].clone()
    state[name][:, : state[name].shape[1] // 4] = 0
    return state


def one_block_missing(tensors, merge):
    state = merge(tensors)
    return {
        name: torch.zeros_like(value) if "blocks.2.ff" in name else value for name, value in state.items()
    }


def one_sync_behind(engine):
    sync, waiting = engine.sync, []

    def late(weights):
        waiting.append(weights)
        sync(waiting[-2] if len(waiting) > 1 else weights)

    engine.sync = late


def deaf_after_the_first_sync(engine):
    sync, heard = engine.sync, []

    def once(weights):
        if not heard:
            heard.append(weights)
            sync(weights)

    engine.sync = once


def forgets_the_seed(engine):
    sample = engine.sample

    def elsewhere(*args, **kwargs):
        engine.seed += 1
        return sample(*args, **kwargs)

    engine.sample = elsewhere


def seeds_by_place(engine):
    sample = engine.sample
    engine.sample = lambda conditioning, groups, **kwargs: sample(conditioning, range(len(groups)), **kwargs)


def another_vae(engine):
    vae = copy.deepcopy(engine.family.pipeline.vae)
    draw = torch.Generator().manual_seed(5)
    for parameter in vae.decoder.parameters():
        parameter.data += 0.5 * parameter.std(correction=0) * torch.randn(parameter.shape, generator=draw)
    engine.family.pipeline.vae = vae


def no_vae_scaling(engine):
    engine.family.pipeline.vae = copy.deepcopy(engine.family.pipeline.vae)
    engine.family.pipeline.vae.register_to_config(scaling_factor=1.0, shift_factor=0.0)


def vae_scaling_off(factor):
    def plant(engine):
        vae = engine.family.pipeline.vae = copy.deepcopy(engine.family.pipeline.vae)
        vae.register_to_config(scaling_factor=factor * vae.config.scaling_factor)

    return plant


def rescaled_guidance(amount):
    """diffusers' `guidance_rescale`."""

    def plant(engine):
        velocity = engine.family.velocity

        def changed(transformer, latents, timesteps, conditioning, guidance):
            guided = velocity(transformer, latents, timesteps, conditioning, guidance)
            prompt = {name: rows for name, rows in conditioning.items() if not name.startswith("negative_")}
            plain = velocity(transformer, latents, timesteps, prompt, replace(guidance, guidance_scale=1.0))
            ratio = plain.flatten(1).std(1) / guided.flatten(1).std(1)
            return guided * (1 - amount + amount * ratio)[:, None, None, None]

        engine.family.velocity = changed

    return plant


def exchanged_images(rollout):
    images = rollout.images.clone()
    images[[0, 1]] = images[[1, 0]]
    return images


def rolled(engine, conditioning):
    return {name: rows.roll(1, 0) for name, rows in conditioning.items()}


def pooled_of_another(engine, conditioning):
    return {
        name: rows.roll(1, 0) if name == "pooled_prompt_embeds" else rows
        for name, rows in conditioning.items()
    }


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
    encoded = engine.family.encode(["pear", "lime"], engine.plan.guidance)
    return {name: encoded[name][-len(rows) :] for name, rows in conditioning.items()}


def shorter(engine, conditioning):
    return {name: rows[:, :-1] if name == "prompt_embeds" else rows for name, rows in conditioning.items()}


def spoiled(rollout):
    latents = rollout.window.latents.clone()
    latents[0, 0, 0, 0, 0] = torch.nan
    return latents


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


def without_normaliser(rollout):
    return rollout.log_probs + rollout.window.stds.log() + 0.918938533


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
