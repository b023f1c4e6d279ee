"""Statistics of images, which show what a reward does not: it may rise while the images get worse.

No statistic is ever optimised. One that drifts far from its start while the reward rises is the usual sign that the
policy exploits the reward, see `flowcorr.instruments.rules`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from flowcorr.metrics import Metrics, mean
from flowcorr.rewards.jpeg import BYTES_PER_KB, jpeg_kilobytes
from flowcorr.trainer.residuals import share

DARK = 0.2  # of the largest luma
SATURATED = 250  # of 255
PER_GROUP = 4  # images of a prompt that are measured in training
_LUMA = (0.299, 0.587, 0.114)  # of red, green and blue; ITU-R BT.601


def image_statistics(images: np.ndarray) -> dict[str, np.ndarray]:
    """Statistics `[B]` float64 of images `[B, H, W, 3]` uint8; luma goes from 0 to 1.

    Returns:
        `dark`: share of pixels with a luma below .2. `saturated`: share of pixels with a channel of 250 or more.
        `contrast`: standard deviation of the luma. `sharpness`: mean absolute difference of the luma of neighbouring
        pixels. `bits_per_pixel`: size as a JPEG of quality 95.
    """
    pixels = images.shape[1] * images.shape[2]
    rows = [_statistics(torch.from_numpy(image)) for image in images]
    statistics = {name: np.array([float(row[name]) for row in rows]) for name in rows[0]}
    return statistics | {"bits_per_pixel": jpeg_kilobytes(images) * BYTES_PER_KB * 8 / pixels}


def diversity(images: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Diversity `[G]` of the images `[B, H, W, 3]` uint8 of each of the `groups` `[B]`: their mean std, 0 to .5."""
    by_group = [torch.from_numpy(images[groups == group]).float() / 255 for group in np.unique(groups)]
    variances = [members.square().mean(0) - members.mean(0).square() for members in by_group]
    return np.array([float(variance.clamp(min=0).sqrt().mean()) for variance in variances])


def image_metrics(images: np.ndarray, groups: np.ndarray) -> Metrics:
    """`reward/image/*`: means over the first `PER_GROUP` images `[B, H, W, 3]` uint8 of each of the `groups` `[B]`."""
    if not len(images):
        return Metrics()
    rows = np.concatenate([np.flatnonzero(groups == group)[:PER_GROUP] for group in np.unique(groups)])
    images, groups = images[rows], groups[rows]
    values = image_statistics(images) | {"diversity": diversity(images, groups)}
    return Metrics.from_stats(
        {f"reward/image/{name}": mean(value.sum(), len(value)) for name, value in values.items()}
    )


def image_residuals(images: Tensor, decoded: Tensor) -> dict[str, Tensor]:
    """Residuals `[1]` or `[1, 3]` of an image `[1, ..., H, W, 3]` from `decoded`, its latents decoded here.

    Returns:
        The rows of `RESIDUALS` that begin with `image_`; NaN where an image is too plain to show a fault.
    """
    # One row a channel, of all frames.
    engine, own = (image.float().flatten(0, -4).permute(3, 0, 1, 2) for image in (images, decoded))
    residuals = engine - own
    smooth = torch.nn.functional.avg_pool2d(own, 3, stride=1, padding=1, count_include_pad=False)
    exchanged = own.flip(0) - own
    return {
        "image_error": residuals.abs().mean()[None],
        "image_level": residuals.flatten(1).mean(1)[None],
        "image_contrast": share(residuals, own - own.flatten(1).mean(1)[:, None, None, None])[None],
        "image_detail": share(residuals, own - smooth)[None],
        "image_channels": share(residuals[None], exchanged[None]),
    }


def _statistics(image: Tensor) -> dict[str, Tensor]:
    luma = image.float() @ torch.tensor(_LUMA) / 255
    across, down = luma.diff(dim=1).abs().mean(), luma.diff(dim=0).abs().mean()
    return {
        "dark": (luma < DARK).float().mean(),
        "saturated": (image.amax(-1) >= SATURATED).float().mean(),
        "contrast": luma.std(correction=0),
        "sharpness": (across + down) / 2,
    }
