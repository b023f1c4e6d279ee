"""Prompts by their texts, with reference images where a family wants them, which a model must tell apart."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from flowcorr.records import Prompt
from flowcorr.references import Reference

if TYPE_CHECKING:
    from torch import Tensor

    from flowcorr.models import Guidance, ModelFamily

APART = 0.02  # relative difference of two embeddings, at least


def check_told_apart(family: ModelFamily, prompts: Sequence[Prompt], guidance: Guidance) -> None:
    """Check that a family embeds prompts, the negative one among them, and reference images differently.

    Under one embedding no fault of prompts, guidance or references would be seen. Texts are compared beside the same
    images.

    Raises:
        ValueError: two of them have one embedding.
    """
    texts = family.embed([replace(prompt, images=prompts[0].images) for prompt in prompts], guidance)
    own = family.embed([replace(prompt, text=prompts[0].text) for prompt in prompts], guidance)
    for name, rows in texts.items():
        if not rows.is_floating_point() or name.startswith("negative_"):
            continue
        if name == "references":
            _check_apart(name, list(own[name]))
        else:
            negative = texts.get(f"negative_{name}", rows[:0])
            _check_apart(name, [*rows, *negative[:1]])


def _check_apart(name: str, rows: Sequence[Tensor]) -> None:
    for (left, one), (right, other) in itertools.combinations(enumerate(rows), 2):
        difference = float((one.double() - other.double()).norm() / one.double().norm())
        if not difference >= APART:
            raise ValueError(
                f"rows {left} and {right} of {name} (the last is the negative prompt's) differ by {difference:.2g}: "
                "give prompts more tokens, or reference images other colours"
            )


def prompts_of(texts: Iterable[str], *, images: int = 0) -> list[Prompt]:
    """A prompt of each text, with as many reference images of its own."""
    return [
        Prompt(text=text, images=tuple(_reference(place, number) for number in range(images)))
        for place, text in enumerate(texts)
    ]


@cache
def _reference(place: int, number: int) -> Reference:
    """A picture of soft noise around a colour of its own, wider than high."""
    draw = np.random.default_rng([place, number])
    colour = draw.integers(0, 256, 3)
    coarse = Image.fromarray(((colour + draw.integers(0, 256, (6, 9, 3))) / 2).astype(np.uint8))
    path = Path(_folder().name) / f"{place}_{number}.png"
    coarse.resize((72, 48), Image.Resampling.BICUBIC).save(path)
    return Reference.of(path)


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()
