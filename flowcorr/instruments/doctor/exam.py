"""The input of the checks, and the evidence with which an explanation of a gap is accepted.

Numbers in comments were measured on the embedded model (float32 actor, D = 512, 4 to 10 steps, noise level 0.7).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from flowcorr.actor import DiffusionActor
from flowcorr.config.schema import Config
from flowcorr.instruments.doctor.trials import Fit, Trial, Trials
from flowcorr.models import AdapterCheck
from flowcorr.records import Prompt
from flowcorr.rollout import RolloutEngine
from flowcorr.rollout.precision import LARGEST_GAP, rounds_apart, usual_gap

EXPLAINED = 0.75  # of r^2, so that the remaining gap is half as large: planted faults reach 0.98 and more
# A small fault under rounding explains little of r^2, but its factor in the gap averages to 1 over many elements:
# timesteps truncated to integers are 0.6 % of the r^2 of bfloat16 and give 0.90 +- 0.12 on 32 terms of D = 512.
# Without the fault, bfloat16 gives factors of up to 0.13.
FACTOR_ERRORS = 6.0  # standard errors that the factor is away from 0
FACTOR_RANGE = 0.3  # at most this far away from 1
WARN_FACTOR = 4.0  # between the gap that warns and the gap that fails


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Why an explanation of a gap is accepted, as numbers and in words; `share` of `r^2` disappears with it."""

    share: float
    value: float
    threshold: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exam:
    """The input of the checks; `actor` holds the weights with which `trials.base` was sampled.

    Attributes:
        prompts: those of `trials`, where they are known, with their reference images.
        answers: results that several checks ask for, by name.
        adapter: the comparison of the family with its pipeline, or the reason why there is none; None where nobody
            asked for it.
    """

    actor: DiffusionActor
    engine: RolloutEngine
    trials: Trials
    prompts: Sequence[Prompt] = ()
    answers: dict[str, Any] = field(default_factory=dict)
    adapter: AdapterCheck | str | None = None

    @property
    def config(self) -> Config:
        return self.actor.config

    @property
    def usual_gap(self) -> float:
        """The largest velocity gap that the precision of both sides accounts for."""
        return usual_gap(self.config, self.actor.family.amplification(self.actor.guidance))

    def leaves_rounding(self, trial: Trial, fit: Fit) -> bool:
        """Whether the gap without the fault is one of rounding, which averages out over the elements.

        Where one side alone rounds, its error does not: an explanation that shares a part of it has a factor, too.
        """
        rest = trial.velocity_gap() * math.sqrt(1 - fit.share)
        return rest <= self.usual_gap and not rounds_apart(self.config)

    def explains(self, share: float) -> Evidence | None:
        """Evidence for a fault with which this share of `r^2` disappears, if that is most of it."""
        if share < EXPLAINED:
            return None
        return Evidence(
            share=share, value=share, threshold=EXPLAINED, text=f"which is {100 * share:.0f} % of the gap"
        )

    def evidence(self, trial: Trial, fit: Fit) -> Evidence | None:
        """Evidence for a fault of known size: the gap contains it with a factor near 1, and it is most of the gap, or
        all of it but rounding.
        """
        if abs(fit.factor - 1) > FACTOR_RANGE:
            return None
        if (evidence := self.explains(fit.share)) is not None:
            return evidence
        errors = fit.factor / max(fit.error, 1e-30)
        if errors < FACTOR_ERRORS or not self.leaves_rounding(trial, fit):
            return None
        return Evidence(
            share=fit.share,
            value=errors,
            threshold=FACTOR_ERRORS,
            text=f"which is in the gap {fit.factor:.2f} +- {fit.error:.2f} times, beside rounding",
        )


def largest_gap(usual: float) -> float:
    """The largest velocity gap that passes, from the `usual` one."""
    return min(WARN_FACTOR * usual, LARGEST_GAP)
