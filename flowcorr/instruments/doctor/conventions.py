"""Ways to make a log-prob of the noise of a step, of an engine at hand and of captured samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    """

    name: str
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
CONVENTIONS: Sequence[Convention] = (
    MEAN,
    Convention(name="means without - log s - log(2 pi) / 2", normaliser="none"),
    Convention(name="means without - log(2 pi) / 2", normaliser="std"),
    Convention(name="means without 1 / (2 s^2)", scaled=False, normaliser="none"),
    Convention(name="sums", summed=True),
    Convention(name="sums without - log s - log(2 pi) / 2", normaliser="none", summed=True),
    Convention(name="sums without - log(2 pi) / 2", normaliser="std", summed=True),
    Convention(name="sums without 1 / (2 s^2)", scaled=False, normaliser="none", summed=True),
    Convention(name="means of a density whose std lacks the root of the step", per_step=True),
)
