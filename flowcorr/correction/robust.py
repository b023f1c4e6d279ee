"""What a batch says of its own noise: robust centre and spread, and how far from the centre noise reaches.

Terms are judged among those of their row, such as their step of the schedule, since noise differs between steps.
Medians hold still where up to half of the terms are outliers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flowcorr.distributed import Group, gather_rows

MAD_TO_STD = 1.4826  # of a normal distribution
# A normal term passes 6 robust standard deviations once in 5e8 times: what does is no noise.
OUTLIER_Z = 6.0
# A spread is itself an estimate: a row of 8 normal terms has a false outlier in 3 of 100 batches, one of 24 in 3 of
# 1000, one of 96 in none of 20000.
MIN_TERMS = 8


@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    """One row's terms over all ranks; `median` and `deviation` are NaN where there are none.

    Attributes:
        count: of the terms.
        median: of the terms.
        deviation: robust standard deviation, 1.4826 times the median absolute deviation.
        smallest, largest: extremes, infinite where there are no terms.
    """

    count: Tensor
    median: Tensor
    deviation: Tensor
    smallest: Tensor
    largest: Tensor


def robust_z(
    values: Tensor,
    valid: Tensor,
    rows: Tensor,
    num_rows: int,
    *,
    floor: Tensor,
    group: Group = None,
) -> Tensor:
    """`|value - median| / (1.4826 MAD + floor)` of each term among those of its row, over all ranks.

    A row with fewer than 8 terms judges none of them (0). It is blind to a shift of the whole row.

    Args:
        values: `[B, T]` float64.
        valid: like `values`, 1 where a term counts, else 0.
        rows: like `values`, int64 in `[0, num_rows)`.
        num_rows: rows there can be.
        floor: like `values`, differences that mean nothing.
        group: ranks that share the batch.
    """
    z = torch.zeros_like(values)
    for index, row in enumerate(_rows(values, valid, rows, num_rows, group)):
        judged = (valid > 0) & (rows == index) & (row.count >= MIN_TERMS)
        z = torch.where(judged, (values - row.median).abs() / (row.deviation + floor), z)
    return z


def outlier_band(
    values: Tensor,
    valid: Tensor,
    rows: Tensor,
    num_rows: int,
    *,
    floor: float | Tensor,
    group: Group = None,
) -> tuple[Tensor, Tensor]:
    """The smallest band that holds `median +- 6 (1.4826 MAD + floor)` of every row: what is outside is no noise.

    Of a row with fewer than 8 terms nothing is known, and the band holds all of them. Arguments are those of
    `robust_z`, in any shape; `floor` is one number.

    Returns:
        0-d lower and upper end; crossed and infinite where there are no terms.
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
        median = terms.nanquantile(0.5)
        yield _Row(
            count=terms.isfinite().sum(),
            median=median,
            deviation=MAD_TO_STD * (terms - median).abs().nanquantile(0.5),
            smallest=terms.nan_to_num(math.inf).amin(),
            largest=terms.nan_to_num(-math.inf).amax(),
        )
