"""Mistakes of rollout engines, as `table` lists them; a size says how large one is."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flowcorr.models import Conditioning, Schedule
from flowcorr.records import Rollout
from flowcorr.rollout import InProcessEngine
from flowcorr.sde.log_prob import HALF_LOG_TWO_PI
from tests.planted import plants
from tests.planted.plants import Plant


def steps_after_windows(engine: InProcessEngine) -> range:
    """The steps behind the last that a window can hold."""
    return range(engine.plan.sampling.sde_window_range[1], len(engine.plan.schedule.timesteps))


# Returned values ---------------------------------------------------------------------------------------------


def nudged(size: float) -> Plant:
    """Latents that moved at random after they were scored."""

    def change(rollout: Rollout) -> Tensor:
        after = rollout.window.next_latents
        return after + size * torch.randn(after.shape, generator=torch.Generator().manual_seed(3)).to(after)

    return plants.returning(next_latents=change)


def clamped(size: float) -> Plant:
    """Latents clamped to 2.5 / size after a step."""
    bound = 2.5 / size
    return plants.returning(next_latents=lambda rollout: rollout.window.next_latents.clamp(-bound, bound))


def spoiled(rollout: Rollout) -> Tensor:
    """Latents with one that is not finite."""
    latents = rollout.window.latents.clone()
    latents.view(-1)[0] = math.nan
    return latents


def without_normaliser(rollout: Rollout) -> Tensor:
    """Log-probs without `-log s - log(2 pi) / 2`."""
    assert rollout.window.stds is not None, "this engine returns them"
    return rollout.log_probs + rollout.window.stds.log() + HALF_LOG_TWO_PI


def exchanged(rollout: Rollout) -> Tensor:
    """Images with the first two exchanged."""
    images = rollout.decoded.clone()
    images[[0, 1]] = images[[1, 0]]
    return images


def brighter(size: float) -> Plant:
    """Images brighter by `size` grey levels."""
    return plants.returning(
        images=lambda rollout: (rollout.decoded.float() + size).clamp(0, 255).to(torch.uint8)
    )


# Sampling ----------------------------------------------------------------------------------------------------


def other_layout(engine: InProcessEngine) -> None:
    """The layout of windows that is not configured."""
    scattered = engine.plan.sampling.sde_window_layout == "scattered"
    plants.sampling_with(sde_window_layout="consecutive" if scattered else "scattered")(engine)


def other_owner(engine: InProcessEngine) -> None:
    """Windows by sample where they are by group, and the other way round."""
    by_group = engine.plan.sampling.window_per == "group"
    plants.sampling_with(window_per="sample" if by_group else "group")(engine)


def window_late(engine: InProcessEngine) -> None:
    """A range of windows that begins one step later."""
    low, high = engine.plan.sampling.sde_window_range
    plants.sampling_with(sde_window_range=(low + 1, high))(engine)


def noise_level(size: float) -> Plant:
    """A noise level too large by the share `size`."""

    def plant(engine: InProcessEngine) -> None:
        plants.sampling_with(noise_level=engine.plan.sampling.noise_level * (1 + size))(engine)

    return plant


def other_kind(engine: InProcessEngine) -> None:
    """Another transition."""
    other = "sde" if engine.plan.sampling.sde_type == "dance_sde" else "dance_sde"
    plants.sampling_with(sde_type=other)(engine)


def shifted(size: float) -> Plant:
    """Sigmas shifted by `1 + size`."""

    def make(engine: InProcessEngine) -> Schedule:
        sigmas = torch.tensor(engine.plan.schedule.sigmas, dtype=torch.float64)
        moved = (1 + size) * sigmas / (1 + size * sigmas)
        largest = max(engine.plan.schedule.timesteps)
        return Schedule(sigmas=tuple(moved.tolist()), timesteps=tuple((largest * moved[:-1]).tolist()))

    return plants.scheduled(make)


def equal_tail(engine: InProcessEngine) -> None:
    """Steps of equal size after the windows."""
    steps = steps_after_windows(engine)
    sigmas = list(engine.plan.schedule.sigmas)
    sigmas[steps.start :] = torch.linspace(sigmas[steps.start], 0, len(sigmas) - steps.start).tolist()
    largest = max(engine.plan.schedule.timesteps)
    tail = [largest * sigma for sigma in sigmas[steps.start : -1]]
    timesteps = (*engine.plan.schedule.timesteps[: steps.start], *tail)
    engine.plan = replace(engine.plan, schedule=Schedule(sigmas=tuple(sigmas), timesteps=timesteps))


def own_initial_noise(engine: InProcessEngine) -> None:
    """One initial noise a prompt where each image has its own, and the other way round."""
    engine.config = replace(engine.config, same_initial_noise=not engine.config.same_initial_noise)


# Noise -------------------------------------------------------------------------------------------------------


def partly_uniform(size: float) -> Plant:
    """A share `size` of the elements of the noise is uniform."""

    def change(noise: Tensor) -> Tensor:
        chosen = torch.rand(noise.shape, generator=torch.Generator().manual_seed(7)) < size
        return torch.where(chosen.to(noise.device), plants.uniform(noise), noise)

    return plants.noisy(change)


def rows_alike(noise: Tensor, size: float) -> Tensor:
    """Noise whose rows are correlated by `size^2`."""
    return math.sqrt(1 - size**2) * noise + size * noise[:1]


def half_of_groups(ids: dict[str, Any]) -> dict[str, Any]:
    """Ids in which two groups are one."""
    return {**ids, "groups": [group // 2 for group in ids["groups"]]}


# Conditioning and guidance -----------------------------------------------------------------------------------


def rolled(engine: InProcessEngine, conditioning: Mapping[str, Tensor]) -> Conditioning:
    """The embeddings of the next prompts."""
    return {name: rows.roll(1, 0) for name, rows in conditioning.items()}


def pooled_of_another(engine: InProcessEngine, conditioning: Mapping[str, Tensor]) -> Conditioning:
    """The pooled embeddings of the next prompts."""
    return {name: rows.roll(1, 0) if rows.dim() == 2 else rows for name, rows in conditioning.items()}


def blank(size: float) -> Plant:
    """The last tokens of the prompts, a share of `size`, are zero."""

    def change(engine: InProcessEngine, conditioning: Mapping[str, Tensor]) -> Conditioning:
        blank = dict(conditioning)
        for name, rows in conditioning.items():
            if rows.dim() == 3 and not name.startswith("negative_"):
                kept = min(rows.shape[1] - 1, round((1 - size) * rows.shape[1]))
                blank[name] = torch.cat([rows[:, :kept], torch.zeros_like(rows[:, kept:])], 1)
        return blank

    return plants.conditioned(change, told=False)


def noisy_embeddings(size: float) -> Plant:
    """Embeddings moved at random by `size` of their spread, those of all prompts alike."""

    def change(engine: InProcessEngine, conditioning: Mapping[str, Tensor]) -> Conditioning:
        draw = torch.Generator().manual_seed(6)
        moved = {}
        for name, rows in conditioning.items():
            same_for_all = torch.randn(rows[:1].shape, generator=draw).to(rows.device)
            moved[name] = (
                (rows + size * rows.float().std(correction=0) * same_for_all).to(rows.dtype)
                if rows.is_floating_point()
                else rows
            )
        return moved

    return plants.conditioned(change, told=False)


def no_negative(engine: InProcessEngine, conditioning: Mapping[str, Tensor]) -> Conditioning:
    """Negative prompts of zeros."""
    return {
        name: torch.zeros_like(rows) if name.startswith("negative_") else rows
        for name, rows in conditioning.items()
    }


def negative_of_another(engine: InProcessEngine, conditioning: Mapping[str, Tensor]) -> Conditioning:
    """The next prompt as negative prompt."""
    return {
        name: conditioning[name.removeprefix("negative_")].roll(1, 0)
        if name.startswith("negative_")
        else rows
        for name, rows in conditioning.items()
    }


def sides_exchanged(engine: InProcessEngine, conditioning: Mapping[str, Tensor]) -> Conditioning:
    """The prompt as negative prompt, and the other way round."""
    return {
        name: conditioning[name.removeprefix("negative_")]
        if name.startswith("negative_")
        else conditioning.get(f"negative_{name}", rows)
        for name, rows in conditioning.items()
    }


def no_references(engine: InProcessEngine, conditioning: Mapping[str, Tensor]) -> Conditioning:
    """No reference images."""
    return {name: rows for name, rows in conditioning.items() if name != "references"}


def references_reversed(engine: InProcessEngine) -> None:
    """Red and blue of the reference images are exchanged, as the VAE knows them."""
    family = engine.family

    def change(references: Tensor) -> Tensor:
        with torch.no_grad():
            pixels = family.decode(references.flatten(0, 1)).clamp(-1, 1)
            return family.encode_image(pixels.flip(1)).view_as(references)  # type: ignore[attr-defined, no-any-return]

    plants.on_references(change)(engine)


def one_image_of_another(engine: InProcessEngine) -> None:
    """The second image of the first prompt has the last prompt."""
    sample, inner = engine.sample, engine._sample
    given: dict[str, Tensor] = {}

    def remembered(conditioning: Mapping[str, Tensor], groups: Any, **keywords: Any) -> Rollout:
        given.update(conditioning)
        return sample(conditioning, groups, **keywords)

    def altered(conditioning: Conditioning, groups: Any, members: Any, *rest: Any) -> Rollout:
        rows = {name: values.clone() for name, values in conditioning.items()}
        for place, image in enumerate(zip(groups, members, strict=True)):
            if image == (0, 1):
                for name, values in rows.items():
                    values[place] = given[name][-1]
        return inner(rows, groups, members, *rest)

    engine.sample, engine._sample = remembered, altered  # type: ignore[method-assign]


def first_repeated(engine: InProcessEngine) -> None:
    """The first sample again in the place of the last."""
    sample = engine.sample

    def altered(*arguments: Any, **keywords: Any) -> Rollout:
        rollout = sample(*arguments, **keywords)
        rows = torch.arange(rollout.num_samples)
        rows[-1] = 0
        return replace(
            rollout.select(rows),
            group_ids=rollout.group_ids,
            conditioning=rollout.conditioning,
            conditioning_rows=rollout.conditioning_rows,
        )

    engine.sample = altered  # type: ignore[method-assign]


def guidance_larger(size: float) -> Plant:
    """Guidance stronger by the share `size`."""
    return plants.guided_by(
        lambda guidance: replace(
            guidance,
            guidance_scale=1 + (guidance.guidance_scale - 1) * (1 + size),
            true_cfg_scale=1 + (guidance.true_cfg_scale - 1) * (1 + size),
        )
    )


# Weights -----------------------------------------------------------------------------------------------------


def _first(state: Mapping[str, Tensor], ending: str) -> str:
    return next(name for name in state if name.endswith(ending))


def in_even_block(name: str) -> bool:
    """Whether a parameter is in the blocks 0, 2, ..., or in none."""
    found = re.search(r"blocks\.(\d+)\.", name)
    return found is None or int(found[1]) % 2 == 0


def head_missing(tensors: Mapping[str, Tensor], merge: plants.Merged) -> Mapping[str, Tensor]:
    """The first attention head of the first block gives 0."""
    state = merge(tensors)
    name = _first(state, "attn.to_out.0.weight")
    state[name] = state[name].clone()
    state[name][:, : max(1, state[name].shape[1] // 4)] = 0
    return state


def block_missing(tensors: Mapping[str, Tensor], merge: plants.Merged) -> Mapping[str, Tensor]:
    """The feed-forward part of the last block but one gives 0."""
    state = merge(tensors)
    block = sorted({name.split(".")[1] for name in state if "blocks." in name}, key=int)[-2]
    return {
        name: torch.zeros_like(value) if f"blocks.{block}.ff." in name else value
        for name, value in state.items()
    }


def positions_rolled(tensors: Mapping[str, Tensor], merge: plants.Merged) -> Mapping[str, Tensor]:
    """Position embeddings of the place before."""
    state = merge(tensors)
    name = _first(state, "pos_embed.pos_embed")
    return {**state, name: state[name].roll(1, 1)}


def adapters_swapped(tensors: Mapping[str, Tensor], merge: plants.Merged) -> Mapping[str, Tensor]:
    """Of the first two blocks."""

    def other(name: str) -> str:
        swaps = {"blocks.0.": "blocks.1.", "blocks.1.": "blocks.0."}
        twin = next((name.replace(one, two) for one, two in swaps.items() if one in name), name)
        return twin if twin in tensors and tensors[twin].shape == tensors[name].shape else name

    return merge({name: tensors[other(name)] for name in tensors})


def moved(size: float) -> Plant:
    """Matrices moved at random by `size` of their spread."""

    def change(tensors: Mapping[str, Tensor], merge: plants.Merged) -> Mapping[str, Tensor]:
        draw = torch.Generator().manual_seed(5)
        return plants.matrices(lambda name, value: plants.perturbed(value, size, draw))(tensors, merge)

    return plants.merging(change)


def moved_biases(size: float) -> Plant:
    """Vectors moved at random by `size` of their spread."""

    def change(tensors: Mapping[str, Tensor], merge: plants.Merged) -> Mapping[str, Tensor]:
        draw = torch.Generator().manual_seed(5)
        return {
            name: plants.perturbed(value, size, draw) if value.dim() == 1 and len(value) > 1 else value
            for name, value in merge(tensors).items()
        }

    return plants.merging(change)


# Images ------------------------------------------------------------------------------------------------------


def vae_scaled(size: float) -> Plant:
    """A scaling factor of the VAE too large by the share `size`."""
    return plants.vae_configured(lambda config: {"scaling_factor": config["scaling_factor"] * (1 + size)})


def decoded_flipped(engine: InProcessEngine) -> None:
    """Images with their channels in reverse order."""
    engine.family.pipeline.vae = copy.copy(engine.family.pipeline.vae)
    decode = engine.family.decode
    engine.family.decode = lambda latents: decode(latents).flip(1)  # type: ignore[method-assign]
