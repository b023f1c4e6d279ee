"""Rules of the gap's terms: faults of log-probs, which come before any question of a correction.

A gap is the `Terms` `[B, T]` of a training step whose `old_log_prob` is the trainer's. `audit`, `report` and `watch`
apply the same rules. Each cause has a trace that rounding and learning lack; a cause without a trace here is left to
`flowcorr doctor`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flowcorr.health.finding import Finding
from flowcorr.instruments.fault_words import FAULTS
from flowcorr.instruments.gap_size import estimated_kl
from flowcorr.instruments.stored import rounding_of, stored_in
from flowcorr.records import Terms

# Mean-pooled log-probs are `-log s - 1.42` on average, so -1.4 to 12 for any std of 6e-6 to 1; sums are D times that.
_LARGEST_MEAN = 25.0
# Two stacks that score alike to float32 rounding differ by less than this, relative to a log-prob.
_ROUNDING = 5e-6
# A step's distance of step means beside the next largest one, in stds. One rounding of velocities moves late steps
# farther: by 9 beside the next one where Flow-CPS ends at sigma .02, and the velocity itself is rounded by 3 times as
# much there. Also a sample beside the median one.
_ALONE = 30.0
# Mean beside spread of a step's differences: a shift that all samples share, instead of one that varies with them.
_SHARED = 2.0
# `D var / 2` beside the mean, as in `gap_size.estimated_kl`: 1 for two densities whose means differ, .25 or more
# where their stds do, `2 s^2` for log-probs in units of `2 s^2` nats.
_TOO_EVEN = 1e-3
_FEWEST = 8  # samples of a step that tell whether they share a gap
_FEW = 0.25  # of the samples; more are no exceptions
# Of the samples of windows of one step, whose single numbers lie near others' by chance: for gaps of r = .03 to 1 and
# D = 512, up to half of 2 to 96 samples in 20 training steps do, seeds 5000 to 5019.
_NEARLY_ALL = 0.8
_OWN = 0.9  # of the moved ones have a counterpart each; chance gives one counterpart to several
# Between these and the others; a gap whose size varies among samples, however much, leaves no such void.
_VOID = 10.0
# Of a trainer whose stds are x times the engine's, `delta` follows the engine's log-prob with the slope 1 / x^2 - 1;
# step means that differ by rounding or staleness leave both independent. Chance stays below this in Fisher's transform.
_CHANCE = 6.0
_LEAST_SLOPE = 1e-3
_OF_ONE_STEP = 2.0  # times the variance of a log-prob of standard normal noise
Ages = Mapping[int, Tensor]
Finder = Callable[[Mapping[int, Terms], Ages], Finding | None]
_SIDES = {"the engine's": "rollout_log_prob", "the trainer's": "old_log_prob"}


def broken(gap: Terms) -> Tensor:
    """`[B, T]` bool: terms that are judged and have no finite log-prob."""
    return ~delta(gap).isfinite() & _judged(gap)


def delta(gap: Terms) -> Tensor:
    """Trainer less rollout, float64; NaN for a term that is left out."""
    difference = gap.old_log_prob.double() - gap.rollout_log_prob.double()
    return difference if gap.keep is None else torch.where(gap.keep, difference, torch.nan)


def trained_columns(gaps: Sequence[Terms]) -> Tensor:
    """`[T]` bool: steps of the window of which any training step judges a term."""
    return torch.cat([_judged(gap) for gap in gaps]).any(0)


def _judged(gap: Terms) -> Tensor:
    """`[B, T]` bool: terms that are not left out, finite or not."""
    return torch.ones_like(gap.old_log_prob, dtype=torch.bool) if gap.keep is None else gap.keep


def diagnose(gaps: Mapping[int, Terms], ages: Mapping[int, Tensor] | None = None) -> list[Finding]:
    """The causes that the log-probs tell, the one that hides the others first.

    Args:
        gaps: by training step, in ascending order; steps of the window that nobody trained are left out.
        ages: by training step, `[B]`, how many versions the weights that sampled were behind, where that is known.
    """
    trained = trained_columns(list(gaps.values()))
    gaps = {step: gap.select((slice(None), trained)) for step, gap in gaps.items()}
    findings = [finding for find in FINDERS if (finding := find(gaps, ages or {})) is not None]
    hidden = {name for finding in findings for name in FAULTS[finding.cause].hides}
    return [
        replace(finding, fault=FAULTS[finding.cause].proof)
        for finding in findings
        if finding.cause not in hidden
    ]


def _non_finite(gaps: Mapping[int, Terms], _: Ages) -> Finding | None:
    bad = {step: broken(gap) for step, gap in gaps.items()}
    hit = {step: where for step, where in bad.items() if where.any()}
    if not hit:
        return None
    places = sorted({int(index) for step, where in hit.items() for index in gaps[step].step_index[where]})
    sides = [
        name
        for name, side in _SIDES.items()
        if any(not getattr(gaps[step], side)[where].isfinite().all() for step, where in hit.items())
    ]
    return Finding(
        level="serious",
        cause="non_finite",
        sentence=f"{' and '.join(sides)} log-probs are not finite in some samples, at {_named('step', places)} of the "
        "schedule",
        numbers={
            "samples": sum(int(where.any(1).sum()) for where in hit.values()),
            "of": sum(int(_judged(gap).any(1).sum()) for gap in gaps.values()),
            "since training step": next(iter(hit)),
            "training steps": len(hit),
        },
        remedy="find the first one: weights that diverged (lower the learning rate), numbers that overflow in float16, "
        "or a step whose std is 0; these samples are left out of all numbers here",
    )


def _summed(gaps: Mapping[int, Terms], _: Ages) -> Finding | None:
    sizes = {side: _typical(_column(gaps, name)) for side, name in _SIDES.items()}
    summed = {side: size for side, size in sizes.items() if size > _LARGEST_MEAN}
    if not summed:
        return None
    whose = "these" if len(summed) == len(sizes) else " and ".join(summed)
    return Finding(
        level="serious",
        cause="summed",
        sentence=f"{whose} log-probs are sums over the latent, where means are expected: these are small for every std "
        "that samples images",
        numbers={
            "median |log p| of the engine": sizes["the engine's"],
            "of the trainer": sizes["the trainer's"],
            "limit of a mean": _LARGEST_MEAN,
        },
        remedy="divide them by num_elements, or take mean() over the latent in place of sum(); until then no limit of "
        "these pages fits",
    )


def _one_for_all(gaps: Mapping[int, Terms], _: Ages) -> Finding | None:
    alike: dict[str, set[int]] = {}
    for gap in gaps.values():
        for index in gap.step_index.unique().tolist():
            for side, name in _SIDES.items():
                values = getattr(gap, name)[gap.step_index == index]
                values = values[values.isfinite()]
                if len(values) >= _FEWEST and bool((values == values[0]).all()) and stored_in(values) is None:
                    alike.setdefault(side, set()).add(index)
    if not alike:
        return None
    places = sorted(set().union(*alike.values()))
    return Finding(
        level="serious",
        cause="one_for_all",
        sentence=f"{' and '.join(alike)} log-probs are one number for all samples, at {_named('step', places)} of the "
        "schedule",
        reason="the noise of each sample gives it a log-prob of its own",
        numbers={"steps": places},
        remedy="take mean() over the latent alone, and not over the batch; until then no sample has a ratio of its own",
    )


def _typical(values: Tensor) -> float:
    """Median magnitude of the finite values; 0 without any."""
    known = values[values.isfinite()].abs()
    return float(known.median()) if len(known) else 0.0


def _other_order(gaps: Mapping[int, Terms], _: Ages) -> Finding | None:
    rounding = _rounding_of(gaps)
    for noun, axis in (("samples", 0), ("steps", 1)):
        moved = {step: _moved(gap, axis, rounding) for step, gap in gaps.items()}
        limit = _NEARLY_ALL if next(iter(gaps.values())).old_log_prob.shape[1] == 1 else _FEW
        hit = {step: places for step, places in moved.items() if float(places.double().mean()) > limit}
        if hit:
            return Finding(
                level="serious",
                cause="other_order",
                sentence=f"the trainer's log-probs are those of the engine in another order of {noun}: they fit those "
                "of another place far better",
                numbers={
                    f"{noun} at another place": sum(int(places.sum()) for places in hit.values()),
                    "of": sum(places.numel() for places in moved.values()),
                    "since training step": next(iter(hit)),
                    "training steps": len(hit),
                },
                remedy="bring all fields of a step into one order: undo the shuffle of mini-batches or steps, and "
                "gather the ranks of all fields in the same way; the loss pairs them as wrongly if it reads the same "
                "tensors",
            )
    return None


def _moved(gap: Terms, axis: int, rounding: float) -> Tensor:
    """Bool, the trainer's samples `[b]` (axis 0) or terms `[b, T]` (1) with the log-probs of another place."""
    known = delta(gap).isfinite().all(1)
    # [batches, places, numbers that have to fit]: all samples by their windows, or the steps of each sample.
    trainer, engine = (
        getattr(gap, side)[known].double().unsqueeze(2 * axis)
        for side in ("old_log_prob", "rollout_log_prob")
    )
    if not trainer.numel():
        return torch.zeros(1, dtype=torch.bool)
    distances = torch.cdist(trainer, engine, p=math.inf)
    own, nearest = distances.diagonal(dim1=1, dim2=2), distances.min(2)
    moved = own > (_ALONE * nearest.values).clamp(min=rounding)
    counterparts = torch.stack([moved.nonzero()[:, 0], nearest.indices[moved]], 1).unique(dim=0)
    return moved & (len(counterparts) > _OWN * int(moved.sum()))


def _one_step(gaps: Mapping[int, Terms], _: Ages) -> Finding | None:
    by_step, rounding = _by_step(gaps), _rounding_of(gaps)
    by_step = {index: values for index, values in by_step.items() if len(values) >= _FEWEST}
    sizes = {index: float(differences.abs().median()) for index, differences in by_step.items()}
    if len(sizes) < 2:
        return None
    ranked = sorted(sizes, key=lambda one: sizes[one], reverse=True)
    index = ranked[0]
    mean, spread = _mean_and_spread(by_step[index])
    size = next(iter(gaps.values())).num_elements
    distances = {one: sizes[one] if size is None else _distance(by_step[one], size) for one in ranked[:2]}
    alone = distances[index] > _ALONE * distances[ranked[1]]
    if not alone or sizes[index] <= rounding or abs(mean) <= _SHARED * spread:
        return None
    certain = sizes[ranked[1]] <= rounding
    sure = "" if certain else "; most likely a fault of that step"
    return Finding(
        level="serious",
        cause="one_step",
        sentence=f"the gap lies in step {index} of the schedule alone, nearly the same in all samples",
        reason=f"rounding reaches all steps, and spreads over samples{sure}",
        numbers={
            "step": index,
            "mean delta log p": mean,
            "spread": spread,
            "|delta| of other steps": sizes[ranked[1]],
            "confidence": "certain" if certain else "likely",
        },
        remedy=f"compare sigma, the next sigma and the timestep of step {index} in both stacks, and the noise level "
        "that each uses there; no correction repairs this",
    )


def _distance(differences: Tensor, num_elements: int) -> float:
    """The distance of step means in stds that differences of log-probs tell, see `estimated_kl`."""
    mean, square, count = float(differences.mean()), float(differences.square().mean()), len(differences)
    return math.sqrt(2 * estimated_kl(mean, square, count, num_elements))


def _shared_shift(gaps: Mapping[int, Terms], _: Ages) -> Finding | None:
    size, rounding = next(iter(gaps.values())).num_elements, _rounding_of(gaps)
    moments: dict[int, tuple[float, float]] = {}
    for index, values in _by_step(gaps).items():
        mean, spread = _mean_and_spread(values)
        too_even = size is not None and size * spread**2 / 2 < _TOO_EVEN * abs(mean)
        if (
            len(values) >= _FEWEST
            and abs(mean) > max(_SHARED * spread, rounding)
            and abs(mean) * (size or math.inf) > 1
            and (mean > 0 or too_even)
        ):
            moments[index] = mean, spread
    if not moments:
        return None
    return Finding(
        level="serious",
        cause="shared_shift",
        sentence="the trainer's log-probs and the engine's differ by a number that all samples share, at "
        f"{_named('step', list(moments))} of the schedule",
        reason="log-densities differ by another number in each sample, and on average the sampler's is the larger",
        numbers={
            name: value
            for index, (mean, spread) in moments.items()
            for name, value in ((f"delta log p at step {index}", mean), (f"spread at step {index}", spread))
        },
        remedy="compare how both stacks compute a log-prob: the terms -log s and -log(2 pi)/2, the std s with its "
        "sigmas, and whether it is rounded, as to bfloat16; no correction repairs this",
    )


def _other_std(gaps: Mapping[int, Terms], ages: Ages) -> Finding | None:
    """Stds that differ at all steps; samples of older weights are not looked at."""
    engine, differences = [], []
    for step, gap in gaps.items():
        difference = delta(gap)
        rows = difference.isfinite().all(1)
        if step in ages:
            rows = rows & (ages[step] <= 0)
        for index in gap.step_index[rows].unique().tolist():
            here = (gap.step_index == index) & rows[:, None]
            engine.append(_beside_mean(gap.rollout_log_prob[here].double()))
            differences.append(_beside_mean(difference[here]))
    if not engine:
        return None
    own, apart = torch.cat(engine), torch.cat(differences)
    count, spread = own.numel() - len(engine), own.square().sum()
    size = next(iter(gaps.values())).num_elements
    if count < 2 * _FEWEST or not spread > 0 or not bool(apart.any()) or size is None:
        return None
    # Of one step, a log-prob varies by this: more is that of steps that were not told apart.
    if float(spread) / count > _OF_ONE_STEP / (2 * size):
        return None
    slope = float((own @ apart) / spread)
    correlation = float((own @ apart) / (spread * apart.square().sum()).sqrt())
    z = math.atanh(min(abs(correlation), 1 - 1e-12)) * math.sqrt(count - 3)
    if (
        z < _CHANCE
        or abs(slope) < _LEAST_SLOPE
        or slope <= -1
        or float(apart.abs().max()) <= _rounding_of(gaps)
    ):
        return None
    return Finding(
        level="serious",
        cause="other_std",
        sentence="flowcorr doctor comes first: the trainer's steps have another std than the engine's",
        reason="samples that the engine finds unlikely differ most, which neither rounding nor older weights do",
        numbers={
            "std of the trainer beside the engine's": (1 + slope) ** -0.5,
            "correlation of delta with the engine's log p": correlation,
            "terms": own.numel(),
        },
        remedy="compare noise_level, sde_type and sigmas of both stacks, and the std s in both scores; flowcorr doctor "
        "names the one that differs from captured samples; no correction repairs this",
    )


def _beside_mean(values: Tensor) -> Tensor:
    return values - values.mean()


def _few_samples(gaps: Mapping[int, Terms], ages: Ages) -> Finding | None:
    """The finding on a few samples with a gap; samples of older weights or without a finite gap are skipped."""
    if not next(iter(gaps.values())).rollout_log_prob.shape[1]:
        return None
    largest_gaps: dict[int, Tensor] = {}
    for step, gap in gaps.items():
        differences = delta(gap).abs()
        known = differences.isfinite()
        judged = known.any(1) if step not in ages else known.any(1) & (ages[step] <= 0)
        largest_gaps[step] = differences.where(known, 0.0).amax(1)[judged]
    every = torch.cat(list(largest_gaps.values()))
    if len(every) < 2 * _FEWEST:
        return None
    typical = float(every.median())
    limit = max(_ALONE * typical, _rounding_of(gaps))
    ranked = every.sort().values[-int(_FEW * len(every)) - 1 :]
    apart = (ranked[1:] > limit) & (ranked[1:] > _VOID * ranked[:-1])
    if not apart.any():
        return None
    odd = ranked[1:][int(apart.int().argmax()) :]
    hit = [step for step, largest in largest_gaps.items() if (largest >= odd[0]).any()]
    return Finding(
        level="warning",
        cause="few_samples",
        sentence="the gap lies in a few samples alone, most likely by a fault of theirs",
        reason="rounding spreads over all",
        numbers={
            "samples": len(odd),
            "of": len(every),
            "since training step": hit[0],
            "training steps": len(hit),
            "their |delta log p|": float(odd[0]),
            "typical of others": typical,
        },
        remedy="look for what these samples have alone: their prompts, worker, place in a batch, older weights. Until "
        "then rejection takes them out: rollout_rs=step_z, rollout_rs_threshold=6",
    )


def _column(gaps: Mapping[int, Terms], name: str) -> Tensor:
    return torch.cat([getattr(gap, name).double().flatten() for gap in gaps.values()])


def _by_step(gaps: Mapping[int, Terms]) -> dict[int, Tensor]:
    """The finite differences at each step of the schedule."""
    values = torch.cat([delta(gap).flatten() for gap in gaps.values()])
    place = torch.cat([gap.step_index.flatten() for gap in gaps.values()])
    known = values.isfinite()
    values, place = values[known], place[known]
    return {int(index): values[place == index] for index in place.unique()}


def _mean_and_spread(values: Tensor) -> tuple[float, float]:
    return float(values.mean()), float(values.std(correction=0))


def _rounding_of(gaps: Mapping[int, Terms]) -> float:
    """The gap that rounding explains: float32 arithmetic of both stacks, or log-probs stored in half precision."""
    sides = [_column(gaps, name) for name in _SIDES.values()]
    relative = max(rounding_of(side, _ROUNDING) for side in sides)
    return relative * max(1.0, _typical(sides[0]))


def _stale(_: Mapping[int, Terms], ages: Ages) -> Finding | None:
    if not ages:
        return None
    every = torch.cat([age.double() for age in ages.values()])
    if float(every.max()) <= 0:
        return None
    return Finding(
        level="warning",
        cause="stale",
        sentence="the weights that sampled were older than the trainer's",
        numbers={
            "mean age in versions": float(every.mean()),
            "largest": float(every.max()),
            "training steps": len(ages),
        },
        remedy="where old log-probs are taken from the engine (bypass), recompute them with the trainer's weights: "
        "PPO holds the update back to the weights that sampled",
    )


FINDERS: Sequence[Finder] = (
    _non_finite,
    _summed,
    _one_for_all,
    _other_order,
    _one_step,
    _shared_shift,
    _other_std,
    _few_samples,
    _stale,
)
"""The one that hides the others first; `FAULTS` says what each finds."""


def _named(noun: str, numbers: Sequence[int]) -> str:
    return f"{noun}{'s'[: len(numbers) != 1]} {', '.join(map(str, numbers))}"
