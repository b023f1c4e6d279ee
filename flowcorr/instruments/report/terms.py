"""How the dumped log-probs of some runs are spread: ratios as the loss clips them, and the rollout mismatch by step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flowcorr.health.setting import Setting
from flowcorr.instruments.dumped_loss import hides_limit, ratio_limit
from flowcorr.instruments.report.runs import Group
from flowcorr.instruments.step_files import holds_trainer, trained_log_probs
from flowcorr.instruments.steps import as_terms
from flowcorr.losses import Loss, clip_by_term, loss_of, pool_log_ratio
from flowcorr.records import Terms

_SHOWN = 0.998  # of the values


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spread:
    """The finite dumped terms of a group of runs.

    Attributes:
        num_steps: training steps that were read.
        num_bypass: how many of them were in bypass mode.
        num_updates: how many of them hold log-probs of the current policy.
        ratios: `[N]` of these, log-ratios as the loss exponentiates them; where its clip range differs by step,
            `ratio - 1` in clip ranges, of the steps whose range is known.
        limits: what the loss clips them to, infinite where it does not; None where that is not known, or it clips
            nothing.
        in_ranges: whether `ratios` are in clip ranges.
        hides_limits: whether that is not known of any step.
        mismatch: by step index, `[n]` each: old less rollout log-probs, in bypass mode current less rollout. A step
            that nobody trained is left out.
    """

    num_steps: int
    num_bypass: int
    num_updates: int
    ratios: Tensor
    limits: tuple[float, float] | None
    in_ranges: bool
    hides_limits: bool
    mismatch: Mapping[int, Tensor]


def read_spread(group: Group) -> Spread | None:
    """The spread of the terms that the runs of a group dumped; None if they dumped none."""
    runs = [run.dumped for run in group.runs if run.dumped is not None]
    if not runs:
        return None
    mismatch: dict[int, list[Tensor]] = {}
    updates: list[tuple[Terms, Setting]] = []
    num_steps = num_bypass = 0
    for run in runs:
        for number, step in run.steps.items():
            dumped = step.terms
            terms = as_terms(dumped)
            num_steps, num_bypass = num_steps + 1, num_bypass + dumped.bypass
            if dumped.current_log_probs is not None:
                updates.append((terms, run.settings[number]))
            if not holds_trainer(dumped):
                continue
            delta = trained_log_probs(dumped) - terms.rollout_log_prob
            if terms.keep is not None:
                delta = delta.where(terms.keep, torch.nan)
            for index in terms.step_index.unique().tolist():
                mismatch.setdefault(index, []).append(delta[terms.step_index == index])
    limits = {_limits(setting) for _, setting in updates}
    in_ranges = len(limits) > 1 or any(isinstance(_limit(setting), Sequence) for _, setting in updates)
    ratios = [_ratios(terms, setting, in_ranges=in_ranges) for terms, setting in updates]
    return Spread(
        num_steps=num_steps,
        num_bypass=num_bypass,
        num_updates=len(updates),
        ratios=_finite(ratios) if ratios else torch.empty(0),
        limits=(-1.0, 1.0) if in_ranges else next(iter(limits), None),
        in_ranges=in_ranges,
        hides_limits=any(hides_limit(setting.actor, _loss(setting)) for _, setting in updates),
        mismatch={index: known for index, parts in sorted(mismatch.items()) if len(known := _finite(parts))},
    )


def shares(values: Tensor, view: float, bins: int) -> list[float]:
    """Shares of `[N]` values in bins of one width from `-view` to `view`; values beyond are in no bin."""
    return (torch.histc(values, bins, min=-view, max=view) / max(len(values), 1)).tolist()


def reach(values: Tensor, limits: tuple[float, float] | None = None) -> float:
    """Half the width of a picture around 0 that shows nearly all `[N]` values, and limits that are not far away."""
    rank = math.ceil(_SHOWN * len(values))
    most = float(values.abs().kthvalue(rank)[0]) if rank else 0.0
    near = [
        abs(limit) for limit in limits or () if abs(limit) <= 4 * most or (not most and math.isfinite(limit))
    ]
    return 1.1 * max([most, *near]) or 1e-6


def _ratios(terms: Terms, setting: Setting, *, in_ranges: bool) -> Tensor:
    loss = _loss(setting)
    log_ratio = loss.log_ratio(terms.log_prob - terms.old_log_prob, terms.old_kl, terms.std)
    log_ratio = pool_log_ratio(log_ratio, log_ratio.isfinite(), setting.actor.ratio_level)
    if not in_ranges:
        return log_ratio
    limit = _limit(setting)
    if limit is None:
        return log_ratio[:0]
    return log_ratio.expm1() / clip_by_term(limit, terms.step_index)


def _loss(setting: Setting) -> Loss:
    return loss_of(setting.actor, setting.correction)


def _limit(setting: Setting) -> float | Sequence[float] | None:
    """Largest distance of a ratio from 1 under the loss of the update; None if unknown or unbounded."""
    return ratio_limit(setting.actor, _loss(setting))


def _limits(setting: Setting) -> tuple[float, float] | None:
    """The log-ratios that the loss clips to; None as in `_limit`, and for a range by step of the schedule."""
    limit, loss = _limit(setting), _loss(setting)
    if limit is None or isinstance(limit, Sequence):
        return None
    assert loss.limit is not None, "it has a limit"
    low = math.log1p(-limit) if limit < 1 and not loss.limit.is_cap else -math.inf
    return low, math.log1p(limit)


def _finite(parts: Sequence[Tensor]) -> Tensor:
    values = torch.cat([part.flatten() for part in parts]).float()
    return values[values.isfinite()]
