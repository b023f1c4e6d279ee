"""The effect of a correction on training steps, without a model, by the functions that training calls.

A policy gradient is a sum over terms of coefficients, `d loss / d log_prob`, times the gradient of each log-prob, which
the model decides. A correction changes nothing but the coefficients, so two corrections are compared by these alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from flowcorr.algorithm import MeasuredBands
from flowcorr.algorithm.apply import correct, sees_windows
from flowcorr.config.rules import check_loss
from flowcorr.correction import RolloutCorrectionConfig
from flowcorr.dumps import DumpedTerms
from flowcorr.errors import ConfigError
from flowcorr.health.setting import Setting
from flowcorr.instruments.dumped_loss import hides_limit, without_clipped_shares
from flowcorr.instruments.steps import DumpedRun, as_terms
from flowcorr.losses import loss_of
from flowcorr.metrics import Metrics
from flowcorr.records import Terms


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Steps:
    """Some training steps in one mode, under one loss.

    Attributes:
        terms: of all of them, `S` samples in the order of the steps.
        sizes: by training step, its samples.
        setting: their loss and schedule.
        group_ids: `[S]`; no two steps share a group.
        bypass: whether the steps were in bypass mode.
        before_update: `[S, T]` bool, terms that were scored before their step's first update; None where unknown.
    """

    terms: Terms
    sizes: Mapping[int, int]
    setting: Setting
    group_ids: Tensor
    bypass: bool = False
    before_update: Tensor | None = None

    def owners(self) -> Tensor:
        """`[S]`, which of the steps a sample is of."""
        return torch.arange(len(self.sizes)).repeat_interleave(torch.tensor(list(self.sizes.values())))

    def sums(self, values: Tensor) -> Tensor:
        """Sums of `[S, T]` values over the terms of each step, float64."""
        zeros = torch.zeros(len(self.sizes), dtype=torch.float64)
        return zeros.index_add_(0, self.owners(), values.double().sum(1))

    def rows(self) -> Iterator[slice]:
        """The samples of each step."""
        end = 0
        for size in self.sizes.values():
            yield slice(end, end + size)
            end += size


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Effect:
    """Some training steps under one correction.

    Attributes:
        coefficients: `[S, T]` float64, `d loss / d log_prob` of each step's mean loss.
        judged, kept: `[S, T]` bool, the terms that the correction got and those of them that it kept.
        weight: `[S, T]` float64, which multiplies the loss; NaN where the drift is not finite. None without weights.
        metrics: `actor/*`, as in training.
        loss_sum, count: of the loss, over all steps.
    """

    coefficients: Tensor
    judged: Tensor
    kept: Tensor
    weight: Tensor | None
    metrics: Metrics
    loss_sum: float
    count: float


def steps_of(run: DumpedRun) -> list[Steps]:
    """The dumped steps in order, neighbours of one kind as one.

    Steps whose loss is code of the run's own that was not imported are left out.
    """
    loaded = ((step, run.steps[step].terms) for step in run.replayable)
    kinds = groupby(loaded, key=lambda one: (one[1].bypass, one[1].tensors().keys(), run.settings[one[0]]))
    return [stack(dict(parts), setting, of_flowcorr=run.of_flowcorr) for (_, _, setting), parts in kinds]


def stack(parts: Mapping[int, DumpedTerms], setting: Setting, *, of_flowcorr: bool = False) -> Steps:
    """Steps of one mode and loss, with the same optional tensors.

    Args:
        parts: by training step.
        setting: their loss and schedule.
        of_flowcorr: whether flowcorr trained them. In its own bypass mode the correction judged every term as the loss
            used it, also those scored after an update. Of another trainer's steps those tell nothing, see `as_terms`.
    """
    joined, groups, count = DumpedTerms.concatenate(list(parts.values())), [], 0
    for part in parts.values():
        # Ids of any size, counted from where those of the step before end.
        ids = torch.arange(len(part.advantages)) if part.group_ids is None else part.group_ids
        groups.append(count + ids.unique(return_inverse=True)[1])
        count += len(ids)
    terms = as_terms(joined)
    return Steps(
        terms=replace(terms, keep=None) if of_flowcorr else terms,
        sizes={step: len(part.advantages) for step, part in parts.items()},
        setting=setting,
        group_ids=torch.cat(groups),
        bypass=joined.bypass,
        before_update=None if joined.before_update is None else joined.before_update.bool(),
    )


def obstacle(steps: Steps, correction: RolloutCorrectionConfig) -> str:
    """Why these steps cannot be replayed under a correction; empty if they can."""
    if steps.bypass and correction.mode == "decoupled":
        return "in bypass mode, old log-probs are the rollout's; dump a run with bypass_mode=false"
    actor, terms = steps.setting.actor, steps.terms
    try:
        check_loss(actor, correction)
    except ConfigError as error:
        return str(error)
    bypass = correction.mode == "bypass"
    if hides_limit(actor) and bypass and correction.loss_type == "ppo_clip" and not steps.bypass:
        return "it clips the ratio to the rollout policy, and the clip range was not dumped"
    if terms.num_elements is None and (
        correction.needs_batch or correction.log_ratio_scale in ("sqrt", "sum")
    ):
        return "it needs num_elements, which was not dumped"
    of_correction, of_loss = (
        (terms.rollout_kl, terms.rollout_kl) if bypass else (terms.old_rollout_kl, terms.old_kl)
    )
    reads_kl = loss_of(actor, correction).needs_kl
    if (correction.needs_means and of_correction is None) or (reads_kl and of_loss is None):
        return "it needs exact KLs between policies whose step means the run did not compute"
    return ""


def effect(steps: Steps, correction: RolloutCorrectionConfig, bands: MeasuredBands | None = None) -> Effect:
    """Correct the steps and differentiate their loss, without a KL to the reference.

    Args:
        steps: of a run.
        correction: the one that is tried, in decoupled or bypass mode, or off.
        bands: of the steps before, for `auto` thresholds in bypass mode; they learn from these steps. None for none.
    """
    setting, log_prob = steps.setting, steps.terms.log_prob.clone().requires_grad_()
    terms = replace(steps.terms, log_prob=log_prob)
    if correction.mode == "bypass":
        terms = replace(terms, old_log_prob=terms.rollout_log_prob, old_kl=terms.rollout_kl)
    after = _corrected(steps, terms, correction, setting.bands() if bands is None else bands)
    after = after if sees_windows(setting.actor, correction) else after.per_term()
    loss = loss_of(setting.actor, correction).objective(after, setting.actor)
    loss.loss_sum.backward()
    assert log_prob.grad is not None
    everywhere = torch.ones_like(log_prob, dtype=torch.bool)
    judged = everywhere if terms.keep is None else terms.keep.bool()
    kept = everywhere if after.keep is None else after.keep.view(judged.shape)
    finite = (after.log_prob - after.old_log_prob + after.advantage).detach().isfinite()
    finite = finite.view(judged.shape) & judged
    over_all = correction.rollout_rs_denominator == "all"
    counts = steps.sums(finite if over_all else finite & kept).clamp(min=1)
    return Effect(
        coefficients=log_prob.grad.double() / counts[steps.owners()][:, None],
        judged=judged,
        kept=kept,
        weight=None if after.weight is None else _weight(steps.terms, after.weight, correction),
        metrics=without_clipped_shares(loss.metrics) if hides_limit(setting.actor) else loss.metrics,
        loss_sum=float(loss.loss_sum.detach()),
        count=float(loss.count_all if over_all else loss.count_kept),
    )


def _corrected(
    steps: Steps, terms: Terms, correction: RolloutCorrectionConfig, bands: MeasuredBands
) -> Terms:
    """Weigh and reject terms: all at once, or each training step in turn for corrections that need a whole step.

    Returns windows `[S, T]`, or single steps `[S * T]` in bypass mode with a loss of single steps.
    """
    setting, bypass = steps.setting, correction.mode == "bypass"
    in_turn = correction.needs_batch or (correction.rollout_is_batch_normalize and not bypass)
    parts = []
    for rows in steps.rows() if in_turn else [slice(None)]:
        part = terms.select(rows)
        if bypass and not sees_windows(setting.actor, correction):
            part = part.per_term()
        after, _ = correct(
            part,
            correction,
            group_ids=None if bypass else steps.group_ids[rows],
            actor_config=setting.actor if bypass else None,
            num_steps=setting.num_steps,
            noise=bands.noise,
        )
        if bypass and correction.needs_batch:
            assert terms.num_elements is not None, "auto thresholds and z-scores need the size of the latents"
            judged = replace(part, log_prob=part.log_prob.detach())
            if steps.before_update is not None:
                first = steps.before_update[rows].reshape(part.log_prob.shape)
                judged = replace(judged, keep=first if part.keep is None else first & part.keep.bool())
            bands.observe(correction, [judged], terms.num_elements)
        parts.append(after)
    return Terms.concatenate(parts)


def _weight(terms: Terms, weight: Tensor, correction: RolloutCorrectionConfig) -> Tensor:
    """Weights `[S, T]` float64; NaN for a drift that is not finite or a term not judged. Rejection has no effect."""
    target = terms.log_prob if correction.mode == "bypass" else terms.old_log_prob
    valid = (target - terms.rollout_log_prob).isfinite()
    if terms.keep is not None:
        valid = valid & terms.keep.bool()
    return weight.view(valid.shape).double().where(valid, torch.nan)
