"""Faults of the log-probs of dumped steps, which come before any question of a correction.

`flowcorr audit` and `flowcorr report` show the same findings. Each cause has a trace that rounding and learning lack,
and says how sure that is; a cause without a trace here is left to `flowcorr doctor`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from flowcorr.diagnostics.stored import rounding_of
from flowcorr.dumps import DumpedTerms

Cause = Literal["non_finite", "summed", "one_step", "shared_shift", "few_samples", "stale"]
HIDING: frozenset[Cause] = frozenset({"summed", "one_step", "shared_shift", "few_samples"})
"""Causes beside which no advice on the gap's correction can hold."""

# Mean-pooled log-probs are `-log s - 1.42` on average, so -1.4 to 12 for any std of 6e-6 to 1; sums are D times that.
_LARGEST_MEAN = 25.0
# Two stacks that score alike to float32 rounding differ by less than this, relative to a log-prob.
_ROUNDING = 5e-6
# A step beside the next largest one. Rounding grows towards late steps too: int4 on the embedded model by 25. Also a
# sample beside the median one.
_ALONE = 30.0
# Mean beside spread of a step's differences: a shift that all samples share, instead of one that varies with them.
_SHARED = 2.0
# `D var / 2` beside the mean, as in `audit.dumped.estimated_kl`: 1 for two densities whose means differ, .25 or more
# where their stds do, `2 s^2` for log-probs in units of `2 s^2` nats.
_TOO_EVEN = 1e-3
_FEWEST = 8  # samples of a step that tell whether they share a shift
_FEW = 0.25  # of the samples; more are no exceptions
# Between these and the others; a gap whose size varies among samples, however much, leaves no such void.
_VOID = 10.0


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
        return "warning" if self.cause in ("few_samples", "stale") else "serious"


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
        num_elements: `D`, where known.
    """

    step: int
    log_probs: Tensor
    rollout_log_probs: Tensor
    step_indices: Tensor
    ages: Tensor | None = None
    keep: Tensor | None = None
    num_elements: int | None = None

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
    found = [
        _non_finite(steps),
        _summed(steps),
        _one_step(steps) or _shared_shift(steps),
        _few_samples(steps),
        _stale(steps),
    ]
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
    sizes = {
        side: _typical(torch.cat([getattr(one, name).double().flatten() for one in steps]))
        for side, name in (("the engine's", "rollout_log_probs"), ("the trainer's", "log_probs"))
    }
    summed = {side: size for side, size in sizes.items() if size > _LARGEST_MEAN}
    if not summed:
        return None
    whose = "these" if len(summed) == len(sizes) else " and ".join(summed)
    return Diagnosis(
        cause="summed",
        verdict=f"{whose} log-probs are sums over the latent, where means are expected",
        evidence=f"the median of |log p| is {' and '.join(f'{size:.3g}' for size in sizes.values())} on the engine's "
        f"and the trainer's side; a mean over latent elements lies below {_LARGEST_MEAN:g} for every std that samples "
        "images",
        remedy="divide them by num_elements, or take mean() over the latent in place of sum(); until then no limit of "
        "these pages fits",
    )


def _typical(values: Tensor) -> float:
    """The median size of those that are finite, 0 where none is."""
    known = values[values.isfinite()].abs()
    return float(known.median()) if len(known) else 0.0


def _one_step(steps: Sequence[StepTerms]) -> Diagnosis | None:
    by_step, rounding = _by_step(steps), _rounding_of(steps)
    gaps = {index: float(delta.abs().median()) for index, delta in by_step.items()}
    if len(gaps) < 2:
        return None
    index, *_ = ranked = sorted(gaps, key=lambda one: gaps[one], reverse=True)
    mean, spread = _mean_and_spread(by_step[index])
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


def _shared_shift(steps: Sequence[StepTerms]) -> Diagnosis | None:
    """A shift of log-probs that no two densities have: with `p` the sampler's, `E[log q - log p] <= 0` (Jensen)."""
    size, rounding = steps[0].num_elements, _rounding_of(steps)
    found: dict[int, tuple[float, float]] = {}
    for index, delta in _by_step(steps).items():
        mean, spread = _mean_and_spread(delta)
        too_even = size is not None and size * spread**2 / 2 < _TOO_EVEN * abs(mean)
        if (
            len(delta) >= _FEWEST
            and abs(mean) > max(_SHARED * spread, rounding)
            and abs(mean) * (size or math.inf) > 1
            and (mean > 0 or too_even)
        ):
            found[index] = mean, spread
    if not found:
        return None
    shifts = ", ".join(
        f"{mean:.2g} +- {spread:.1g} at step {index}" for index, (mean, spread) in found.items()
    )
    return Diagnosis(
        cause="shared_shift",
        verdict=f"the trainer's log-probs and the engine's differ by a number that all samples share, at "
        f"{_named('step', list(found))} of the schedule",
        evidence=f"delta log p is {shifts}; the log-densities of one sample differ by another number for each, and on "
        "average the sampler's is the larger",
        remedy="compare how both stacks compute a log-prob: the terms -log s and -log(2 pi)/2, the std s with its "
        "sigmas, and whether it is rounded, as to bfloat16; no correction repairs this",
    )


def _few_samples(steps: Sequence[StepTerms]) -> Diagnosis | None:
    """A few samples whose gap is far from that of the others, which rounding is not.

    Those of older weights are not looked at.
    """
    if not steps[0].rollout_log_probs.shape[1]:
        return None
    found: list[tuple[int, Tensor]] = []
    for one in steps:
        gap = one.delta.abs().nan_to_num(0.0, 0.0, 0.0).amax(1)
        found.append((one.step, gap if one.ages is None else gap[one.ages <= 0]))
    every = torch.cat([gap for _, gap in found])
    if len(every) < 2 * _FEWEST:
        return None
    typical = float(every.median())
    limit = max(_ALONE * typical, _rounding_of(steps))
    ranked = every.sort().values[-int(_FEW * len(every)) - 1 :]
    apart = (ranked[1:] > limit) & (ranked[1:] > _VOID * ranked[:-1])
    if not apart.any():
        return None
    odd = ranked[1:][int(apart.int().argmax()) :]
    hit = [step for step, gap in found if (gap >= odd[0]).any()]
    return Diagnosis(
        cause="few_samples",
        verdict=f"the gap lies in {len(odd)} of {len(every)} samples alone, since training step {hit[0]}",
        evidence=f"the largest |delta log p| of a sample is {float(odd[0]):.2g} or more in these and typically "
        f"{typical:.1g} in the others, in {len(hit)} of {len(steps)} training steps. Rounding spreads over all samples",
        remedy="look for what these samples have alone: their prompts, worker, place in a batch, older weights. Until "
        "then rejection takes them out: rollout_rs=step_z, rollout_rs_threshold=6",
        sure=False,
    )


def _by_step(steps: Sequence[StepTerms]) -> dict[int, Tensor]:
    """The finite differences at each step of the schedule."""
    delta = torch.cat([one.delta.flatten() for one in steps])
    place = torch.cat([one.step_indices.flatten() for one in steps])
    known = delta.isfinite()
    delta, place = delta[known], place[known]
    return {int(index): delta[place == index] for index in place.unique()}


def _mean_and_spread(delta: Tensor) -> tuple[float, float]:
    return float(delta.mean()), float(delta.std(correction=0))


def _rounding_of(steps: Sequence[StepTerms]) -> float:
    """What float32 rounding of both stacks explains, or the half precision that log-probs were stored in."""
    sides = [
        torch.cat([getattr(one, name).double().flatten() for one in steps])
        for name in ("rollout_log_probs", "log_probs")
    ]
    relative = max(rounding_of(side, _ROUNDING) for side in sides)
    return relative * max(1.0, _typical(sides[0]))


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
