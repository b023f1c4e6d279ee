"""Negative prompts of a run and of its prompts, and the half of a batch that is computed under them.

A `guidance` is a `Guidance` and a `family` a subclass of `ModelFamily`, whose module imports this one.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flowcorr.records import Prompt


def negative_prompts(prompts: Sequence[Prompt], guidance: Any) -> list[Prompt]:
    """The different negative prompts of `prompts`, as prompts, each with the first place that it was read from."""
    negatives: dict[str, Prompt] = {}
    for prompt in prompts:
        own = prompt.negative_prompt is not None
        place = (
            f"negative_prompt of {prompt.place or repr(prompt.text)}" if own else "sampling.negative_prompt"
        )
        text = guidance.of_prompt(prompt).negative_prompt
        negatives.setdefault(text, Prompt(text=text, place=place))
    return list(negatives.values())


def check_negative_prompts(family: Any, prompts: Sequence[Prompt], guidance: Any) -> None:
    """Warn of negative prompts that are not read, because guidance is off or the family has none.

    Warns:
        UserWarning: prompts have one of their own, or `sampling` has one that this family never reads.
    """
    if family.needs_negative(guidance):
        return
    own = [prompt for prompt in prompts if prompt.negative_prompt is not None]
    if own:
        subject = f"negative_prompt of {len(own)} prompts ({own[0].place or repr(own[0].text)} is the first)"
    elif guidance.negative_prompt and not family.encodes_negative:
        subject = f"sampling.negative_prompt={guidance.negative_prompt!r}"
    else:  # `config.rules` warns of guidance that is off
        return
    reason = f"a model of the family {family.name} reads no negative prompt"
    if family.encodes_negative:
        key = family.guidance_key
        reason = f"guidance is off at sampling.{key}={getattr(guidance, key):g}; set it above 1"
    warnings.warn(f"{subject} has no effect: {reason}", UserWarning, stacklevel=1)  # one place: shown once


def sides(conditioning: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Conditioning of the negative prompt and of the prompts; tensors without a `negative_` counterpart are in both."""
    own = {name: rows for name, rows in conditioning.items() if not name.startswith("negative_")}
    return {name: conditioning.get(f"negative_{name}", rows) for name, rows in own.items()}, own


def with_negative(
    latents: Tensor, timesteps: Tensor, conditioning: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """A batch of twice as many samples: all of them under the negative prompt, then all under their own prompts.

    Args:
        latents: `[B, *L]`.
        timesteps: `[B]`.
        conditioning: `{name: [B, ...]}`, see `sides`; reference images are shared, for example.
    """
    negative, own = sides(conditioning)
    both = {name: torch.cat([negative[name], rows]) for name, rows in own.items()}
    return torch.cat([latents, latents]), torch.cat([timesteps, timesteps]), both
