"""Ways to plant a fault in an engine in process that has weights and a pipeline of its own.

Each function returns one that changes an engine: what it returns, what it is fed, or what it samples with.
"""

from __future__ import annotations

import copy
import io
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from flowcorr.actor import DiffusionActor
from flowcorr.config.schema import Config
from flowcorr.models import Conditioning, Guidance, Schedule
from flowcorr.records import Rollout, Window
from flowcorr.rollout import InProcessEngine, Weights

Plant = Callable[[InProcessEngine], None]
Merged = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
_OF_WINDOW = frozenset(Window.__dataclass_fields__)


def own_engine(actor: DiffusionActor, config: Config) -> InProcessEngine:
    """An engine in process with weights and a pipeline of its own, which has no weights before its first `sync`."""
    family = copy.copy(actor.family)
    family.pipeline = copy.copy(actor.family.pipeline)
    transformer = actor.family.transformer
    base = type(transformer).from_config(transformer.config).eval()
    return InProcessEngine(
        family,
        config.rollout,
        config.sampling,
        seed=config.trainer.seed,
        merge=actor.weights.merged,
        base=base,
        shares=False,
    )


def returning(**changes: Callable[[Rollout], Any]) -> Plant:
    """Fields of the returned `Rollout` or its window, each computed from the true rollout."""

    def plant(engine: InProcessEngine) -> None:
        sample = engine.sample

        def altered(*arguments: Any, **keywords: Any) -> Rollout:
            rollout = sample(*arguments, **keywords)
            values = {name: change(rollout) for name, change in changes.items()}
            window = {name: values.pop(name) for name in _OF_WINDOW & values.keys()}
            return replace(rollout, window=replace(rollout.window, **window), **values)

        engine.sample = altered  # type: ignore[method-assign]

    return plant


def sampling_with(**changes: Any) -> Plant:
    """Other values of `sampling` than the run's."""

    def plant(engine: InProcessEngine) -> None:
        engine.plan = replace(engine.plan, sampling=replace(engine.plan.sampling, **changes))

    return plant


def guided_by(change: Callable[[Guidance], Guidance]) -> Plant:
    """Another guidance."""

    def plant(engine: InProcessEngine) -> None:
        engine.plan = replace(engine.plan, guidance=change(engine.plan.guidance))

    return plant


def scheduled(make: Callable[[InProcessEngine], Schedule]) -> Plant:
    """Another schedule, made from the engine's own."""

    def plant(engine: InProcessEngine) -> None:
        engine.plan = replace(engine.plan, schedule=make(engine))

    return plant


def with_sigmas(change: Callable[[Tensor], Tensor]) -> Callable[[InProcessEngine], Schedule]:
    """The engine's schedule with other sigmas; its timesteps stay."""
    return lambda engine: replace(
        engine.plan.schedule, sigmas=tuple(change(torch.tensor(engine.plan.schedule.sigmas)).tolist())
    )


def with_timesteps(change: Callable[[Tensor], Tensor]) -> Callable[[InProcessEngine], Schedule]:
    """The engine's schedule with other timesteps; its sigmas stay."""
    return lambda engine: replace(
        engine.plan.schedule, timesteps=tuple(change(torch.tensor(engine.plan.schedule.timesteps)).tolist())
    )


def seeing(change: Callable[..., Tensor]) -> Plant:
    """Another velocity: `change(velocity, transformer, latents, timesteps, conditioning, guidance)`."""

    def plant(engine: InProcessEngine) -> None:
        velocity = engine.family.velocity

        def changed(*arguments: Any) -> Tensor:
            return change(velocity, *arguments)

        engine.family.velocity = changed  # type: ignore[method-assign, assignment]

    return plant


def feeding(change: Callable[[Tensor], Tensor]) -> Plant:
    """The model is fed other timesteps than the trajectory tells of."""
    return seeing(
        lambda velocity, transformer, latents, timesteps, *rest: velocity(
            transformer, latents, change(timesteps), *rest
        )
    )


def at_steps(which: Callable[[InProcessEngine], range], change: Callable[..., Tensor]) -> Plant:
    """`seeing` at some steps of the schedule alone."""

    def plant(engine: InProcessEngine) -> None:
        steps = which(engine)
        table = torch.tensor(engine.plan.schedule.timesteps)

        def at(velocity: Any, transformer: Any, latents: Tensor, timesteps: Tensor, *rest: Any) -> Tensor:
            # The nearest one, as the engine rounds its timesteps to its dtype.
            nearest = int((table - timesteps[0].cpu()).abs().argmin())
            call = change if nearest in steps else as_it_is
            return call(velocity, transformer, latents, timesteps, *rest)

        seeing(at)(engine)

    return plant


def conditioned(
    change: Callable[[InProcessEngine, Mapping[str, Tensor]], Conditioning], *, told: bool
) -> Plant:
    """The engine samples with another conditioning, which it returns if `told`."""

    def plant(engine: InProcessEngine) -> None:
        sample = engine.sample

        def altered(conditioning: Mapping[str, Tensor], groups: Any, **keywords: Any) -> Rollout:
            rollout = sample(change(engine, conditioning), groups, **keywords)
            return rollout if told else replace(rollout, conditioning=dict(conditioning))

        engine.sample = altered  # type: ignore[method-assign]

    return plant


def on_references(change: Callable[[Tensor], Tensor]) -> Plant:
    """Other reference images: `change` gets their latents `[P, R, ...]`."""
    return conditioned(
        lambda engine, conditioning: {
            name: change(rows) if name == "references" else rows for name, rows in conditioning.items()
        },
        told=False,
    )


def placing(transformer: Callable[..., Any], drawn: int) -> Callable[..., Any]:
    """A transformer that takes reference images to lie where the image of `drawn` tokens does, or turns their grids."""

    def call(**inputs: Any) -> Any:
        if "img_ids" in inputs:
            ids = inputs["img_ids"].clone()
            ids[drawn:, 0] = 0
            inputs["img_ids"] = ids
        else:
            inputs["img_shapes"] = [
                [own, *((frames, width, height) for frames, height, width in references)]
                for own, *references in inputs["img_shapes"]
            ]
        return transformer(**inputs)

    return call


def misplaced(velocity: Any, transformer: Any, latents: Tensor, *rest: Any) -> Tensor:
    """The velocity with other places of the reference images."""
    found: Tensor = velocity(placing(transformer, latents[0, ..., 0].numel()), latents, *rest)
    return found


def in_some_images(chosen: Callable[[int, int], bool], change: Callable[..., Tensor]) -> Plant:
    """`seeing` in the images alone whose group and member are `chosen`."""

    def plant(engine: InProcessEngine) -> None:
        sample, velocity = engine._sample, engine.family.velocity

        def changed(*arguments: Any) -> Tensor:
            return change(velocity, *arguments)

        def altered(
            conditioning: Conditioning, groups: Sequence[int], members: Sequence[int], *rest: Any
        ) -> Rollout:
            images = list(zip(groups, members, strict=True))
            drawn = []
            for is_chosen, places in itertools.groupby(
                range(len(images)), lambda place: chosen(*images[place])
            ):
                rows = list(places)
                engine.family.velocity = changed if is_chosen else velocity  # type: ignore[method-assign, assignment]
                own = {name: values[rows] for name, values in conditioning.items()}
                drawn.append(
                    sample(own, [groups[row] for row in rows], [members[row] for row in rows], *rest)
                )
            return Rollout.concatenate(drawn)

        engine._sample = altered  # type: ignore[method-assign]

    return plant


def merging(change: Callable[[Mapping[str, Tensor], Merged], Mapping[str, Tensor]]) -> Plant:
    """Other weights: `change(tensors, merge)` gives the state that is loaded."""

    def plant(engine: InProcessEngine) -> None:
        merge = engine.merge
        engine.merge = lambda tensors: iter(change(tensors, lambda given: dict(merge(given))).items())

    return plant


def noisy(change: Callable[[Tensor], Tensor]) -> Plant:
    """Other noise of the steps, computed from the true one."""

    def plant(engine: InProcessEngine) -> None:
        draw = engine.step_noise
        engine.step_noise = lambda *ids, **seeds: change(draw(*ids, **seeds))  # type: ignore[method-assign]

    return plant


def seeded(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Plant:
    """Noise of the steps drawn for other ids: `change` gets groups, members, seed, training_step and step_index."""

    def plant(engine: InProcessEngine) -> None:
        draw = engine.step_noise

        def drawn(groups: Any, members: Any, **seeds: Any) -> Tensor:
            return draw(**change({"groups": groups, "members": members, **seeds}))

        engine.step_noise = drawn  # type: ignore[method-assign]

    return plant


def one_sync_behind(engine: InProcessEngine) -> None:
    """The engine samples with the weights of the sync before."""
    sync, waiting = engine.sync, []

    def late(weights: Weights) -> None:
        waiting.append(weights)
        sync(waiting[-2] if len(waiting) > 1 else weights)

    engine.sync = late  # type: ignore[method-assign]


def deaf_after_the_first_sync(engine: InProcessEngine) -> None:
    """The engine keeps the first weights that it gets."""
    sync = engine.sync
    heard: list[Weights] = []

    def once(weights: Weights) -> None:
        if not heard:
            heard.append(weights)
            sync(weights)

    engine.sync = once  # type: ignore[method-assign]


def forgets_the_seed(engine: InProcessEngine) -> None:
    """Each call draws other noise."""
    calls: list[int] = []

    def elsewhere(ids: dict[str, Any]) -> dict[str, Any]:
        calls.append(len(calls))
        return {**ids, "seed": ids["seed"] + len(calls)}

    seeded(elsewhere)(engine)


def seeds_by_place(engine: InProcessEngine) -> None:
    """Noise belongs to a place in the batch, not to a prompt."""
    sample = engine.sample

    def placed(conditioning: Mapping[str, Tensor], groups: Any, **keywords: Any) -> Rollout:
        return sample(conditioning, range(len(groups)), **keywords)

    engine.sample = placed  # type: ignore[method-assign]


def another_vae(size: float) -> Plant:
    """The decoder's matrices moved by `size` of their spread."""

    def plant(engine: InProcessEngine) -> None:
        vae = engine.family.pipeline.vae = copy.deepcopy(engine.family.pipeline.vae)
        draw = torch.Generator().manual_seed(5)
        for parameter in vae.decoder.parameters():
            moved = torch.randn(parameter.shape, generator=draw).to(parameter)
            parameter.data += size * parameter.std(correction=0) * moved

    return plant


def vae_configured(change: Callable[[Any], dict[str, float]]) -> Plant:
    """Other entries of the VAE's configuration: `change` gets its present one."""

    def plant(engine: InProcessEngine) -> None:
        vae = engine.family.pipeline.vae = copy.deepcopy(engine.family.pipeline.vae)
        vae.register_to_config(**change(vae.config))

    return plant


def rescaled_guidance(amount: float) -> Plant:
    """The `guidance_rescale` of diffusers."""

    def change(
        velocity: Any,
        transformer: Any,
        latents: Tensor,
        timesteps: Tensor,
        conditioning: Conditioning,
        guidance: Guidance,
    ) -> Tensor:
        guided = velocity(transformer, latents, timesteps, conditioning, guidance)
        plain = unguided(velocity, transformer, latents, timesteps, conditioning, guidance)
        ratio = plain.flatten(1).std(1) / guided.flatten(1).std(1)
        factor = 1 - amount + amount * ratio
        rescaled: Tensor = guided * factor.reshape(-1, *[1] * (guided.dim() - 1))
        return rescaled

    return seeing(change)


def unguided(
    velocity: Any,
    transformer: Any,
    latents: Tensor,
    timesteps: Tensor,
    conditioning: Conditioning,
    guidance: Guidance,
) -> Tensor:
    """The velocity without guidance."""
    prompt = {name: rows for name, rows in conditioning.items() if not name.startswith("negative_")}
    off = replace(guidance, guidance_scale=1.0, true_cfg_scale=1.0)
    plain: Tensor = velocity(transformer, latents, timesteps, prompt, off)
    return plain


def blanked(
    velocity: Any,
    transformer: Any,
    latents: Tensor,
    timesteps: Tensor,
    conditioning: Conditioning,
    *rest: Any,
) -> Tensor:
    """The velocity under prompts of zeros."""
    zeros = {
        name: torch.zeros_like(rows) if rows.is_floating_point() else rows
        for name, rows in conditioning.items()
    }
    found: Tensor = velocity(transformer, latents, timesteps, zeros, *rest)
    return found


def jpeg(images: Tensor, quality: int) -> Tensor:
    """Images `[B, H, W, 3]` uint8 that were stored as JPEG."""
    stored = []
    for image in images.cpu().numpy():
        file = io.BytesIO()
        Image.fromarray(image).save(file, "JPEG", quality=quality)
        stored.append(torch.from_numpy(np.array(Image.open(file))))
    return torch.stack(stored)


def rounded(tensor: Tensor) -> Tensor:
    """Rounded to bfloat16."""
    return tensor.to(torch.bfloat16).float()


def uniform(noise: Tensor) -> Tensor:
    """Uniform noise of unit variance, of the same ranks as `noise`."""
    return math.sqrt(12) * (torch.special.ndtr(noise.double()).float() - 0.5)


def perturbed(value: Tensor, size: float, draw: torch.Generator) -> Tensor:
    """`value` moved at random by `size` of its spread."""
    moved = torch.randn(value.shape, generator=draw).to(value)
    return value + size * value.std(correction=0) * moved


def scaled_up(factor: float) -> Callable[[Mapping[str, Tensor], Merged], dict[str, Tensor]]:
    """The adapter's effect times `factor`."""
    return adapters(lambda name, value: factor * value)


def without_adapters(
    kept: Callable[[str], bool],
) -> Callable[[Mapping[str, Tensor], Merged], dict[str, Tensor]]:
    """Adapters on the layers alone whose names are `kept`."""
    return adapters(lambda name, value: value if kept(name) else torch.zeros_like(value))


def adapters(
    change: Callable[[str, Tensor], Tensor],
) -> Callable[[Mapping[str, Tensor], Merged], dict[str, Tensor]]:
    """Another B in each adapter."""
    return lambda tensors, merge: merge(
        {name: change(name, value) if ".lora_B." in name else value for name, value in tensors.items()}
    )


def matrices(
    change: Callable[[str, Tensor], Tensor],
) -> Callable[[Mapping[str, Tensor], Merged], dict[str, Tensor]]:
    """Other matrices in the loaded state."""
    return lambda tensors, merge: {
        name: change(name, value) if value.dim() == 2 else value for name, value in merge(tensors).items()
    }


def as_it_is(velocity: Any, *arguments: Any) -> Tensor:
    found: Tensor = velocity(*arguments)
    return found
