"""The collector behind the metrics of a correction: sums and extremes, reduced at once into one packed block.

Everything is brought to one row of `[B]` values; one matrix product with `(num_valid, has_valid)` then gives
each row's sum over terms and over samples, so that dozens of metrics cost two reductions and no host read.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from flowcorr.correction.ratios import LogRatios, sum_steps
from flowcorr.metrics import Block, Field, Layout

# A metric's name, its kind, and the sums or the extreme it is made of; see `Columns` for their names.
Spec = tuple[str, str, tuple[str, ...]]


class Columns:
    """Rows of per-sample values, by name.

    A sum is named `row/samples` or `row/terms`: the sum of a row over samples, or of the same values over all
    valid terms. Rows that were themselves summed over steps are named `row/terms` from the start. An extreme is
    named by its row.
    """

    def __init__(self, ratios: LogRatios) -> None:
        self.ratios = ratios
        self.rows: dict[str, Tensor] = {"n": ratios.has_valid}
        self.extremes: dict[str, Tensor] = {}
        self.steps: dict[str, Tensor] = {}

    def add(self, name: str, values: Tensor, *, extremes: bool = False) -> None:
        """Take `[B]` values of samples."""
        self.rows[name] = values
        if extremes:
            self.extremes[name] = values

    def add_sum(self, name: str, values: Tensor) -> None:
        """Take `[B, T]` values of steps, 0 where invalid."""
        self.rows[f"{name}/terms"] = sum_steps(values)

    def pack(self, step_indices: Tensor | None, num_steps: int) -> Block:
        """All sums and maxima, in the order that `layout` knows."""
        num_valid, has_valid = self.ratios.num_valid, self.ratios.has_valid
        sums = torch.stack(tuple(self.rows.values())) @ torch.stack((has_valid, num_valid), 1)
        highs = torch.stack(tuple(self.extremes.values()))
        extremes = torch.cat((highs, -highs)).masked_fill_(~has_valid, -torch.inf).amax(1)
        flat = sums.flatten()
        if step_indices is not None:
            flat = torch.cat((flat, self._by_step(step_indices, num_steps).flatten()))
        return Block(flat, extremes)
