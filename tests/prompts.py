"""Prompts by their texts, with reference images where a family wants them."""

import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image

from flowcorr.records import Prompt
from flowcorr.references import Reference


def prompts_of(texts: Iterable[str], *, images: int = 0) -> list[Prompt]:
    """A prompt of each text, with as many reference images of its own."""
    return [
        Prompt(text=text, images=tuple(_reference(place, number) for number in range(images)))
        for place, text in enumerate(texts)
    ]


@cache
def _reference(place: int, number: int) -> Reference:
    """A picture of soft noise, wider than high."""
    draw = np.random.default_rng([place, number])
    coarse = Image.fromarray(draw.integers(0, 256, (6, 9, 3), dtype=np.uint8))
    path = Path(_folder().name) / f"{place}_{number}.png"
    coarse.resize((72, 48), Image.Resampling.BICUBIC).save(path)
    return Reference.of(path)


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()
