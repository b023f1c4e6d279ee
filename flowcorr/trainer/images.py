"""Grids of samples with their prompts, for a person to look at."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from flowcorr.records import ImageArray, Prompt
from flowcorr.rewards.references import references_of
from flowcorr.trackers.base import writing

logger = logging.getLogger(__name__)

MIN_WIDTH, MAX_WIDTH, MAX_PICTURES = 128, 256, 48
_CAPTION_HEIGHT, _GAP = 18, 4
_BESIDE = 1200  # pixels of a grid up to which two are shown beside each other, and not one above the other


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shown:
    """Samples for a person to look at.

    Attributes:
        images: images `[B, H, W, 3]` or videos `[B, F, H, W, 3]`, uint8.
        prompts: of the samples.
        scores: `[B]`, shown below them; None shows none.
        rate: frames a second of videos, those of the model family.
    """

    images: ImageArray
    prompts: Sequence[Prompt]
    scores: np.ndarray | None = None
    rate: int = 1

    def first(self, count: int) -> Shown:
        """The first samples, at most `count` of them."""
        return replace(self, images=self.images[:count], prompts=self.prompts[:count])


def labelled(shown: Shown) -> list[Image.Image]:
    """The first `MAX_PICTURES` images, each above its target and score; of a video, its first, middle and last frame.

    Small ones are enlarged by a whole factor, large ones reduced. The reference images of an edit stand to its left.
    """
    shown = shown.first(MAX_PICTURES)
    references = references_of(shown.prompts, *shown.images.shape[-3:-1])
    pictures = []
    for index, (pixels, prompt) in enumerate(zip(shown.images, shown.prompts, strict=True)):
        row = [_fit(Image.fromarray(part)) for part in (*references[index], *_stills(pixels))]
        picture = row[-1]
        canvas = Image.new("RGB", (len(row) * picture.width, picture.height + _CAPTION_HEIGHT), "white")
        for place, part in enumerate(row):
            canvas.paste(part, (place * picture.width, 0))
        score = "" if shown.scores is None else f"  {shown.scores[index]:.2f}"
        font = ImageFont.load_default(12)
        text = " ".join((prompt.target or prompt.text).split())[: canvas.width]
        while text and font.getlength(text + score) > canvas.width - 4:
            text = text[:-1]
        ImageDraw.Draw(canvas).text((2, picture.height + 1), text + score, "black", font=font)
        pictures.append(canvas)
    return pictures


def image_grid(pictures: Sequence[Image.Image], *, columns: int = 8) -> Image.Image:
    """Pictures of one size in rows of at most `columns`, and of fewer if they are wide."""
    width, height = pictures[0].size
    columns = min(max(1, columns * MAX_WIDTH // width), columns, len(pictures))
    rows = math.ceil(len(pictures) / columns)
    canvas = Image.new("RGB", (columns * (width + _GAP) - _GAP, rows * (height + _GAP) - _GAP), "white")
    for index, picture in enumerate(pictures):
        row, column = divmod(index, columns)
        canvas.paste(picture, (column * (width + _GAP), row * (height + _GAP)))
    return canvas


def save_image(picture: Image.Image, path: Path) -> None:
    """Write a picture as PNG.

    Raises:
        BackendError: the folder cannot be written to, such as when the disk is full.
    """
    with writing(path):
        picture.save(path)


def before_after(folder: Path) -> None:
    """Join `eval_before.png` and `eval_after.png` in `folder` into `before_after.png`, if both are there and whole.

    Wide ones stand one above the other: a page would show the pair too small.
    """
    paths = [folder / f"eval_{name}.png" for name in ("before", "after")]
    if not all(path.is_file() for path in paths):
        return
    halves = []
    for title, path in zip(("before", "after"), paths, strict=True):
        try:
            with Image.open(path) as picture:
                canvas = Image.new("RGB", (picture.width, picture.height + 24), "white")
                canvas.paste(picture, (0, 24))
        except OSError as error:  # a crash may have cut the file off
            logger.warning("%s cannot be read, so before_after.png is left out: %s", path, error)
            return
        ImageDraw.Draw(canvas).text((2, 3), title, "black", font=ImageFont.load_default(16))
        halves.append(canvas)
    width, height = halves[0].size
    right, down = (0, height + 24) if width > _BESIDE else (width + 24, 0)
    joined = Image.new("RGB", (width + right, height + down), "white")
    joined.paste(halves[0], (0, 0))
    joined.paste(halves[1], (right, down))
    save_image(joined, folder / "before_after.png")


def _stills(pixels: np.ndarray) -> list[np.ndarray]:
    """An image `[H, W, 3]`, or the first, the middle and the last frame of a video `[F, H, W, 3]`."""
    if pixels.ndim == 3:
        return [pixels]
    return [pixels[place] for place in sorted({0, len(pixels) // 2, len(pixels) - 1})]


def _fit(picture: Image.Image) -> Image.Image:
    if picture.width > MAX_WIDTH:
        height = max(1, round(picture.height * MAX_WIDTH / picture.width))
        return picture.resize((MAX_WIDTH, height), Image.Resampling.LANCZOS)
    factor = max(1, MIN_WIDTH // picture.width)
    return picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)
