"""Statistics of rewards, and of images, which show more than a reward: it may rise while the images get worse.

No statistic is ever optimised. One that drifts far from its start while the reward rises is the usual sign that the
policy exploits the reward, see `flowcorr.health.rules`.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from flowcorr.metrics import Over, Stats, mean, total
from flowcorr.records import ImageArray
from flowcorr.rewards.base import RewardOutput
from flowcorr.rewards.jpeg import BYTES_PER_KB, jpeg_kilobytes

DARK = 0.2  # of the largest luma
SATURATED = 250  # of 255
PER_GROUP = 4  # images of a prompt that are measured in training
_LUMA = (0.299, 0.587, 0.114)  # of red, green and blue; ITU-R BT.601


def image_statistics(images: Iterable[np.ndarray]) -> dict[str, np.ndarray]:
    """Statistics `[B]` float64 of images `[H, W, 3]` uint8 or videos `[F, H, W, 3]`; luma goes from 0 to 1.

    Returns:
        `dark`: share of pixels with a luma below .2. `saturated`: share of pixels with a channel of 250 or more.
        `contrast`: standard deviation of the luma. `sharpness`: mean absolute difference of the luma of neighbouring
        pixels. `bits_per_pixel`: size as a JPEG of quality 95. Of a video, they are means over its frames, and
        `motion` is the mean absolute difference of the luma of neighbouring frames.
    """
    rows = [_statistics(image if image.ndim == 4 else image[None]) for image in images]
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def diversity(images: ImageArray, groups: np.ndarray) -> np.ndarray:
    """Diversity `[G]` of the images of each of the `groups` `[B]`: their mean std, 0 to .5; of videos by frame."""
    frames = [images] if images.ndim == 4 else [images[:, frame] for frame in range(images.shape[1])]
    return np.array(
        [np.mean([_mean_std(frame[groups == group]) for frame in frames]) for group in np.unique(groups)]
    )


def image_metrics(images: ImageArray, groups: np.ndarray, whole: np.ndarray) -> Stats:
    """The `reward/image/*` metrics: means over the first `PER_GROUP` images of each group for which `whole` is true."""
    rows = [np.flatnonzero((groups == group) & whole)[:PER_GROUP] for group in np.unique(groups)]
    rows = [members for members in rows if len(members)]
    if not rows:
        return {}
    values = image_statistics(images[row] for members in rows for row in members)
    values["diversity"] = np.concatenate([diversity(images[members], members * 0) for members in rows])
    return {f"reward/image/{name}": mean(float(value.sum()), len(value)) for name, value in values.items()}


def reward_metrics(scored: RewardOutput, groups: np.ndarray) -> Stats:
    """The `reward/*` metrics of a step, over the samples that were scored.

    Args:
        scored: what the reward returned, `[B]`.
        groups: `[B]`, the samples' groups.
    """
    failed = scored.failed
    scores = torch.as_tensor(scored.scores[~failed])
    good = Over(torch.ones_like(scores, dtype=torch.bool))
    members = [scored.scores[(groups == group) & ~failed] for group in np.unique(groups)]
    flat = sum(int(len(member) < 2 or np.ptp(member) == 0) for member in members)
    stats = {
        "reward/mean": good.mean(scores),
        "reward/std": good.std(scores),
        "reward/min": good.min(scores),
        "reward/max": good.max(scores),
        "reward/failed_samples": total(int(failed.sum())),
        "reward/zero_std_group_fraction": mean(flat, len(members)),
    }
    for name, values in scored.extra.items():  # a rank may lack some of them
        finite = values[np.isfinite(values)]
        stats[f"reward/{name}"] = mean(float(finite.sum()), len(finite))
    return stats


def _statistics(frames: np.ndarray) -> dict[str, float]:
    """Means over the frames `[F, H, W, 3]`, of which one at a time becomes floating point."""
    by_frame, motion, before = [], [], None
    for frame in frames:
        luma = torch.from_numpy(frame).float() @ torch.tensor(_LUMA) / 255
        across, down = luma.diff(dim=1).abs().mean(), luma.diff(dim=0).abs().mean()
        by_frame.append(
            {
                "dark": (luma < DARK).float().mean(),
                "saturated": torch.from_numpy(frame.max(-1) >= SATURATED).float().mean(),
                "contrast": luma.std(correction=0),
                "sharpness": (across + down) / 2,
                "bits_per_pixel": jpeg_kilobytes(frame[None])[0] * BYTES_PER_KB * 8 / luma.numel(),
            }
        )
        if before is not None:
            motion.append(float((luma - before).abs().mean()))
        before = luma
    means = {name: float(np.mean([float(values[name]) for values in by_frame])) for name in by_frame[0]}
    return means | ({"motion": float(np.mean(motion))} if motion else {})


def _mean_std(images: np.ndarray) -> float:
    """Mean over the pixels of the standard deviation over images `[n, H, W, 3]`, of values from 0 to 1."""
    values = torch.from_numpy(images).float() / 255
    variance = values.square().mean(0) - values.mean(0).square()
    return float(variance.clamp(min=0).sqrt().mean())
