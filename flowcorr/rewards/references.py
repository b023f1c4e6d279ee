"""Reference images for rewards, at the size of the image that was made of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flowcorr.errors import BatchError, ConfigError
from flowcorr.records import Prompt

ADD_IMAGE = 'name one as "image" of each line of a JSONL file, and use a model that edits images'


def references_of(prompts: Sequence[Prompt], height: int, width: int) -> list[list[np.ndarray]]:
    """The reference images of each prompt, `[height, width, 3]` uint8; equal prompts share one decoding."""
    decoded: dict[str, list[np.ndarray]] = {}
    for prompt in prompts:
        if prompt.key not in decoded:
            decoded[prompt.key] = [np.asarray(image.fitted(height, width)) for image in prompt.images]
    return [decoded[prompt.key] for prompt in prompts]


def check_references(reward: str, prompts: Sequence[Prompt]) -> None:
    """Check that each prompt has a reference image.

    Raises:
        ConfigError: one has none.
    """
    for prompt in prompts:
        if not prompt.images:
            raise ConfigError(
                f"{prompt.place or 'data'}: the prompt {prompt.text!r} has no reference image, which reward {reward} "
                f"compares with; {ADD_IMAGE}"
            )


def needed_references(
    reward: str, prompts: Sequence[Prompt], height: int, width: int
) -> list[list[np.ndarray]]:
    """`references_of` prompts that all have one.

    Raises:
        BatchError: a prompt has none.
    """
    for index, prompt in enumerate(prompts):
        if not prompt.images:
            raise BatchError(
                f"reward {reward}: sample {index} (prompt {prompt.text!r}) has no reference image; {ADD_IMAGE}"
            )
    return references_of(prompts, height, width)
