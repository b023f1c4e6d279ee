"""Ways to make a log-prob of the noise of a step, of an engine at hand and of captured samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch import Tensor

from flowcorr.sde.log_prob import HALF_LOG_TWO_PI


@dataclass(frozen=True, slots=True, kw_only=True)
class Convention:
    """A way to make a log-prob of the mean square `z^2` of a step's noise and of its std `s`.

    Attributes:
        name: in words.
        scaled: whether the square is divided by `2 s^2`.
        normaliser: which of `- log s` and `- log(2 pi) / 2` are added.
        summed: whether it is a sum over the latent instead of a mean.
        times: factor of a mean, such as the number of channels, over which a sum was taken.
        per_step: whether the std lacks the root of the step.
        cause: of captured log-probs that are made so; empty for the expected way.
        remedy: what to do then.
    """

    name: str
    cause: str = ""
    remedy: str = ""
    scaled: bool = True
    normaliser: Literal["full", "std", "none"] = "full"
    summed: bool = False
    times: int = 1
    per_step: bool = False

    def of(self, square: Tensor, std: Tensor, step: Tensor, num_elements: int) -> Tensor:
        """Log-probs `[n, T]`."""
        if self.per_step:
            square, std = square * step, std / step.sqrt()
        value = -square / 2 if self.scaled else -square * std.square()
        if self.normaliser != "none":
            value = value - std.log()
        if self.normaliser == "full":
            value = value - HALF_LOG_TWO_PI
        return value * self.factor(num_elements)

    def factor(self, num_elements: int) -> int:
        """Times that a mean over the elements is taken."""
        return num_elements if self.summed else self.times


MEAN = Convention(name="means with their normaliser")
_NORMALISER = partial(
    Convention,
    cause="log_probs_normaliser",
    remedy="add these terms to the engine's log-probs, or leave them out of the trainer's",
)
_SUMMED = partial(
    Convention,
    cause="log_probs_summed",
    remedy="take mean() over the latent in place of sum()",
    summed=True,
)
CONVENTIONS: Sequence[Convention] = (
    MEAN,
    _NORMALISER(name="means without - log s - log(2 pi) / 2", normaliser="none"),
    _NORMALISER(name="means without - log(2 pi) / 2", normaliser="std"),
    Convention(
        name="means without 1 / (2 s^2)",
        cause="log_probs_unscaled",
        remedy="divide by 2 s^2, or read clip ranges and gaps in that unit",
        scaled=False,
        normaliser="none",
    ),
    _SUMMED(name="sums"),
    _SUMMED(name="sums without - log s - log(2 pi) / 2", normaliser="none"),
    _SUMMED(name="sums without - log(2 pi) / 2", normaliser="std"),
    _SUMMED(name="sums without 1 / (2 s^2)", scaled=False, normaliser="none"),
    Convention(
        name="means of a density whose std lacks the root of the step",
        cause="log_probs_std",
        remedy="take s = std_dev_t * sqrt(-dt) in the score, as the step that drew the noise has it",
        per_step=True,
    ),
)


def summed_over_channels(count: int) -> Convention:
    """Sums over `count` channels alone."""
    return Convention(
        name="sums over the channels of means over places",
        cause="log_probs_summed",
        remedy="take mean() over all axes but the batch's",
        times=count,
    )
