"""Bounds of a rejection mode's value: measured on a batch, and widened by the movement that learning may cause."""

from __future__ import annotations

import math

from torch import Tensor

from flowcorr.correction.modes import Mode
from flowcorr.correction.robust import outlier_band
from flowcorr.distributed import Group


def measured_bounds(
    mode: Mode,
    value: Tensor,
    valid: Tensor,
    *,
    rows: Tensor,
    num_rows: int,
    floor: Tensor,
    group: Group = None,
) -> tuple[float | Tensor, Tensor]:
    """Bounds of a mode's value that the noise of the batch stays within; see `robust.outlier_band`.

    Log-ratios of noise are nearly normal. Their squares, and sums of a few squares, are not, but the cube roots of
    these are: Wilson and Hilferty, "The Distribution of Chi-Square", PNAS 17 (1931). Without the cube root, 96 of 100
    clean batches of 96 terms would have outliers.

    Args:
        value: its value for each step or sample of the batch.
        valid: `[B, T]` bool, terms that count.
        rows: `[B, T]` int64 in `[0, num_rows)`: steps are compared within their row, samples within the row of their
            first step.
        floor: 0-d, a value that rounding can have.
    """
    if mode.level == "sample":
        valid, rows = valid.any(1), rows[:, 0]
    normal, floor = near_normal(mode, value), near_normal(mode, floor)
    low, high = outlier_band(normal, valid, rows, num_rows, floor=floor, group=group)
    if mode.bounds.is_band:
        return low, high
    return -math.inf, from_near_normal(mode, high)


def near_normal(mode: Mode, value: Tensor) -> Tensor:
    """Map a mode's values to a scale on which noise is nearly normal, see `measured_bounds`."""
    length = mode.bounds.length
    return value if length is None else length(value.clamp(min=0.0)).pow(2 / 3)


def from_near_normal(mode: Mode, normal: Tensor) -> Tensor:
    """The inverse of `near_normal`, never below the value that it came from."""
    of_length = mode.bounds.value
    if of_length is None:
        return normal
    # A value may be the bound itself, and the cube of its cube root an ulp smaller.
    return of_length(normal.clamp(min=0.0).pow(3 / 2)) * (1 + 1e-12)


def widened(mode: Mode, upper: Tensor, slack: Tensor) -> Tensor:
    """An upper bound for log-ratios that are longer by a slack.

    By the triangle inequality no value within `upper` leaves this bound by such a shift.

    Args:
        upper: the bound of the mode's value, which has no band.
        slack: the value of the shift alone.
    """
    length, of_length = mode.bounds.length, mode.bounds.value
    assert length is not None, "a band is widened on both sides"
    assert of_length is not None
    return of_length(length(upper) + length(slack))
