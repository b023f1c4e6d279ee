"""What the checks look at, and when an explanation of a gap is accepted.

Numbers in comments were measured on the embedded model (float32 actor, D = 512, 4 to 10 steps, noise level 0.7).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from flowcorr.actor import DiffusionActor
from flowcorr.config.schema import Config
from flowcorr.diagnostics.doctor.trials import Fit, Trial, Trials
from flowcorr.rollout import RolloutEngine

NO_GAP = 1e-5  # of the velocity: nothing to explain; float32 stacks agree to 4e-7 (2e-6 under guidance)
EXPLAINED = 0.75  # of r^2, so that the remaining gap is half as large: planted faults reach 0.98 and more
# A small fault under rounding explains little of r^2, but its factor in the gap averages to 1 over many elements:
# timesteps truncated to integers are 0.6 % of the r^2 of bfloat16 and give 0.90 +- 0.12 on 32 terms of D = 512.
# Without the fault, bfloat16 gives factors of up to 0.13.
FACTOR_ERRORS = 6.0  # standard errors that the factor is away from 0
FACTOR_RANGE = 0.3  # at most this far away from 1
# Root mean square difference of the velocities, as a share of the velocity: about three times that of the embedded
# model (bfloat16 0.010, int8 0.008, fp8 0.04, int4 0.15). Guidance amplifies them (scale 4: by 1.8 to 3.3). float16
# rounds 8 times finer than bfloat16.
# float32 gives 1e-6; 5e-4 leaves room for other kernels, and TF32 (about 1e-3) warns.
PRECISION_GAP: Mapping[str, float] = {
    "float32": 5e-4,
    "float16": 5e-3,
    "bfloat16": 0.03,
    "int8": 0.03,
    "fp8": 0.1,
    "int4": 0.4,
}
WARN_FACTOR = 4.0  # between the gap that warns and the gap that fails
LARGEST_GAP = 0.6  # fails at any precision; matrices moved at random by half of their size give 0.64


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Why an explanation of a gap is accepted, as numbers and in words."""

    value: float
    threshold: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exam:
    """The input of the checks; `actor` holds the weights with which `trials.base` was sampled."""

    actor: DiffusionActor
    engine: RolloutEngine
    trials: Trials

    @property
    def config(self) -> Config:
        return self.actor.config

    @property
    def usual_gap(self) -> float:
        """The largest velocity gap that the precision of both sides accounts for."""
        return usual_gap(self.config, distilled=self.actor.family.distills_guidance)

    def leaves_rounding(self, trial: Trial, fit: Fit) -> bool:
        """Whether the gap without the fault is one of rounding, which averages out over the elements."""
        rest = trial.velocity_gap() * math.sqrt(1 - fit.share)
        return rest <= self.usual_gap and not quantized(self.config)

    def evidence(self, trial: Trial, fit: Fit) -> Evidence | None:
        """Evidence for a fault of known size: it is most of the gap, or the gap contains it with a factor near 1."""
        if fit.share >= EXPLAINED:
            return Evidence(
                value=fit.share, threshold=EXPLAINED, text=f"which is {100 * fit.share:.0f} % of the gap"
            )
        errors = fit.factor / max(fit.error, 1e-30)
        alike = abs(fit.factor - 1) <= FACTOR_RANGE and errors >= FACTOR_ERRORS
        if not (alike and self.leaves_rounding(trial, fit)):
            return None
        return Evidence(
            value=errors,
            threshold=FACTOR_ERRORS,
            text=f"which is in the gap {fit.factor:.2f} +- {fit.error:.2f} times, beside rounding",
        )


def quantized(config: Config) -> bool:
    """Whether the engine's weights are rounded to fewer bits, an error that averaging does not reduce."""
    rollout = config.rollout
    asked = rollout.engine.get("quantization") or rollout.engine.get("quantization_config")
    return rollout.emulate != "none" or bool(asked)


def usual_gap(config: Config, *, distilled: bool) -> float:
    """The largest velocity gap that the precision of both sides accounts for.

    Args:
        config: the run's.
        distilled: whether guidance is an input of the transformer, which amplifies nothing.
    """
    rollout = config.rollout
    names = {rollout.dtype, config.model.dtype, "bfloat16" if config.actor.autocast else "float32"}
    if quantized(config):
        names.add("fp8" if rollout.emulate == "none" else rollout.emulate)
    scale = 1.0 if distilled else config.sampling.guidance_scale
    amplified = max(1.0, scale, config.sampling.true_cfg_scale)
    return amplified * max(PRECISION_GAP[name] for name in names)


def largest_gap(usual: float) -> float:
    """The largest velocity gap that does not fail, beside the `usual` one."""
    return min(WARN_FACTOR * usual, LARGEST_GAP)


def rms(difference: Tensor) -> float:
    """Root mean square."""
    return float(difference.double().square().mean().sqrt())
