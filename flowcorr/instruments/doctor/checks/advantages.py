"""The check of the advantages that another trainer dumped."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flowcorr import dumps
from flowcorr.dumps import DumpedTerms
from flowcorr.health.finding import Finding
from flowcorr.instruments.doctor.captured import Captured
from flowcorr.instruments.doctor.findings import failed, passed, skipped, warned

CENTRED = 0.05  # mean of advantages, in their standard deviations: filtered samples shift it a little
ERRORS = 3.0  # standard errors of that mean, where the other samples of a group were not dumped
EXACTLY = 1e-4  # a mean in standard deviations that was subtracted, in the precision of a dump
FEWEST_PAIRS = 20
FOLLOWS = 0.6  # share of a group's pairs of which the better image has the higher advantage; half by chance
REVERSED = 0.25


def check_captured_advantages(captured: Captured) -> Finding:
    steps = [dumps.load(path) for path in captured.terms.values()]
    advantages = [step.advantages.double() for step in steps]
    values = torch.cat([torch.zeros(0, dtype=torch.float64), *advantages])
    values = values[values.isfinite()]
    if not len(values):
        return skipped(
            "cannot tell: no step with advantages was dumped", "dump the step's terms beside its samples"
        )
    if not values.any():
        return skipped(
            "cannot tell: all dumped advantages are 0, so nothing is learned",
            "dump steps in which the images of a prompt have different rewards",
        )
    order = _order(steps)
    if order is not None:
        return order
    mean, spread = float(values.mean()), float(values.std(correction=0))
    above = float((values > 0).double().mean())
    evidence = f"mean {mean:.3g}, std {spread:.3g} of {len(values)}; {above:.0%} are above 0"
    if abs(mean) <= CENTRED * spread:
        return _centred_by_batch(steps, spread) or passed(f"centred; {evidence}")
    if abs(mean) <= ERRORS * spread / len(values) ** 0.5:
        return skipped(
            f"cannot tell: samples of some groups may be missing; {evidence}",
            "dump whole groups, and more steps",
        )
    return failed(
        f"advantages are not centred, so that the update pushes all samples one way; {evidence}",
        "subtract the mean reward of the group, after all rewards are final",
        cause="advantages_not_centred",
    )


def _order(steps: Sequence[DumpedTerms]) -> Finding | None:
    """Judge whether the better image of each pair of a prompt has the higher advantage; None where it mostly has."""
    pairs = concordant = 0
    for step in steps:
        if step.rewards is None or step.group_ids is None:
            continue
        first, second = torch.combinations(torch.arange(len(step.rewards))).T
        better, higher = (
            torch.sign(values[first] - values[second]) for values in (step.rewards, step.advantages)
        )
        counted = (step.group_ids[first] == step.group_ids[second]) & (better * higher != 0)
        counted &= (better * higher).isfinite()
        pairs += int(counted.sum())
        concordant += int((better == higher)[counted].sum())
    if pairs < FEWEST_PAIRS or concordant > FOLLOWS * pairs:
        return None
    evidence = (
        f"in {concordant} of {pairs} pairs of a prompt's images, the better one has the higher advantage"
    )
    if concordant < REVERSED * pairs:
        return failed(
            f"advantages fall where rewards rise, so that the worse images are learned; {evidence}",
            "subtract the group's mean from the reward, and minimise minus advantage times ratio",
            cause="advantages_reversed",
        )
    return warned(
        f"advantages do not follow the rewards of their samples; {evidence}",
        "compare the order of samples, rewards and group_ids; or dump the rewards from which advantages are made",
    )


def _centred_by_batch(steps: Sequence[DumpedTerms], spread: float) -> Finding | None:
    """Warn if the mean of each step was subtracted, and not that of each group."""
    of_groups: list[Tensor] = []
    for step in steps:
        values, groups = step.advantages.double(), step.group_ids
        if groups is None or not values.isfinite().all() or abs(float(values.mean())) > EXACTLY * spread:
            return None
        of_groups += [values[groups == group].mean() for group in groups.unique()]
    size = float(torch.stack(of_groups).square().mean().sqrt())
    if size <= CENTRED * spread:
        return None
    return warned(
        "advantages are centred over the batch and not over each prompt's images, so that all images of an easy prompt "
        f"are pushed up; means of groups are {size / spread:.2g} stds from 0",
        "subtract the mean reward of the group, unless the batch's is meant",
    )
