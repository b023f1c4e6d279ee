"""Group-relative advantages: how much better a sample is than the others of its prompt.

After rejection, a sample is compared with the kept terms of its group. The loss sums over terms, so a sample counts
once for each kept step: that is its weight in its group's mean, and with every step rejected it is no member any more.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from flowcorr.distributed import gather_rows
from flowcorr.errors import BatchError, ConfigError, unknown_choice
from flowcorr.metrics import Stats, mean
from flowcorr.records import check_shape, check_tensor

AdvantageStd = Literal["group", "global", "none"]
ADVANTAGE_STDS = ("group", "global", "none")
# The largest reward. Squares of larger ones overflow, and with an infinite std every advantage is 0.
LARGEST = 1e100


def group_advantages(
    rewards: Tensor, group_ids: Tensor, *, std: AdvantageStd = "group", eps: float = 1e-4
) -> Tensor:
    """`(reward - mean of its group) / (std + eps)`.

    Samples of a group of one, or of a group of equal rewards, get exactly 0. Source: GRPO, arXiv:2402.03300,
    section 4.1.2; `none` after Dr. GRPO, arXiv:2503.20783.

    Args:
        rewards: `[B]`.
        group_ids: `[B]`, any integers in any order; samples of one prompt share one.
        std: unbiased standard deviation of the `group`, of the rewards of all ranks (`global`), or `none` for 1.
        eps: added to the standard deviation; unused with `none`.

    Returns:
        `[B]` in the dtype of `rewards`, which is float64 in the trainer; float32 if they are integers or of half
        precision. Computed in float64.

    Raises:
        ConfigError: `std` is unknown.
        BatchError: no tensors, shapes differ, or a reward is not finite or beyond `LARGEST`.
    """
    if std not in ADVANTAGE_STDS:
        raise ConfigError(unknown_choice("algorithm.advantage_std", std, ADVANTAGE_STDS))
    _check(rewards, group_ids)
    values = rewards.double()
    groups, counts, equal = _groups(values, group_ids)
    # The group's mean is the baseline: it takes out how hard the prompt is. Each reward is part of its own baseline,
    # so for a group of n the expected gradient is (n - 1) / n of the unbiased one.
    mean = _sum_by_group(values, groups, counts) / counts
    centred = values - mean[groups]
    scaled = centred if std == "none" else centred / (_scale(values, centred, groups, counts, std) + eps)
    # Exactly 0: the mean of equal rewards may round to another number, which a small eps would blow up.
    result = torch.where(equal[groups], 0.0, scaled)
    return result.to(torch.promote_types(rewards.dtype, torch.float32))


def recentre(advantages: Tensor, group_ids: Tensor, keep: Tensor) -> Tensor:
    """Recentre advantages to mean 0 over the kept terms of each group.

    A group of which every term is kept, and one of which none is, keep theirs to the last bit; a sample that is left
    alone gets 0. Nothing is divided by the std again.

    Args:
        advantages: `[B]`, with mean 0 over each whole group.
        group_ids: `[B]`, any integers in any order; groups must be whole.
        keep: `[B, T]` bool, False where a term was rejected.

    Returns:
        `[B]` like `advantages`; computed in float64.

    Raises:
        BatchError: shapes differ.
    """
    groups, sizes, kept = _kept_terms(group_ids, keep)
    check_shape("advantages", advantages, tuple(group_ids.shape))
    values, num_kept = advantages.double(), _sum_by_group(kept, groups, sizes)
    mean = _sum_by_group(kept * values, groups, sizes) / num_kept.clamp(min=1)
    partly = (num_kept > 0) & (num_kept < sizes * keep.shape[1])
    return torch.where(partly[groups], (values - mean[groups]).to(advantages.dtype), advantages)


def most_varied(rewards: Tensor, group_ids: Tensor, count: int) -> Tensor:
    """Places of the `count` samples of each group whose rewards have the largest variance.

    Among sorted rewards these are the `k` highest and the `count - k` lowest for some `k`. Of several `k` whose
    variances are equal to rounding, the one nearest to `count / 2` is taken, and of two such the larger. Equal rewards
    are ordered by place, so the choice among them does not depend on what the samples show. Source: max-variance
    down-sampling, PODS, arXiv:2504.13818, algorithm 2.

    Args:
        rewards: `[B]`.
        group_ids: `[B]`, any integers in any order; samples of one prompt share one.
        count: at least 1; a group of no more samples is taken whole.

    Returns:
        `[B']`, ascending, on the device of `rewards`.

    Raises:
        BatchError: as in `group_advantages`.
    """
    _check(rewards, group_ids)
    values, owners = rewards.double().cpu(), group_ids.cpu()
    chosen: list[int] = []
    for group in owners.unique():
        members = (owners == group).nonzero().squeeze(1)
        ranked = members[values[members].argsort(stable=True)]
        size = min(count, len(ranked))
        tops = range(size, -1, -1)
        subsets = [torch.cat([ranked[: size - top], ranked[len(ranked) - top :]]) for top in tops]
        variances = [float(values[subset].var(correction=0)) for subset in subsets]
        # Equal to rounding, so that another machine's rounding does not choose other samples.
        widest = [place for place, one in enumerate(variances) if one >= max(variances) * (1 - 1e-9)]
        best = min(widest, key=lambda place: abs(2 * tops[place] - size))
        chosen += subsets[best].tolist()
    return torch.tensor(sorted(chosen), dtype=torch.int64, device=rewards.device)


def selection_stats(
    rewards: Tensor, group_ids: Tensor, chosen: Tensor, *, std: AdvantageStd = "group"
) -> Stats:
    """`reward/learned_advantage`: the mean of the chosen samples' advantages among all samples of their groups.

    It is the distance, in the unit of advantages, from the mean of a group to the mean of its chosen samples.
    Advantages among the chosen alone have mean 0.

    Args:
        rewards, group_ids, std: as in `group_advantages`, of whole groups.
        chosen: `[B']`, places of the samples that are learned from.
    """
    advantages = group_advantages(rewards, group_ids, std=std)[chosen]
    return {"reward/learned_advantage": mean(advantages.sum(), len(chosen))}


def whole_groups(group_ids: Tensor, failed: np.ndarray) -> Tensor:
    """Indices `[B']` of the samples of groups without a sample that `failed` `[B]`."""
    dropped = group_ids[torch.as_tensor(failed, device=group_ids.device)].unique()
    return (~torch.isin(group_ids, dropped)).nonzero().squeeze(1)


def drop_small_groups(keep: Tensor, group_ids: Tensor) -> Tensor:
    """`keep` `[B, T]` without the groups of which fewer than two samples have a kept term.

    Raises:
        BatchError: shapes differ.
    """
    groups, sizes, kept = _kept_terms(group_ids, keep)
    members = _sum_by_group((kept > 0).double(), groups, sizes)
    return keep & (members >= 2)[groups].unsqueeze(1)


def rejection_stats(keep: Tensor, group_ids: Tensor) -> Stats:
    """Shares of groups that rejection dropped or thinned.

    `rollout_corr/dropped_group_fraction` counts groups without a kept term, `rollout_corr/partial_group_fraction`
    groups with kept and rejected terms, which `recentre` shifts.
    """
    groups, sizes, kept = _kept_terms(group_ids, keep)
    num_kept = _sum_by_group(kept, groups, sizes)
    dropped, whole = num_kept == 0, num_kept == sizes * keep.shape[1]
    return {
        "rollout_corr/dropped_group_fraction": mean(dropped.sum(), sizes.numel()),
        "rollout_corr/partial_group_fraction": mean((~(dropped | whole)).sum(), sizes.numel()),
    }


def _kept_terms(group_ids: Tensor, keep: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each sample's group as 0..G-1 `[B]`, group sizes `[G]`, and each sample's kept terms `[B]` float64."""
    check_tensor("keep", keep, "[B, T] of bools")
    if keep.dim() != 2:
        raise BatchError(f"keep has shape {list(keep.shape)}; it must be [B, T]")
    check_shape("group_ids", group_ids, (keep.shape[0],))
    _, groups, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)
    return groups, sizes, keep.double().sum(1)


def _scale(values: Tensor, centred: Tensor, groups: Tensor, counts: Tensor, std: str) -> Tensor:
    if std == "global":
        everything = gather_rows(values, "the rewards of a step")
        return everything.std() if everything.numel() > 1 else values.new_ones(())
    squares = _sum_by_group(centred.square(), groups, counts)
    # n - 1: the deviations are from the group's own mean. A group of one has none, and gets 0 by `equal` in any case.
    return torch.sqrt(squares / (counts - 1).clamp(min=1))[groups]


def _groups(values: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each sample's group as 0..G-1 `[B]`, and each group's size and whether its rewards are equal `[G]`."""
    _, groups, counts = torch.unique(group_ids, return_inverse=True, return_counts=True)
    start = values.new_zeros(counts.shape)
    low = start.scatter_reduce(0, groups, values, "amin", include_self=False)
    high = start.scatter_reduce(0, groups, values, "amax", include_self=False)
    return groups, counts, low == high


def _sum_by_group(values: Tensor, groups: Tensor, counts: Tensor) -> Tensor:
    # On the host, where index_add adds in the order of the samples; on a GPU it adds in any.
    sums = torch.zeros(counts.shape, dtype=values.dtype).index_add(0, groups.cpu(), values.cpu())
    return sums.to(values.device)


def _check(rewards: Tensor, group_ids: Tensor) -> None:
    check_tensor("rewards", rewards, "[B]")
    if rewards.dim() != 1:
        raise BatchError(f"rewards has shape {list(rewards.shape)}; it must be [B]")
    check_shape("group_ids", group_ids, tuple(rewards.shape))
    bad = (~(rewards.abs() <= LARGEST)).nonzero().flatten().tolist()
    if bad:
        raise BatchError(
            f"the reward of sample {bad[0]} is {rewards[bad[0]].item()} ({len(bad)} of {rewards.numel()} are "
            f"not finite, or beyond {LARGEST:g}); fix the reward function, or set reward.on_error=drop_group"
        )
