"""Prompts, and the images that rewards get with them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from flowcorr.references import Reference
from flowcorr.texts import folded

ImageArray: TypeAlias = np.ndarray
"""`Images` in main memory, as rewards get them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt of the data set.

    Attributes:
        text: the prompt that the model gets.
        images: the reference images that an editing model gets with it.
        negative_prompt: the text that guidance moves away from; None for `sampling.negative_prompt`.
        target: text that a reward looks for in the image, such as the words to render.
        tag: its kind, by which `reward.terms` may choose prompts.
        metadata: further fields of the data file, for a user's own reward.
        place: file and line that it was read from, for messages.
    """

    text: str
    images: tuple[Reference, ...] = ()
    negative_prompt: str | None = None
    target: str | None = None
    tag: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    place: str | None = field(default=None, compare=False)

    @property
    def key(self) -> str:
        """The request to the model: prompts with equal keys are one prompt, however their texts are spelt.

        It is `content`, and a line for a negative prompt of its own.
        """
        if self.negative_prompt is None:
            return self.content
        return f"{self.content}\nnegative: {folded(self.negative_prompt)}"

    @property
    def content(self) -> str:
        """Folded text and a line for each image; equal for two prompts that differ in their negative prompts only."""
        return "\n".join([folded(self.text), *(image.digest for image in self.images)])


def distinct(prompts: Iterable[Prompt]) -> list[Prompt]:
    """Prompts that ask for different things, in their order, each in its first spelling."""
    firsts: dict[str, Prompt] = {}
    for prompt in prompts:
        firsts.setdefault(prompt.key, prompt)
    return list(firsts.values())
