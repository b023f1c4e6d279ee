"""Metrics of signed residuals, with the size that rounding explains in a run.

The engine's numbers less the training stack's, as shares of the change that a fault would make. Rounding moves a number
up as often as down, so the mean of residuals shrinks as `1 / sqrt(n)` over prompts and training steps. A fault of the
engine stays. What a single replay cannot tell from rounding, a run can.

Their terms and statistics are in `flowcorr.questions.residual_terms`.
"""

from __future__ import annotations

import math

from flowcorr.config.engines import ENGINES
from flowcorr.health.metric import Metric, row
from flowcorr.health.rule import Limit, Rule, Units
from flowcorr.questions.question import AFTER, BEFORE, BEYOND, IMAGES_REMEDY, STEP_NOISE
from flowcorr.rollout.precision import coarse_weights, image_limit_of


def _row(name: str, what: str, unit: str, *, limit: Limit, remedy: str) -> Metric:
    """The row of a residual, which is the size of a fault; `limit` is the largest size that rounding explains."""
    return row(
        f"residual/{name}",
        f"Over the run so far, {what}: the size that chance does not explain; 0 for rounding.",
        unit,
        rule=Rule(name=name, what=f"{what}, beyond chance,", high=limit, fault=BEYOND, advice=remedy),
    )


# Rounding is not quite without direction: rounded weights shift every velocity alike. The limits are two to three times
# the largest mean of clean runs of the embedded model: seeds 7001 and 7101, 8 training steps, 8 prompts with 4 images,
# an adapter moved at random, guidance 1 and 4, replays every second step; in float32, float16, bfloat16 (in the engine
# alone, and in both stacks), int8, fp8 and int4. Tests use other seeds.
def _of_gap(alike: float, apart: float, coarse: float) -> Limit:
    """Shares of the run's `usual_gap`.

    Args:
        alike: where both stacks compute in one precision.
        apart: where they do not, so that the weights of one are rounded to half precision.
        coarse: where the weights of one side alone are rounded to fewer bits.
    """

    def limit(units: Units) -> float:
        config = units.config
        if config is None:
            return math.inf
        same = config.rollout.dtype == config.model.dtype
        return units.usual_gap * (coarse if coarse_weights(config) else alike if same else apart)

    return limit


def _of_images(alike: float, apart: float) -> Limit:
    """The limit `alike` if both stacks decode in one precision, so that images differ by kernels at most, else `apart`.

    `apart` is three times the difference of a decoder in bfloat16 from one in float32 (seeds 7301 and 7302).
    """

    def limit(units: Units) -> float:
        config = units.config
        if config is None:
            return math.inf
        engine = ENGINES.get(config.rollout.name)
        shared = engine is not None and engine.shares_weights
        return alike if shared or config.rollout.dtype == config.model.dtype else apart

    return limit


def image_limit(units: Units) -> float:
    """The largest mean difference of an image from the trainer's decoding, in grey levels, that dtypes explain."""
    return math.inf if units.config is None else image_limit_of(units.config)


_VELOCITY = (
    "the engine's transformer is not the trainer's in some part that rounding hides in a single step: compare weights, "
    "adapter, attention, timesteps, guidance and embeddings; `flowcorr doctor` compares both in float32"
)

RESIDUALS = (
    _row(
        "step_noise",
        "how much the step noise is too large or too small",
        "share of the noise",
        limit=5e-4,
        remedy=STEP_NOISE.remedy,
    ),
    _row(
        "step_noise_rounding",
        "how much of a rounding to bfloat16 or float16 is in the step noise",
        "share of the rounding",
        limit=0.25,
        remedy=STEP_NOISE.remedy,
    ),
    _row(
        "velocity_length",
        "how much the velocity is too long or too short",
        "share of the velocity",
        limit=_of_gap(0.03, 0.03, 0.25),
        remedy=_VELOCITY,
    ),
    _row(
        "velocity_common",
        "error of the velocity that all prompts share",
        "share of the velocity",
        limit=_of_gap(0.06, 0.15, 0.5),
        remedy=_VELOCITY,
    ),
    _row(
        "path_before",
        "how much of the initial noise is too much or too little before the window",
        "share of the noise",
        limit=_of_gap(0.01, 0.015, 0.03),
        remedy=BEFORE.remedy,
    ),
    _row(
        "path_after",
        "how much the way from the window to the final latents is too long or too short",
        "share of the way",
        limit=_of_gap(0.02, 0.02, 0.1),
        remedy=AFTER.remedy,
    ),
    _row(
        "image_error",
        "mean difference of images from the trainer's decoding of their latents",
        "grey levels of 255",
        limit=image_limit,
        remedy=IMAGES_REMEDY,
    ),
    _row(
        "image_level",
        "how much a channel of the images is too bright or too dark",
        "grey levels of 255",
        limit=_of_images(0.1, 0.4),
        remedy=IMAGES_REMEDY,
    ),
    _row(
        "image_contrast",
        "how much the contrast of a channel of the images is too high or too low",
        "share of the contrast",
        limit=_of_images(0.002, 0.003),
        remedy=IMAGES_REMEDY,
    ),
    _row(
        "image_detail",
        "how much the fine detail of a channel of the images is too strong or too weak",
        "share of the detail",
        limit=_of_images(0.003, 0.006),
        remedy=IMAGES_REMEDY,
    ),
    _row(
        "image_channels",
        "how much red and blue of the images are exchanged",
        "share of the difference of red and blue",
        limit=_of_images(0.02, 0.04),
        remedy=IMAGES_REMEDY,
    ),
)
