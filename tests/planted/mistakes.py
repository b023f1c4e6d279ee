"""Mistakes of rollout engines that tables and tests of single checks share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flowcorr.models import Conditioning
from flowcorr.records import Rollout
from flowcorr.rollout import InProcessEngine
from flowcorr.sde.log_prob import HALF_LOG_TWO_PI
from tests.planted import plants

# Returned values ---------------------------------------------------------------------------------------------


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


# Conditioning and guidance -----------------------------------------------------------------------------------


def rolled(engine: InProcessEngine, conditioning: Mapping[str, Tensor]) -> Conditioning:
    """The embeddings of the next prompts."""
    return {name: rows.roll(1, 0) for name, rows in conditioning.items()}


def pooled_of_another(engine: InProcessEngine, conditioning: Mapping[str, Tensor]) -> Conditioning:
    """The pooled embeddings of the next prompts."""
    return {name: rows.roll(1, 0) if rows.dim() == 2 else rows for name, rows in conditioning.items()}


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


# Weights -----------------------------------------------------------------------------------------------------


def head_missing(tensors: Mapping[str, Tensor], merge: plants.Merged) -> Mapping[str, Tensor]:
    """The first attention head of the first block gives 0."""
    state = merge(tensors)
    name = next(name for name in state if name.endswith("attn.to_out.0.weight"))
    state[name] = state[name].clone()
    state[name][:, : max(1, state[name].shape[1] // 4)] = 0
    return state


def adapters_swapped(tensors: Mapping[str, Tensor], merge: plants.Merged) -> Mapping[str, Tensor]:
    """Of the first two blocks."""

    def other(name: str) -> str:
        swaps = {"blocks.0.": "blocks.1.", "blocks.1.": "blocks.0."}
        twin = next((name.replace(one, two) for one, two in swaps.items() if one in name), name)
        return twin if twin in tensors and tensors[twin].shape == tensors[name].shape else name

    return merge({name: tensors[other(name)] for name in tensors})
