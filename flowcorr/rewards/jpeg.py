"""JPEG size as a reward: needs no model and no target. Source: DDPO, arXiv:2305.13301, section 5.1."""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np

from flowcorr.records import Prompt
from flowcorr.rewards.base import RewardOutput

QUALITY = 95
BYTES_PER_KB = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class JpegCompressibility:
    """Minus the size of the image as a JPEG at quality 95, in kB of 1000 bytes."""

    name = "jpeg_compressibility"
    extras = ()
    overlaps = True

    def __call__(self, images: np.ndarray, prompts: list[Prompt]) -> RewardOutput:
        """Score images `[B, H, W, 3]` uint8; the prompts do not matter."""
        return RewardOutput(scores=-jpeg_kilobytes(images))


@dataclass(frozen=True, slots=True, kw_only=True)
class JpegIncompressibility:
    """The size of the image as a JPEG at quality 95, in kB of 1000 bytes."""

    name = "jpeg_incompressibility"
    extras = ()
    overlaps = True

    def __call__(self, images: np.ndarray, prompts: list[Prompt]) -> RewardOutput:
        """Score images `[B, H, W, 3]` uint8; the prompts do not matter."""
        return RewardOutput(scores=jpeg_kilobytes(images))


def jpeg_kilobytes(images: np.ndarray) -> np.ndarray:
    """JPEG sizes `[B]` in kB of images `[B, H, W, 3]` uint8."""
    return np.array([_jpeg_bytes(image) for image in images], dtype=np.float64) / BYTES_PER_KB


def _jpeg_bytes(image: np.ndarray) -> int:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="JPEG", quality=QUALITY)
    return buffer.tell()
