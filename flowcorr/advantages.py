"""Group-relative advantages: how much better a sample is than the others of its prompt."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flowcorr import metrics
from flowcorr.errors import BatchError, ConfigError, unknown_choice
from flowcorr.metrics import Metrics
from flowcorr.records import check_shape

AdvantageStd = Literal["group", "global", "none"]
ADVANTAGE_STDS = ("group", "global", "none")


def group_advantages(
    rewards: Tensor, group_ids: Tensor, *, std: AdvantageStd = "group", eps: float = 1e-4
) -> Tensor:
    """`(reward - mean of its group) / (std + eps)`.

    Samples of a group of one, or of a group of equal rewards, get exactly 0. Source: GRPO, arXiv:2402.03300,
    section 4.1.2; `none` after Dr. GRPO, arXiv:2503.20783.

    Args:
        rewards: `[B]`.
        group_ids: `[B]`, any integers in any order; samples of one prompt share one.
        std: unbiased standard deviation of the `group`, of all rewards (`global`), or `none` for 1.
        eps: added to the standard deviation; unused with `none`.

    Returns:
        `[B]` float32, or float64 if `rewards` are; computed in float64.

    Raises:
        ConfigError: `std` is unknown.
        BatchError: shapes differ, or a reward is not finite.
    """
    if std not in ADVANTAGE_STDS:
        raise ConfigError(unknown_choice("algorithm.advantage_std", std, ADVANTAGE_STDS))
    _check(rewards, group_ids)
    values = rewards.double()
    groups, counts, equal = _groups(values, group_ids)
    mean = _sum_by_group(values, groups, counts) / counts
    centred = values - mean[groups]
    scaled = centred if std == "none" else centred / (_scale(values, centred, groups, counts, std) + eps)
    # Exactly 0: the mean of equal rewards may round to another number, which a small eps would blow up.
    result = torch.where(equal[groups], 0.0, scaled)
    return result.to(torch.promote_types(rewards.dtype, torch.float32))


def advantage_stats(rewards: Tensor, group_ids: Tensor) -> Metrics:
    """`reward/zero_std_group_fraction`: groups whose rewards are all equal, and that teach nothing."""
    _check(rewards, group_ids)
    _, counts, equal = _groups(rewards.double(), group_ids)
    return Metrics.from_stats({"reward/zero_std_group_fraction": metrics.mean(equal.sum(), counts.numel())})


def _scale(values: Tensor, centred: Tensor, groups: Tensor, counts: Tensor, std: str) -> Tensor:
    if std == "global":
        return values.std() if values.numel() > 1 else values.new_ones(())
    squares = _sum_by_group(centred.square(), groups, counts)
    return torch.sqrt(squares / (counts - 1).clamp(min=1))[groups]


def _groups(values: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each sample's group as 0..G-1 `[B]`, and each group's size and whether its rewards are equal `[G]`."""
    _, groups, counts = torch.unique(group_ids, return_inverse=True, return_counts=True)
    start = values.new_zeros(counts.shape)
    low = start.scatter_reduce(0, groups, values, "amin", include_self=False)
    high = start.scatter_reduce(0, groups, values, "amax", include_self=False)
    return groups, counts, low == high


def _sum_by_group(values: Tensor, groups: Tensor, counts: Tensor) -> Tensor:
    return values.new_zeros(counts.shape).index_add(0, groups, values)


def _check(rewards: Tensor, group_ids: Tensor) -> None:
    if rewards.dim() != 1:
        raise BatchError(f"rewards has shape {list(rewards.shape)}; it must be [B]")
    check_shape("group_ids", group_ids, tuple(rewards.shape))
    bad = (~torch.isfinite(rewards)).nonzero().flatten().tolist()
    if bad:
        raise BatchError(
            f"the reward of sample {bad[0]} is {rewards[bad[0]].item()} ({len(bad)} of {rewards.numel()} are "
            "not finite); mend the reward function, or set reward.on_error=drop_group"
        )
