"""The tables of an audit: the gap by step of the schedule, what weights would be worth, what presets would do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowcorr.algorithm import MeasuredBands
from flowcorr.algorithm.bands import WARM_UP
from flowcorr.config import Config
from flowcorr.correction import (
    PRESETS,
    RolloutCorrectionConfig,
    compute_rollout_correction_and_rejection_mask,
)
from flowcorr.correction.bounds import SCALES, scale_factor
from flowcorr.correction.robust import OUTLIER_Z, outlier_band
from flowcorr.diagnostics.audit.advice import clip_needed, limit_at
from flowcorr.diagnostics.audit.gap import delta
from flowcorr.diagnostics.clip_noise import QUANTILES
from flowcorr.diagnostics.corrected import corrected
from flowcorr.records import Terms


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGap:
    """The gap at one step of the schedule.

    Attributes:
        step_index: place in the schedule.
        sigma: noise level before the step, where known.
        num_terms: terms measured.
        mean_delta: mean of `delta log p`, nats per latent element: how far the ratios of bypass start off-centre.
        abs_delta: the `QUANTILES` of `|delta log p|`.
        exact_kl: mean exact KL, nats per latent element.
        outside_clip: share of terms whose ratio, as the loss uses it, is outside its limit; None without a limit.
        clip_needed: clip range that bypass needs here.
    """

    step_index: int
    sigma: float | None
    num_terms: int
    mean_delta: float
    abs_delta: tuple[float, ...]
    exact_kl: float
    outside_clip: float | None
    clip_needed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleWorth:
    """The worth of importance weights without a cap.

    Attributes:
        scale: of the log-ratios, `mean`, `sqrt` or `sum`.
        level: `token` or `sequence`.
        ess: effective sample size of the measured weights, a share; too high where few samples were measured.
        chi2: their mean square less 1; None where it overflows.
        expected_ess: the share that the exact KLs of the measured terms imply for many samples like them.
    """

    scale: str
    level: str
    ess: float
    chi2: float | None
    expected_ess: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PresetOutcome:
    """The effect of a preset on the measured batches, at its own thresholds.

    Attributes:
        name: the preset's.
        aliases: its other names.
        rejected_terms, rejected_samples: shares; a sample counts if one of its terms is rejected.
        mean_weight, ess: of the weights that multiply the loss; None where none do.
    """

    name: str
    aliases: tuple[str, ...]
    rejected_terms: float
    rejected_samples: float
    mean_weight: float | None
    ess: float | None

    @property
    def acts(self) -> bool:
        """Whether it rejects anything here or has weights."""
        return self.rejected_terms > 0 or self.mean_weight is not None


def gap_by_step(gap: Terms, distance: Tensor, limit: float | Sequence[float] | None) -> list[StepGap]:
    """The gap at each step of the schedule.

    Args:
        gap: what was measured.
        distance: `[B, T]`, `|ratio - 1|` as the loss has it.
        limit: how far the loss lets a ratio be from 1, a number or one by step index; None where it bounds none.
    """
    log_ratio, kl, sigmas, steps = delta(gap), gap.old_rollout_kl, gap.sigma, []
    assert kl is not None, "a gap has exact KLs"
    assert sigmas is not None, "a gap has noise levels"
    for index in gap.step_index.unique().tolist():
        here = gap.step_index == index
        quantiles = torch.quantile(log_ratio[here].abs(), log_ratio.new_tensor(QUANTILES)).tolist()
        limit_here = None if limit is None else limit_at(limit, index)
        steps.append(
            StepGap(
                step_index=index,
                sigma=sigma if math.isfinite(sigma := float(sigmas[here][0])) else None,
                num_terms=int(here.sum()),
                mean_delta=float(log_ratio[here].mean()),
                abs_delta=tuple(quantiles),
                exact_kl=float(kl[here].mean()),
                outside_clip=None if limit_here is None else fraction(distance[here] > limit_here),
                clip_needed=clip_needed(distance[here]),
            )
        )
    return steps


def worth_of_weights(gap: Terms, num_elements: int) -> list[ScaleWorth]:
    """Weights without a cap at every scale, by the definitions of ESS and chi-squared.

    With `R` the sum of `r^2` over the steps that a weight is of, its `delta` is normal with mean `-R / 2` and variance
    `R / D`, so that `exp(c delta)` has the moments `exp(-c R / 2 + c^2 R / (2 D))` and `exp(-c R + 2 c^2 R / D)`. Terms
    differ in `R`, by their steps of the schedule above all, so the expected share is of the mixture of them. At scale
    `sum` it is `1 / mean(exp(R D))`, which a few large gaps make far smaller than their mean would.
    """
    worth = []
    of_terms, kl = delta(gap), gap.old_rollout_kl
    assert kl is not None, "a gap has exact KLs"
    levels = {
        "token": (of_terms.flatten(), 2 * kl.flatten()),
        "sequence": (of_terms.sum(1), 2 * kl.sum(1)),
    }
    for scale in SCALES:
        factor = scale_factor(scale, num_elements)
        for level, (log_ratio, squared) in levels.items():
            scaled, spread = factor * log_ratio, factor**2 * squared / num_elements
            first, second = _log_mean_exp(scaled), _log_mean_exp(2 * scaled)
            drift = factor * squared
            expected = 2 * _log_mean_exp((spread - drift) / 2) - _log_mean_exp(2 * spread - drift)
            worth.append(
                ScaleWorth(
                    scale=scale,
                    level=level,
                    ess=math.exp(2 * first - second),
                    chi2=math.expm1(second) if second < 700 else None,
                    expected_ess=math.exp(expected),
                )
            )
    return worth


def _log_mean_exp(values: Tensor) -> float:
    return float(values.logsumexp(0)) - math.log(len(values))


def preset_outcomes(gap: Terms, num_elements: int | None, config: Config) -> list[PresetOutcome]:
    """The outcome of each preset on the measured terms of a run."""
    outcomes = []
    # At an audit, the current policy is the old one.
    terms = replace(gap, log_prob=gap.old_log_prob, old_rollout_kl=None, num_elements=num_elements)
    for name, preset in PRESETS.items():
        correction = RolloutCorrectionConfig.from_preset(name)
        after = corrected(terms, config, correction, bands=_bands(terms, config, correction))
        counts, metrics = after.counts(), after.metrics.compute() if correction.applies_weights else {}
        outcomes.append(
            PresetOutcome(
                name=name,
                aliases=preset.aliases,
                rejected_terms=counts["rejected_terms"] / counts["terms"],
                rejected_samples=counts["rejected_samples"] / counts["samples"],
                mean_weight=metrics.get("rollout_corr/rollout_is_mean"),
                ess=metrics.get("rollout_corr/rollout_is_eff_sample_size"),
            )
        )
    return outcomes


def _bands(terms: Terms, config: Config, correction: RolloutCorrectionConfig) -> MeasuredBands | None:
    """The bands by which a correction in bypass mode judges these terms, after training steps like them."""
    if correction.mode != "bypass" or not correction.needs_batch or terms.num_elements is None:
        return None
    bands = MeasuredBands(config)
    for _ in range(WARM_UP):
        corrected(terms, config, correction, bands=bands)
    return bands


def outliers(gap: Terms, num_elements: int) -> tuple[float, float]:
    """The share of terms that `step_z` rejects, and the largest `|ratio - 1|` that is no outlier at any step."""
    keep = compute_rollout_correction_and_rejection_mask(
        gap.old_log_prob,
        gap.rollout_log_prob,
        rollout_rs="step_z",
        rollout_rs_threshold=OUTLIER_Z,
        step_indices=gap.step_index,
        num_elements=num_elements,
    ).keep
    log_ratio, num_steps = delta(gap), int(gap.step_index.max()) + 1
    everywhere = torch.ones_like(log_ratio)
    low, high = outlier_band(log_ratio, everywhere, gap.step_index, num_steps, floor=0.01 / num_elements)
    return fraction(~keep), math.expm1(max(-float(low), float(high)))


def fraction(where: Tensor) -> float:
    """Share of True in a bool tensor."""
    return float(where.double().mean())
