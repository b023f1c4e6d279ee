"""How the dumped log-probs of some runs are spread: ratios as the loss clips them, and the rollout mismatch by step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flowcorr import dumps
from flowcorr.config.schema import ActorConfig
from flowcorr.instruments.report.runs import Group
from flowcorr.instruments.step_files import noise_levels, trained_log_probs
from flowcorr.instruments.steps import UNBOUNDED, gap_terms
from flowcorr.losses import Loss, clip_by_term, loss_of, pool_log_ratio
from flowcorr.records import Terms

_SHOWN = 0.998  # of the values


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spread:
    """The dumped terms of a group of runs, those that are finite.

    Attributes:
        num_steps: training steps that were read.
        num_bypass: how many of them were in bypass mode.
        ratios: `[N]`, log-ratios as the loss exponentiates them; where its clip range differs by step, `ratio - 1` in
            clip ranges.
        limits: what the loss clips them to, infinite where it does not; None where it clips nothing.
        in_ranges: whether `ratios` are in clip ranges.
        mismatch: by step index, `[n]` each: old less rollout log-probs, in bypass mode current less rollout. A step
            that nobody trained is left out.
    """

    num_steps: int
    num_bypass: int
    ratios: Tensor
    limits: tuple[float, float] | None
    in_ranges: bool
    mismatch: Mapping[int, Tensor]


def read_spread(group: Group) -> Spread | None:
    """The terms that the runs of a group dumped; None where they dumped none.

    Raises:
        ConfigError: a file has been damaged since the run was read.
    """
    paths = [path for run in group.runs for path in run.dumped]
    levels = noise_levels(paths)
    loaded = [dumps.load(path) for path in paths]
    if not loaded:
        return None
    steps = [gap_terms(dumped, levels) for dumped in loaded]
    loss = loss_of(group.setting.actor, group.setting.correction)
    mismatch: dict[int, list[Tensor]] = {}
    for dumped, terms in zip(loaded, steps, strict=True):
        delta = trained_log_probs(dumped) - terms.rollout_log_prob
        if terms.keep is not None:
            delta = delta.where(terms.keep, torch.nan)
        for index in terms.step_index.unique().tolist():
            mismatch.setdefault(index, []).append(delta[terms.step_index == index])
    return Spread(
        num_steps=len(steps),
        num_bypass=sum(dumped.bypass for dumped in loaded),
        ratios=_finite([_ratios(terms, group.setting.actor, loss) for terms in steps]),
        limits=_limits(group.setting.actor, loss),
        in_ranges=isinstance(loss.ratio_limit(group.setting.actor), Sequence),
        mismatch={index: known for index, parts in sorted(mismatch.items()) if len(known := _finite(parts))},
    )


def shares(values: Tensor, view: float, bins: int) -> list[float]:
    """Shares of `[N]` values in bins of one width from `-view` to `view`; those beyond are in none."""
    return (torch.histc(values, bins, min=-view, max=view) / max(len(values), 1)).tolist()


def reach(values: Tensor, limits: tuple[float, float] | None = None) -> float:
    """Half the width of a picture around 0 that shows nearly all `[N]` values, and limits that are not far away."""
    rank = math.ceil(_SHOWN * len(values))
    most = float(values.abs().kthvalue(rank)[0]) if rank else 0.0
    near = [
        abs(limit) for limit in limits or () if abs(limit) <= 4 * most or (not most and math.isfinite(limit))
    ]
    return 1.1 * max([most, *near]) or 1e-6


def _ratios(terms: Terms, actor: ActorConfig, loss: Loss) -> Tensor:
    log_ratio = loss.log_ratio(terms.log_prob - terms.old_log_prob, terms.old_kl, terms.std)
    log_ratio = pool_log_ratio(log_ratio, log_ratio.isfinite(), actor.ratio_level)
    limit = loss.ratio_limit(actor)
    if isinstance(limit, Sequence):
        return log_ratio.expm1() / clip_by_term(limit, terms.step_index)
    return log_ratio


def _limits(actor: ActorConfig, loss: Loss) -> tuple[float, float] | None:
    limit = loss.ratio_limit(actor)
    if loss.limit is None or limit is None or limit == UNBOUNDED:
        return None
    if isinstance(limit, Sequence):
        return -1.0, 1.0
    low = math.log1p(-limit) if limit < 1 and not loss.limit.is_cap else -math.inf
    return low, math.log1p(limit)


def _finite(parts: Sequence[Tensor]) -> Tensor:
    values = torch.cat([part.flatten() for part in parts]).float()
    return values[values.isfinite()]
