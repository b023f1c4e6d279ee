"""Signed residuals: the engine's numbers less the training stack's, as shares of the change that a fault would make.

Rounding moves a number up as often as down, so the mean of residuals shrinks as `1 / sqrt(n)` over prompts and training
steps. A fault of the engine stays. What a single replay cannot tell from rounding, a run can.

A residual is projected on the change that a fault makes: on the step noise for noise of another size, on the velocity
for a velocity of another length. One prompt of one training step gives one term, as the images of a prompt share
latents and so their rounding. Of the mean of these terms, a confidence sequence holds after all training steps at once,
however often it is looked at: its lower end is what chance cannot explain, its upper end what may still hide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flowcorr.config.engines import ENGINES
from flowcorr.config.schema import Config
from flowcorr.metrics import Metrics, Stat, maximum
from flowcorr.rollout.precision import coarse_weights, usual_gap

PREFIX = "rollout_corr/residual/"
UNSEEN = "/unseen"
ALPHA = 1e-3  # chance of a false alarm of one residual, in a run of any length
_PRIOR = 100.0  # variance of the effect sizes (mean over std) that the mixture of `radius` is made for
_TERMS = "residual_terms/"


Limit = Callable[[Config], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """One residual.

    Attributes:
        name: its name.
        what: the fault whose size it is, in words.
        unit: of that size.
        limit: the largest size that rounding explains in a run.
        remedy: what to do beyond it.
        squared: whether terms are squares of the size.
    """

    name: str
    what: str
    unit: str
    limit: Limit
    remedy: str
    squared: bool = False


# Rounding is not quite without direction: rounded weights shift every velocity alike. The limits are two to three times
# the largest mean of clean runs of the embedded model: seeds 7001 and 7101, 8 training steps, 8 prompts with 4 images,
# an adapter moved at random, guidance 1 and 4, replays every second step; in float32, float16, bfloat16 (in the engine
# alone, and in both stacks), int8, fp8 and int4. Tests use other seeds.
def _of_gap(alike: float, apart: float, coarse: float) -> Limit:
    """Shares of `usual_gap`.

    Args:
        alike: where both stacks compute in one precision.
        apart: where they do not, so that the weights of one are rounded to half precision.
        coarse: where the weights of one side alone are rounded to fewer bits.
    """

    def limit(config: Config) -> float:
        same = config.rollout.dtype == config.model.dtype
        share = coarse if coarse_weights(config) else alike if same else apart
        return share * usual_gap(config, distilled=False)

    return limit


def _of_images(alike: float, apart: float) -> Limit:
    """The first where both stacks decode in one precision, and images differ by kernels at most.

    The second is three times what a decoder in bfloat16 and one in float32 differ by (seeds 7301 and 7302).
    """

    def limit(config: Config) -> float:
        engine = ENGINES.get(config.rollout.name)
        shared = engine is not None and engine.shares_weights
        return alike if shared or config.rollout.dtype == config.model.dtype else apart

    return limit


_NOISE = (
    "the engine has to add s times the standard normal noise in float32 that (seed, training step, group, member) and "
    "step index give, and to return the latents as they are"
)
_VELOCITY = (
    "the engine's transformer is not the trainer's in some part that rounding hides in a single step: compare weights, "
    "adapter, attention, timesteps, guidance and embeddings; `flowcorr doctor` compares both in float32"
)
_PATH = "no log-prob sees these steps: compare initial noise, schedule, guidance and bounds of latents in both stacks"
_IMAGES = (
    "the engine's images are not those of its final latents: compare VAE, scaling and shift, order of channels, and "
    "compression on the way"
)

RESIDUALS = (
    Residual(
        name="step_noise",
        what="how much the step noise is too large or too small",
        unit="share of the noise",
        limit=lambda config: 5e-4,
        remedy=_NOISE,
    ),
    Residual(
        name="step_noise_rounding",
        what="how much of a rounding to bfloat16 or float16 is in the step noise",
        unit="share of the rounding",
        limit=lambda config: 0.25,
        remedy=_NOISE,
    ),
    Residual(
        name="velocity_length",
        what="how much the velocity is too long or too short",
        unit="share of the velocity",
        limit=_of_gap(0.03, 0.03, 0.25),
        remedy=_VELOCITY,
    ),
    Residual(
        name="velocity_common",
        what="error of the velocity that all prompts share",
        unit="share of the velocity",
        limit=_of_gap(0.06, 0.15, 0.5),
        remedy=_VELOCITY,
        squared=True,
    ),
    Residual(
        name="path_before",
        what="how much of the initial noise is too much or too little before the window",
        unit="share of the noise",
        limit=_of_gap(0.01, 0.015, 0.03),
        remedy=_PATH,
    ),
    Residual(
        name="path_after",
        what="how much the way from the window to the final latents is too long or too short",
        unit="share of the way",
        limit=_of_gap(0.02, 0.02, 0.1),
        remedy=_PATH,
    ),
    Residual(
        name="image_error",
        what="mean difference of images from the trainer's decoding of their latents",
        unit="grey levels of 255",
        limit=_of_images(0.5, 0.9),
        remedy=_IMAGES,
    ),
    Residual(
        name="image_level",
        what="how much a channel of the images is too bright or too dark",
        unit="grey levels of 255",
        limit=_of_images(0.1, 0.4),
        remedy=_IMAGES,
    ),
    Residual(
        name="image_contrast",
        what="how much the contrast of a channel of the images is too high or too low",
        unit="share of the contrast",
        limit=_of_images(0.002, 0.003),
        remedy=_IMAGES,
    ),
    Residual(
        name="image_detail",
        what="how much the fine detail of a channel of the images is too strong or too weak",
        unit="share of the detail",
        limit=_of_images(0.003, 0.006),
        remedy=_IMAGES,
    ),
    Residual(
        name="image_channels",
        what="how much red and blue of the images are exchanged",
        unit="share of the difference of red and blue",
        limit=_of_images(0.02, 0.04),
        remedy=_IMAGES,
    ),
)


def share(residuals: Tensor, direction: Tensor) -> Tensor:
    """How much of `direction` the residuals hold, `[G]` of `[G, ...]`: a least-squares fit."""
    products = (residuals * direction).flatten(1).sum(1, dtype=torch.float64)
    return products / direction.square().flatten(1).sum(1, dtype=torch.float64)


def in_common(residuals: Tensor) -> Tensor:
    """Product of each row `[G, D]` with the mean of the rows before it, `[G - 1]`: the first row has none.

    Given the rows before, each has the mean 0 if rows are independent and have no mean of their own, and `c^2` if all
    have a part of length `c` in common.
    """
    before = residuals.cumsum(0)[:-1] / torch.arange(len(residuals))[1:].to(residuals).unsqueeze(1)
    return (residuals[1:] * before).sum(1, dtype=torch.float64)


def terms(name: str, values: Tensor) -> Metrics:
    """A training step's terms of a residual; those that are not finite are left out.

    Args:
        name: of a row of `RESIDUALS`.
        values: `[G]` or `[G, C]`, one term a prompt, of `C` channels.
    """
    values = values.double().flatten(1) if values.dim() > 1 else values.double().unsqueeze(1)
    values = values[values.isfinite().all(1)]
    if not len(values):
        return Metrics()
    mean = values.mean(0)
    count = torch.full_like(mean, len(values))
    stat = Stat("moments", (count, mean, (values - mean).square().sum(0)))
    return Metrics.from_stats({f"{_TERMS}{name}/{{}}": stat})


def radius(count: float, std: Tensor, alpha: float) -> Tensor:
    """Half the width of a confidence sequence of the mean of normal terms whose variance is not known.

    The Bayes factor of the t-test with a normal prior on the effect size and the right Haar prior on the variance is a
    test martingale of the scale-free observations, so it exceeds `1 / alpha` at any time with probability `alpha` at
    most. The sequence holds the means at which it does not. For many terms it is Robbins' normal mixture.

    Source: Robbins, "Statistical methods related to the law of the iterated logarithm", Ann. Math. Statist. 41 (1970);
    Lai, "On confidence sequences", Ann. Statist. 4 (1976); Wang and Ramdas, "Anytime-valid t-tests and confidence
    sequences for Gaussian means with unknown variance", arXiv:2310.03722.

    Args:
        count: number of terms.
        std: their unbiased standard deviation.
        alpha: probability that the mean is ever outside.

    Returns:
        Like `std`; infinite while the terms are too few to exclude any mean.
    """
    if count < 2:
        return torch.full_like(std, math.inf)
    shrinkage = 1 + count * _PRIOR
    # With u = t^2 / (count - 1), the factor is `shrinkage^(-1/2) ((1 + u) / (1 + u / shrinkage))^(count / 2)`.
    power = math.exp((2 * math.log(1 / alpha) + math.log(shrinkage)) / count)
    if power >= shrinkage:
        return torch.full_like(std, math.inf)
    u = (power - 1) / (1 - power / shrinkage)
    return std * math.sqrt(u * (count - 1) / count)


class Residuals:
    """The residuals of a run, over all of its training steps."""

    def __init__(self) -> None:
        self._terms = Metrics()

    def observe(self, metrics: Metrics) -> Metrics:
        """Add the terms of a training step, of all ranks.

        Returns:
            `<name>`, the size that chance does not explain, 0 for rounding alone; `<name>/unseen`, the size of the
            largest fault that may still hide. Both are those of the worst channel.
        """
        new = metrics.renamed(lambda name: name if name.startswith(_TERMS) else None)
        self._terms = self._terms.merge(new).on_host()
        stats: dict[str, Stat] = {}
        for row in RESIDUALS:
            parts = self._terms.parts(f"{_TERMS}{row.name}/{{}}")
            if not parts:
                continue
            count, mean, squares = torch.tensor(parts, dtype=torch.float64).unbind(1)
            std = (squares / (count - 1).clamp(min=1)).sqrt()
            around = radius(float(count[0]), std, ALPHA / len(parts))
            size = mean if row.squared else mean.abs()
            least, most = (size - around).clamp(min=0).max(), (size + around).clamp(min=0).max()
            if row.squared:
                least, most = least.sqrt(), most.sqrt()
            stats[f"{PREFIX}{row.name}"] = maximum(least)
            if math.isfinite(most):
                stats[f"{PREFIX}{row.name}{UNSEEN}"] = maximum(most)
        return Metrics.from_stats(stats)

    def state(self) -> dict[str, Tensor]:
        """The state for a checkpoint."""
        names = [f"{_TERMS}{row.name}/{{}}" for row in RESIDUALS]
        parts = {name: self._terms.parts(name) for name in names}
        return {name: torch.tensor(rows, dtype=torch.float64) for name, rows in parts.items() if rows}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Load the result of `state`."""
        stats = {name: Stat("moments", tuple(rows.unbind(1))) for name, rows in state.items()}
        self._terms = Metrics.from_stats(stats)
