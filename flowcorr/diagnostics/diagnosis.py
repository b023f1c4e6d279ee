"""Faults of the log-probs of dumped steps, which come before any question of a correction.

`flowcorr audit` and `flowcorr report` show the same findings. Each cause has a trace that rounding and learning lack,
and says how sure that is; a cause without a trace here is left to `flowcorr doctor`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from flowcorr.dumps import DumpedTerms

Cause = Literal["non_finite", "summed", "one_step", "stale"]

# Mean-pooled log-probs are `-log s - 1.42` on average, so -1.4 to 12 for any std of 6e-6 to 1; sums are D times that.
_LARGEST_MEAN = 25.0
# Two stacks that score alike to float32 rounding differ by less than this, relative to a log-prob.
_ROUNDING = 5e-6
# A step beside the next largest one. Rounding grows towards late steps too: int4 on the embedded model by 25.
_ALONE = 30.0
# Mean beside spread of a step's differences: a shift that all samples share, instead of one that varies with them.
_SHARED = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """One cause, with the trace that it left.

    Attributes:
        cause: its name.
        verdict: a sentence without its full stop: what is wrong, where, since when.
        evidence: the numbers that tell, another sentence.
        remedy: what to do, another sentence.
        sure: whether nothing else is known to leave this trace.
    """

    cause: Cause
    verdict: str
    evidence: str
    remedy: str
    sure: bool = True

    @property
    def level(self) -> Literal["serious", "warning"]:
        """Its severity."""
        return "warning" if self.cause == "stale" else "serious"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepTerms:
    """The terms of one training step, `[B, T]`.

    Attributes:
        step: the training step.
        log_probs: of the trainer's policy.
        rollout_log_probs: of the policy that sampled.
        step_indices: places in the schedule.
        ages: `[B]`, versions that the weights which sampled were behind; None where that is not known.
        keep: `[B, T]` bool, the terms that are judged; None for all.
    """

    step: int
    log_probs: Tensor
    rollout_log_probs: Tensor
    step_indices: Tensor
    ages: Tensor | None = None
    keep: Tensor | None = None

    @property
    def delta(self) -> Tensor:
        """Trainer less rollout, float64; NaN for a term that is left out."""
        delta = self.log_probs.double() - self.rollout_log_probs.double()
        return delta if self.keep is None else torch.where(self.keep, delta, torch.nan)

    def columns(self, kept: Tensor) -> StepTerms:
        """The steps of the window where the `[T]` bools are true."""
        names = (
            "log_probs",
            "rollout_log_probs",
            "step_indices",
            *(("keep",) if self.keep is not None else ()),
        )
        return replace(self, **{name: getattr(self, name)[:, kept] for name in names})

    @property
    def broken(self) -> Tensor:
        """`[B, T]` bool: terms that are judged and have no finite log-prob."""
        broken = ~self.delta.isfinite()
        return broken if self.keep is None else broken & self.keep


def ages_of(terms: DumpedTerms) -> Tensor | None:
    """How many versions the weights that sampled were behind the trainer's, `[B]`; None where that was not dumped."""
    if terms.policy_versions is None or terms.version is None:
        return None
    return terms.version - terms.policy_versions


def trained_columns(steps: Sequence[StepTerms]) -> Tensor:
    """`[T]` bool: steps of the window of which any training step judges a term."""
    judged = [
        torch.ones_like(one.log_probs, dtype=torch.bool) if one.keep is None else one.keep for one in steps
    ]
    return torch.cat(judged).any(0)


def diagnose(steps: Sequence[StepTerms]) -> list[Diagnosis]:
    """The causes that the log-probs tell, the one that hides the others first.

    Args:
        steps: training steps in ascending order; steps of the window that nobody trained are left out.
    """
    trained = trained_columns(steps)
    steps = [one.columns(trained) for one in steps]
    found = [_non_finite(steps), _summed(steps), _one_step(steps), _stale(steps)]
    return [diagnosis for diagnosis in found if diagnosis is not None]


def _non_finite(steps: Sequence[StepTerms]) -> Diagnosis | None:
    bad = [(one, one.broken) for one in steps]
    hit = [(one, where) for one, where in bad if where.any()]
    if not hit:
        return None
    samples, total = (sum(int(count) for count in counts) for counts in (
        (where.any(1).sum() for _, where in hit), (len(where) for _, where in bad)
    ))  # fmt: skip
    places = sorted({int(index) for one, where in hit for index in one.step_indices[where]})
    since = hit[0][0].step
    sides = [
        name
        for name, side in (("the engine's", "rollout_log_probs"), ("the trainer's", "log_probs"))
        if any(not getattr(one, side)[where].isfinite().all() for one, where in hit)
    ]
    return Diagnosis(
        cause="non_finite",
        verdict=f"log-probs are not finite in {samples} of {total} samples, since training step {since}",
        evidence=f"{' and '.join(sides)} log-probs, at {_named('step', places)} of the schedule, in {len(hit)} of "
        f"{len(steps)} training steps",
        remedy="find the first one: weights that diverged (lower the learning rate), a precision that overflows, or a "
        "step whose std is 0; these samples are left out of all numbers here",
    )


def _summed(steps: Sequence[StepTerms]) -> Diagnosis | None:
    values = torch.cat([one.rollout_log_probs.double().flatten() for one in steps])
    size = float(values[values.isfinite()].abs().median()) if values.isfinite().any() else 0.0
    if size <= _LARGEST_MEAN:
        return None
    return Diagnosis(
        cause="summed",
        verdict="these log-probs are sums over the latent, where means are expected",
        evidence=f"the median of |log p| is {size:.3g}; a mean over latent elements lies below {_LARGEST_MEAN:g} for "
        "every std that samples images",
        remedy="divide them by num_elements, or take mean() over the latent in place of sum(), on both sides; until "
        "then no limit of these pages fits",
    )


def _one_step(steps: Sequence[StepTerms]) -> Diagnosis | None:
    delta = torch.cat([one.delta.flatten() for one in steps])
    level = torch.cat([one.rollout_log_probs.double().flatten().abs() for one in steps])
    place = torch.cat([one.step_indices.flatten() for one in steps])
    known = delta.isfinite()
    delta, level, place = delta[known], level[known], place[known]
    gaps = {int(index): float(delta[place == index].abs().median()) for index in place.unique()}
    if len(gaps) < 2:
        return None
    index, *_ = ranked = sorted(gaps, key=lambda one: gaps[one], reverse=True)
    here = delta[place == index]
    mean, spread = float(here.mean()), float(here.std(correction=0))
    rounding = _ROUNDING * max(1.0, float(level.median()))
    if gaps[index] <= max(_ALONE * gaps[ranked[1]], rounding) or abs(mean) <= _SHARED * spread:
        return None
    exact = gaps[ranked[1]] <= rounding
    return Diagnosis(
        cause="one_step",
        verdict=f"the gap lies in step {index} of the schedule alone",
        evidence=f"delta log p there is {mean:.2g} +- {spread:.1g}, nearly the same in all samples; at the other steps "
        f"|delta| is {gaps[ranked[1]]:.1g} or less. Rounding reaches all steps, and spreads over samples",
        remedy=f"compare sigma, the next sigma and the timestep of step {index} in both stacks, and the noise level "
        "that each uses there; no correction repairs this",
        sure=exact,
    )


def _stale(steps: Sequence[StepTerms]) -> Diagnosis | None:
    ages = [one.ages.double() for one in steps if one.ages is not None]
    if not ages:
        return None
    every = torch.cat(ages)
    if float(every.max()) <= 0:
        return None
    return Diagnosis(
        cause="stale",
        verdict=f"the weights that sampled were {every.mean():.2g} versions old on average, {every.max():g} at most",
        evidence=f"policy_versions and version of {len(ages)} training steps",
        remedy="recompute old log-probs with the trainer's weights (decoupled): taken from stale weights, they hold "
        "the update back to these weights",
    )


def _named(noun: str, numbers: Sequence[int]) -> str:
    return f"{noun}{'s'[: len(numbers) != 1]} {', '.join(map(str, numbers))}"
