"""The mean of signed residuals over a run, with a confidence sequence around it.

A residual is projected on the change that a fault makes: on the step noise for noise of another size, on the velocity
for a velocity of another length. One prompt of one training step gives one term, as the images of a prompt share
latents and so their rounding. A confidence sequence of the mean of these terms holds after all training steps at once,
however often it is looked at: chance does not explain its lower end, and a fault up to its upper end may still hide.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from flowcorr.metrics import Metrics, Stat, Stats, maximum

PREFIX = "rollout_corr/residual/"
UNSEEN = "/unseen"
RESIDUALS = (
    *("step_noise", "step_noise_rounding", "velocity_length", "velocity_common", "path_before", "path_after"),
    *("image_error", "image_level", "image_contrast", "image_detail", "image_channels"),
)
"""Their names; the row of each metric says what it is, and which size rounding explains."""
SQUARED = ("velocity_common",)
"""Residuals of which terms are squares of the size."""

ALPHA = 1e-3  # chance of a false alarm of one residual, in a run of any length
_PRIOR = 100.0  # variance of the effect sizes (mean over std) that the mixture of `radius` is made for
_TERMS = "residual_terms/"


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


def terms(name: str, values: Tensor) -> Stats:
    """Sum up a training step's terms of a residual; terms that are not finite are left out.

    Args:
        name: one of `RESIDUALS`.
        values: `[G]` or `[G, C]`, one term a prompt, of `C` channels.
    """
    values = values.double().flatten(1) if values.dim() > 1 else values.double().unsqueeze(1)
    values = values[values.isfinite().all(1)]
    if not len(values):
        return {}
    mean = values.mean(0)
    count = torch.full_like(mean, len(values))
    stat = Stat("moments", (count, mean, (values - mean).square().sum(0)))
    return {f"{_TERMS}{name}/{{}}": stat}


def radius(count: float, std: Tensor, alpha: float) -> Tensor:
    """Half the width of a confidence sequence for the mean of normal terms with an unknown variance.

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

    def observe(self, metrics: Metrics) -> Stats:
        """Add the terms of a training step, of all ranks.

        Returns:
            `<name>`, the size that chance does not explain, 0 for rounding alone; `<name>/unseen`, the size of the
            largest fault that may still hide. Both are those of the worst channel.
        """
        new = metrics.renamed(lambda name: name if name.startswith(_TERMS) else None)
        self._terms = self._terms.merge(new).on_host()
        stats: dict[str, Stat] = {}
        for name in RESIDUALS:
            parts = self._terms.parts(f"{_TERMS}{name}/{{}}")
            if not parts:
                continue
            count, mean, squares = torch.tensor(parts, dtype=torch.float64).unbind(1)
            std = (squares / (count - 1).clamp(min=1)).sqrt()
            around = radius(float(count[0]), std, ALPHA / len(parts))
            size = mean if name in SQUARED else mean.abs()
            least, most = (size - around).clamp(min=0).max(), (size + around).clamp(min=0).max()
            if name in SQUARED:
                least, most = least.sqrt(), most.sqrt()
            stats[f"{PREFIX}{name}"] = maximum(least)
            if math.isfinite(most):
                stats[f"{PREFIX}{name}{UNSEEN}"] = maximum(most)
        return stats

    def state(self) -> dict[str, Tensor]:
        """The state for a checkpoint."""
        names = [f"{_TERMS}{name}/{{}}" for name in RESIDUALS]
        parts = {name: self._terms.parts(name) for name in names}
        return {name: torch.tensor(rows, dtype=torch.float64) for name, rows in parts.items() if rows}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Load the result of `state`."""
        stats = {name: Stat("moments", tuple(rows.unbind(1))) for name, rows in state.items()}
        self._terms = Metrics(stats)
