"""Conventions of another trainer's log-probs and advantages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from flowcorr import dumps
from flowcorr.instruments.doctor.replayed.legs import Legs
from flowcorr.instruments.doctor.replayed.verdicts import Verdict
from flowcorr.instruments.faults import diagnose
from flowcorr.instruments.steps import gap_of

_CENTRED = 0.05  # mean of advantages, in their standard deviations: filtered samples shift it a little
_ERRORS = 3.0  # standard errors of that mean, where the other samples of a group were not dumped


def examine_convention(legs: Legs, step: int, terms: Path | None = None) -> Verdict | None:
    """What the engine's log-probs are; None where they are what flowcorr expects, or nothing tells.

    Args:
        legs: the replay.
        step: the training step.
        terms: the step's dumped terms, which tell the trainer's log-probs.
    """
    convention = legs.convention
    if convention is None or (
        convention.scaled and not convention.summed and convention.normaliser == "full"
    ):
        return None
    harmless = convention.scaled and not convention.summed
    if harmless and terms is not None and (shift := _shared_shift(terms, step)):
        return Verdict(
            part="log_probs",
            status="FAIL",
            step=step,
            cause="log_probs_normaliser",
            confidence="certain",
            message=f"they are {convention.name}, and the trainer's are not",
            evidence=shift,
            remedy="add these terms to the engine's log-probs, or leave them out of the trainer's",
        )
    if harmless:
        return Verdict(
            part="log_probs",
            status="PASS",
            step=step,
            message=f"they are {convention.name}, which cancels in every ratio of two that lack it",
        )
    cause = "summed" if convention.summed else "unscaled"
    return Verdict(
        part="log_probs",
        status="FAIL",
        step=step,
        cause=f"log_probs_{cause}",
        confidence="certain",
        message=f"they are {convention.name}, where means of a density are expected",
        evidence="no other convention is as close to the replay",
        remedy="take mean() over the latent in place of sum()"
        if convention.summed
        else "divide by 2 s^2, or read clip ranges and gaps in that unit",
    )


def _shared_shift(terms: Path, step: int) -> str:
    """By how much the trainer's log-probs differ from the engine's in all samples; empty where they do not."""
    found = diagnose({step: gap_of(dumps.load(terms))})
    return next((one.evidence for one in found if one.cause in ("shared_shift", "one_step")), "")


def examine_advantages(files: Mapping[int, Path]) -> Verdict:
    """Whether advantages are centred, over all dumped steps."""
    steps = [dumps.load(path).advantages.double() for path in files.values()]
    values = torch.cat([torch.zeros(0, dtype=torch.float64), *steps])
    values = values[values.isfinite()]
    if not values.any():
        return Verdict(
            part="advantages",
            status="SKIP",
            message="cannot tell: no step with advantages was dumped",
            remedy="dump the step's terms beside its samples",
        )
    step = next(iter(files))
    mean, spread = float(values.mean()), float(values.std(correction=0))
    above = float((values > 0).double().mean())
    evidence = f"mean {mean:.3g}, std {spread:.3g} of {len(values)}; {above:.0%} are above 0"
    if abs(mean) <= _CENTRED * spread:
        return Verdict(part="advantages", status="PASS", step=step, message="centred", evidence=evidence)
    if abs(mean) <= _ERRORS * spread / len(values) ** 0.5:
        return Verdict(
            part="advantages",
            status="SKIP",
            step=step,
            message="cannot tell: samples of some groups may be missing",
            evidence=evidence,
            remedy="dump whole groups, and more steps",
        )
    return Verdict(
        part="advantages",
        status="FAIL",
        step=step,
        cause="advantages_not_centred",
        confidence="certain",
        message="advantages are not centred, so that the update pushes all samples one way",
        evidence=evidence,
        remedy="subtract the mean reward of the group, after all rewards are final",
    )
