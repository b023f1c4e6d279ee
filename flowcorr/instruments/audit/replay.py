"""One correction on some dumped training steps, by the functions that training calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowcorr.algorithm import MeasuredBands
from flowcorr.algorithm.apply import sees_windows
from flowcorr.config.rules import check_loss
from flowcorr.correction import RolloutCorrectionConfig
from flowcorr.dumps import DumpedTerms
from flowcorr.errors import ConfigError
from flowcorr.instruments.audit.corrected import Corrected, corrected
from flowcorr.instruments.dumped_loss import hides_limit, without_clipped_shares
from flowcorr.instruments.setting import Setting
from flowcorr.instruments.steps import DumpedRun, completed, gap_terms
from flowcorr.losses import loss_of
from flowcorr.metrics import Metrics
from flowcorr.records import Terms

# Terms at a time: many small steps share the cost of a call, and what a call works on stays small.
CHUNK_TERMS = 2**18


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoggedSteps:
    """Some training steps in one mode.

    Attributes:
        terms: of all of them, `S` samples in the order of the steps.
        group_ids: `[S]`; no two steps share a group.
        bypass: whether the steps were in bypass mode.
        sizes: samples of each step.
        owners: `[S]`, which of the steps a sample belongs to.
        before_update: `[S, T]` bool, terms that were scored before their step's first update; None where unknown.
        setting: their loss and schedule.
    """

    terms: Terms
    setting: Setting
    group_ids: Tensor
    bypass: bool
    sizes: tuple[int, ...]
    owners: Tensor
    before_update: Tensor | None

    def sums(self, values: Tensor) -> Tensor:
        """Sums of `[S, T]` values over the terms of each step, float64."""
        zeros = torch.zeros(len(self.sizes), dtype=torch.float64)
        return zeros.index_add_(0, self.owners, values.double().sum(1))

    def rows(self) -> Iterator[slice]:
        """Where each step's samples are."""
        end = 0
        for size in self.sizes:
            yield slice(end, end + size)
            end += size


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replayed:
    """Some steps under one correction.

    Attributes:
        coefficients: `[S, T]` float64, `d loss / d log_prob` of each step's mean loss.
        corrected: the terms after the correction.
        metrics: `rollout_corr/*` and `actor/*`, as in training.
        weights: number, sum and sum of squares of the weights that multiply the loss; empty without any.
        loss_sum, count: of the loss, over all steps.
    """

    coefficients: Tensor
    corrected: Corrected
    metrics: Metrics
    weights: Mapping[str, float]
    loss_sum: float
    count: float


def chunks(run: DumpedRun) -> Iterator[LoggedSteps]:
    """Dumped steps in order, as many of one kind at a time as make about `CHUNK_TERMS` terms; see `stack`.

    Steps whose loss is code of the run's own that was not imported are left out.
    """
    parts: list[DumpedTerms] = []
    setting: Setting | None = None
    for step in run.replayable:
        part = run.load(step)
        full = sum(earlier.old_log_probs.numel() for earlier in parts) >= CHUNK_TERMS
        alike = not parts or (_kind(part), run.settings[step]) == (_kind(parts[0]), setting)
        if parts and (full or not alike):
            assert setting is not None, "there is a step"
            yield stack(parts, setting, run.levels, of_flowcorr=run.of_flowcorr)
            parts = []
        parts.append(part)
        setting = run.settings[step]
    if parts:
        assert setting is not None, "there is a step"
        yield stack(parts, setting, run.levels, of_flowcorr=run.of_flowcorr)


def stack(
    parts: Sequence[DumpedTerms],
    setting: Setting,
    levels: Tensor | None = None,
    *,
    of_flowcorr: bool = False,
) -> LoggedSteps:
    """Steps of one mode and loss, with the same optional tensors.

    Args:
        parts: of the steps.
        setting: their loss and schedule.
        levels: `noise_levels` of the run, where they have to stand for step indices.
        of_flowcorr: whether flowcorr trained them. In its own bypass mode the correction judged every term as the loss
            used it, also those scored after an update. Of another trainer's steps those tell nothing, see `gap_terms`.
    """
    sizes = tuple(len(part.advantages) for part in parts)
    owners = torch.arange(len(parts)).repeat_interleave(torch.tensor(sizes))
    joined = DumpedTerms.concatenate(parts)
    groups = torch.arange(len(owners)) if joined.group_ids is None else joined.group_ids
    groups = groups.unique(return_inverse=True)[1]  # ids of any size, counted from 0 on
    return LoggedSteps(
        terms=completed(joined, levels) if of_flowcorr else gap_terms(joined, levels),
        setting=setting,
        group_ids=groups + len(groups) * owners,
        bypass=joined.bypass,
        sizes=sizes,
        owners=owners,
        before_update=None if joined.before_update is None else joined.before_update.bool(),
    )


def _kind(terms: DumpedTerms) -> tuple[bool, frozenset[str]]:
    return terms.bypass, frozenset(terms.tensors())


def obstacle(steps: LoggedSteps, correction: RolloutCorrectionConfig) -> str:
    """Why these steps cannot be replayed under a correction; empty if they can."""
    if steps.bypass and correction.mode == "decoupled":
        return "in bypass mode, old log-probs are the rollout's; dump a run with bypass_mode=false"
    actor = steps.setting.actor
    try:
        check_loss(actor, correction)
    except ConfigError as error:
        return str(error)
    clips = correction.mode == "bypass" and correction.loss_type == "ppo_clip"
    if hides_limit(actor) and clips and not steps.bypass:
        return "it clips the ratio to the rollout policy, and the clip range was not dumped"
    if steps.terms.num_elements is None and _needs_size(correction):
        return "it needs num_elements, which was not dumped"
    of_correction, of_loss = _kls(steps.terms, correction)
    reads_kl = loss_of(actor, correction).needs_kl
    if (correction.needs_means and of_correction is None) or (reads_kl and of_loss is None):
        return "it needs exact KLs between policies whose step means the run did not compute"
    return ""


def _needs_size(correction: RolloutCorrectionConfig) -> bool:
    robust = any(criterion.mode.needs == "z" or criterion.auto for criterion in correction.criteria)
    return robust or correction.log_ratio_scale in ("sqrt", "sum")


def replay(
    steps: LoggedSteps, correction: RolloutCorrectionConfig, bands: MeasuredBands | None = None
) -> Replayed:
    """Correct the steps and differentiate their loss, without a KL to the reference.

    Args:
        steps: of a run.
        correction: what is tried.
        bands: of the steps before, for `auto` thresholds in bypass mode; they learn from these steps. None for none.
    """
    setting, log_prob = steps.setting, steps.terms.log_prob.clone().requires_grad_()
    terms = replace(steps.terms, log_prob=log_prob)
    if correction.mode == "bypass":
        terms = replace(terms, old_log_prob=terms.rollout_log_prob, old_kl=terms.rollout_kl)
    after = corrected(
        terms,
        setting,
        correction,
        steps=steps.rows(),
        group_ids=steps.group_ids,
        before_update=steps.before_update,
        bands=bands or setting.bands(),
    )
    per_term = correction.mode != "bypass" and not sees_windows(setting.actor, correction)
    terms = after.terms.per_term() if per_term else after.terms
    loss = loss_of(setting.actor, correction).objective(terms, setting.actor)
    loss.loss_sum.backward()
    assert log_prob.grad is not None
    finite = (terms.log_prob - terms.old_log_prob + terms.advantage).detach().isfinite()
    finite = finite.view(log_prob.shape) & after.judged
    over_all = correction.rollout_rs_denominator == "all"
    counts = steps.sums(finite if over_all else finite & after.keep).clamp(min=1)
    return Replayed(
        coefficients=log_prob.grad.double() / counts[steps.owners].unsqueeze(1),
        corrected=after,
        metrics=after.metrics.merge(
            without_clipped_shares(loss.metrics) if hides_limit(setting.actor) else loss.metrics
        ),
        weights=_weights(after, steps.terms, correction),
        loss_sum=float(loss.loss_sum.detach()),
        count=float(loss.count_all if over_all else loss.count_kept),
    )


def _weights(after: Corrected, terms: Terms, correction: RolloutCorrectionConfig) -> dict[str, float]:
    """The weights of the terms whose drift is finite; rejection changes none."""
    if after.terms.weight is None:
        return {}
    target = terms.log_prob if correction.mode == "bypass" else terms.old_log_prob
    valid = after.judged & (target - terms.rollout_log_prob).isfinite()
    weight = after.terms.weight.view(valid.shape).double()[valid]
    return {
        "weighted_terms": len(weight),
        "weights": float(weight.sum()),
        "squared_weights": float(weight.square().sum()),
    }


def _kls(terms: Terms, correction: RolloutCorrectionConfig) -> tuple[Tensor | None, Tensor | None]:
    """The exact KLs `[S, T]` that the correction and the loss look at, where they are known."""
    if correction.mode == "bypass":
        return terms.rollout_kl, terms.rollout_kl
    return terms.old_rollout_kl, terms.old_kl
