"""Negative prompts of a run and of its prompts.

A `guidance` is a `Guidance` and a `family` a subclass of `ModelFamily`, whose module imports this one.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

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
    """Say that negative prompts are not read, where guidance is off or reads none.

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
