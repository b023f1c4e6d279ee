"""Ranges of numbers of standard normal step noise, as chance spreads them. Read without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, TypeVar

from flowcorr.questions.question import ERRORS

if TYPE_CHECKING:
    from torch import Tensor

Number = TypeVar("Number", float, "Tensor")
Moment = Literal["mean", "std", "tails"]
"""`tails`: the mean of `e^4 - 6 e^2 + 3`, the fourth Hermite polynomial."""

_TAILS_OF_GAP = 30.0  # mean fourth power of a gap's elements beside `r^4`: 3 if they are normal


def ranges(count: int | None, gap: float = 0.0) -> dict[Moment, tuple[float, float]]:
    """The range of each moment of step noise within `ERRORS` standard errors.

    Args:
        count: elements of the noise, of all steps; None if it is not known.
        gap: of the means that the noise is measured from, in stds: at most so much is in it besides.
    """
    error = ERRORS / math.sqrt(count) if count else math.inf
    tails = math.sqrt(24) * error  # the variance of the fourth Hermite polynomial is 4!
    square = gap * gap  # infinite for the largest floats, where a power would raise an error
    # Long tails are skewed to the right: in 20,000 draws of 256 to 65,536 normal elements they stay below this factor.
    skew = 1 + 16 * error / ERRORS
    return {
        "mean": (-error - gap, error + gap),
        "std": (1 - error / math.sqrt(2) - gap, 1 + error / math.sqrt(2) + gap),
        "tails": (-tails, tails * skew + _TAILS_OF_GAP * square * square),
    }


def beyond(values: Mapping[Moment, float], count: int | None, gap: float = 0.0) -> dict[Moment, float]:
    """How far each moment is from that of standard normal noise, as a share of its range: above 1, chance is not why.

    Args:
        values: the moments.
        count, gap: see `ranges`.
    """
    shares: dict[Moment, float] = {}
    for moment, (low, high) in ranges(count, gap).items():
        middle = 1.0 if moment == "std" else 0.0
        value = values[moment]
        shares[moment] = (value - middle) / ((high if value > middle else low) - middle)
    return shares


def largest_kl(distance: Number, count: Number, rounding: Number) -> Number:
    """The largest mean of `-delta` of two policies, at most `ERRORS` standard errors from its expectation.

    `delta = -r^2/2 + r z / sqrt(D)` with a standard normal `z`.

    Args:
        distance: `r`, of their step means, in stds.
        count: elements of the steps together, over the square of their noise's spread.
        rounding: of the log-probs, nats a latent element.
    """
    return distance * distance / 2 + ERRORS * distance / count**0.5 + rounding
