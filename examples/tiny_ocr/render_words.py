"""Words as images: black DejaVu Sans Mono on white, left-anchored, whole or struck through by two lines."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL import ImageFont

HEIGHT, WIDTH = 32, 64
FONT_FILE = Path(__file__).parent / "font" / "DejaVuSansMono.ttf"

_FONT_PIXELS = 24
_LEFT, _BASELINE = 2, 23
_JITTER = 1
_STRIKE_TOPS = ((9, 12), (17, 19))
_STRIKE_PIXELS = 6


def render(words: Sequence[str], *, rng: np.random.Generator, struck_share: float = 0.0) -> np.ndarray:
    """Draw each word once, shifted by up to one pixel in both directions.

    Args:
        words: at most four characters each, or they run off the right edge.
        rng: draws the shifts, which words are struck through, and where.
        struck_share: probability that a word is struck through by two horizontal lines, which may touch.

    Returns:
        Images `[B, 32, 64, 3]`, uint8.
    """
    images = np.empty((len(words), HEIGHT, WIDTH, 3), dtype=np.uint8)
    for image, word in zip(images, words, strict=True):
        image[:] = _draw(word, rng, struck=rng.random() < struck_share)[..., None]
    return images


def _draw(word: str, rng: np.random.Generator, *, struck: bool) -> np.ndarray:
    from PIL import Image, ImageDraw

    canvas = Image.new("L", (WIDTH, HEIGHT), 255)
    draw = ImageDraw.Draw(canvas)
    right, down = rng.integers(-_JITTER, _JITTER + 1, size=2)
    draw.text((_LEFT + right, _BASELINE + down), word, font=_font(), fill=0, anchor="ls")
    if struck:
        for low, high in _STRIKE_TOPS:
            top = int(rng.integers(low, high + 1))
            draw.rectangle((0, top, WIDTH - 1, top + _STRIKE_PIXELS - 1), fill=0)
    return np.asarray(canvas)


@functools.cache
def _font() -> ImageFont.FreeTypeFont:
    from PIL import ImageFont

    # The basic layout: the other engine is an optional part of Pillow, and one font must draw one picture.
    return ImageFont.truetype(str(FONT_FILE), _FONT_PIXELS, layout_engine=ImageFont.Layout.BASIC)
