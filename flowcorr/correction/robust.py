"""The noise of a batch: its robust centre and spread, and the band beyond which a term is an outlier.

Terms are compared within their row, such as their step of the schedule, because noise differs between steps. A
median does not move as long as fewer than half of the terms are outliers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flowcorr.correction.modes import MAD_TO_STD, OUTLIER_Z
from flowcorr.distributed import Group, gather_rows

# A spread is itself an estimate: a row of 8 normal terms has a false outlier in 3 of 100 batches, one of 24 in 3 of
# 1000, one of 96 in none of 20000.
MIN_TERMS = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Noise:
    """Noise by step of the schedule; NaN at steps without a measurement.

    Attributes:
        centre: `[S]` float64, the middle of a step's values.
        spread: `[S]` float64, their robust standard deviation, and the size of rounding on top of it.
    """

    centre: Tensor
    spread: Tensor

    @classmethod
    def unknown(cls, like: Tensor) -> Noise:
        """Noise of steps `[S]` without any measurement, on the device of `like`."""
        nothing = torch.full_like(like, math.nan, dtype=torch.float64)
        return cls(centre=nothing, spread=nothing)

    def z(self, values: Tensor, rows: Tensor, *, slack: float | Tensor = 0.0) -> Tensor:
        """Distance of values from the centre of their step, beyond a slack, in spreads; 0 for an unknown step.

        Args:
            values: float64 of any shape.
            rows: like `values`, int64, the step of each.
            slack: a number, or like `values`, in their unit.
        """
        beyond = ((values - self.centre[rows]).abs() - slack).clamp(min=0.0)
        return (beyond / self.spread[rows]).nan_to_num(0.0)


@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    """Statistics of one row's terms over all ranks; `median` and `deviation` of an empty row are NaN.

    Attributes:
        count: of the terms.
        median: of the terms.
        deviation: robust standard deviation, 1.4826 times the median absolute deviation.
        smallest, largest: extremes, infinite for an empty row.
    """

    count: Tensor
    median: Tensor
    deviation: Tensor
    smallest: Tensor
    largest: Tensor


def nan_median(values: Tensor) -> Tensor:
    """The median along the last dimension, halfway between the middle two of an even number; NaN if all are NaN.

    Not `nanquantile`: it is limited to 16 million values, and some releases of torch read the device in it.

    Args:
        values: of any shape; NaN does not count.
    """
    ordered, count = values.sort(dim=-1).values, (~values.isnan()).sum(-1, keepdim=True)
    low, high = (ordered.gather(-1, place) for place in ((count - 1).clamp(min=0) // 2, count // 2))
    return torch.lerp(low, high, 0.5).squeeze(-1)


def robust_z(
    values: Tensor,
    valid: Tensor,
    rows: Tensor,
    num_rows: int,
    *,
    floor: Tensor,
    group: Group = None,
) -> Tensor:
    """`|value - median| / (1.4826 MAD + floor)` of each term, with median and MAD of its row over all ranks.

    The score is 0 in a row with fewer than 8 terms. A shift of the whole row changes no score.

    Args:
        values: `[B, T]` float64.
        valid: like `values`, 1 where a term counts, else 0.
        rows: like `values`, int64 in `[0, num_rows)`.
        num_rows: rows there can be.
        floor: like `values`, the size of rounding.
        group: ranks that share the batch.
    """
    z = torch.zeros_like(values)
    for index, row in enumerate(_rows(values, valid, rows, num_rows, group)):
        judged = (valid > 0) & (rows == index) & (row.count >= MIN_TERMS)
        z = torch.where(judged, (values - row.median).abs() / (row.deviation + floor), z)
    return z


def noise_of_rows(
    values: Tensor,
    valid: Tensor,
    rows: Tensor,
    num_rows: int,
    *,
    floor: float | Tensor,
) -> Noise:
    """Centre and spread of each row, unknown for fewer than 8 terms; arguments as in `outlier_band`."""
    measured = list(_rows(values, valid, rows, num_rows, None))
    enough = torch.stack([row.count >= MIN_TERMS for row in measured])
    centre = torch.stack([row.median for row in measured])
    spread = torch.stack([row.deviation for row in measured]) + floor
    return Noise(centre=centre.where(enough, math.nan), spread=spread.where(enough, math.nan))


def outlier_band(
    values: Tensor,
    valid: Tensor,
    rows: Tensor,
    num_rows: int,
    *,
    floor: float | Tensor,
    group: Group = None,
) -> tuple[Tensor, Tensor]:
    """The smallest band that holds `median +- 6 (1.4826 MAD + floor)` of every row; terms outside are outliers.

    A row with fewer than 8 terms has no reliable spread, so the band holds all of its terms. Arguments are those of
    `robust_z`, in any shape; `floor` is one number.

    Returns:
        0-d lower and upper end; `inf` and `-inf` without terms.
    """
    low, high = values.new_full((), math.inf), values.new_full((), -math.inf)
    for row in _rows(values, valid, rows, num_rows, group):
        known = row.count >= MIN_TERMS
        reach = OUTLIER_Z * (row.deviation + floor)
        low = torch.minimum(low, torch.where(known, row.median - reach, row.smallest))
        high = torch.maximum(high, torch.where(known, row.median + reach, row.largest))
    return low, high


def _rows(values: Tensor, valid: Tensor, rows: Tensor, num_rows: int, group: Group) -> Iterator[_Row]:
    columns = torch.stack([values, valid.to(values), rows.to(values)], dim=-1)
    values, valid, rows = gather_rows(columns, "the statistics of a batch", group).unbind(-1)
    for row in range(num_rows):
        terms = values.masked_fill((valid == 0) | (rows != row), math.nan).flatten()
        median = nan_median(terms)
        yield _Row(
            count=terms.isfinite().sum(),
            median=median,
            deviation=MAD_TO_STD * nan_median((terms - median).abs()),
            smallest=terms.nan_to_num(math.inf).amin(),
            largest=terms.nan_to_num(-math.inf).amax(),
        )
