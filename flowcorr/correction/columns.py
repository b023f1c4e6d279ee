"""The collector behind the metrics of a correction: one packed block from dozens of values.

Everything is first brought to rows of `[B]` values; a few matrix-vector products then sum all rows, and one
`amax` takes all extremes. Nothing is read by the host.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from flowcorr.correction.ratios import LogRatios, sum_steps
from flowcorr.metrics import Block, Field, Layout

# A metric: its name, its kind in `flowcorr.metrics.KINDS`, and the parts it is made of.
Spec = tuple[str, str, tuple[str, ...]]


class Columns:
    """Named values of one batch, whose sums and extremes are the parts of its metrics.

    The parts of `x` are named `x/samples` and `x/terms`, its sums over samples that have a valid term and over
    valid terms, `x/all`, its sum over all samples, `x/max` and `x/min`, its extremes over valid terms or their
    samples, and `step/x`, its sum over the valid terms of each step index.
    """

    def __init__(self, ratios: LogRatios) -> None:
        self.ratios = ratios
        self.sums: dict[str, dict[str, Tensor]] = {"terms": {}, "samples": {}, "all": {}}
        self.peaks: dict[str, Tensor] = {}
        self.steps: dict[str, Tensor] = {}

    def add(self, name: str, values: Tensor, *over: str) -> None:
        """Take the sums of `[B]` values over `samples`, `terms` or `all`."""
        for domain in over:
            self.sums[domain][name] = values

    def add_steps(self, name: str, values: Tensor) -> Tensor:
        """Take the sum over terms of `[B, T]` values that are 0 where invalid; gives their sums `[B]`."""
        totals = sum_steps(values)
        self.sums["all"][f"{name}/terms"] = totals
        return totals

    def add_range(self, name: str, values: Tensor) -> None:
        """Take the extremes of `[B]` or `[B, T]` values."""
        self.add_max(f"{name}/max", values)
        self.add_max(f"{name}/min", -values)

    def add_max(self, name: str, values: Tensor) -> None:
        """Take the largest of `[B]` or `[B, T]` values as the part `name`."""
        if values.dim() == 2:
            values = values.masked_fill(self.ratios.valid == 0, -math.inf).amax(1)
        self.peaks[name] = values

    def pack(self, step_indices: Tensor | None, num_steps: int) -> Block:
        """All parts, in the order of `layout`."""
        has_valid = self.ratios.has_valid
        sums = [
            _stack(self.sums["terms"]) @ self.ratios.num_valid,
            _stack(self.sums["samples"]) @ has_valid.double(),
            _stack(self.sums["all"]).sum(1),
        ]
        if step_indices is not None:
            sums.append((_stack(self.steps).flatten(1) @ _one_hot(step_indices, num_steps)).flatten())
        nothing = has_valid.double().log_()  # 0, or -inf where a sample has no valid term
        return Block(torch.cat(sums), _stack(self.peaks).add_(nothing).amax(1))

    def layout(self, specs: tuple[Spec, ...], num_steps: int) -> Layout:
        """The fields of those `specs` whose parts were taken."""
        return _layout(specs, self._sum_names(), tuple(self.peaks), tuple(self.steps), num_steps)

    def slot(self, part: str) -> int:
        """The place of a part in the packed sums."""
        return self._sum_names().index(part)

    def _sum_names(self) -> tuple[str, ...]:
        sums = self.sums
        return (
            *(f"{name}/terms" for name in sums["terms"]),
            *(f"{name}/samples" for name in sums["samples"]),
            *(name if name.endswith("/terms") else f"{name}/all" for name in sums["all"]),
        )


def _stack(values: dict[str, Tensor]) -> Tensor:
    # Stacking tensors of several dtypes is ten times slower than bringing each to float64.
    return torch.stack(
        [value if value.dtype == torch.float64 else value.double() for value in values.values()]
    )


def _one_hot(step_indices: Tensor, num_steps: int) -> Tensor:
    # A product with it is deterministic on every device, which index_add is not.
    steps = torch.arange(num_steps, device=step_indices.device)
    return (step_indices.flatten().unsqueeze(1) == steps).double()


@lru_cache(maxsize=64)
def _layout(
    specs: tuple[Spec, ...],
    sums: tuple[str, ...],
    peaks: tuple[str, ...],
    steps: tuple[str, ...],
    num_steps: int,
) -> Layout:
    slots = {name: slot for slot, name in enumerate(sums)} | {name: slot for slot, name in enumerate(peaks)}
    fields = [_field(spec, slots) for spec in specs if all(part in slots for part in spec[2])]
    for index in range(num_steps if steps else 0):
        slots = {f"step/{name}": len(sums) + row * num_steps + index for row, name in enumerate(steps)}
        fields += [_field(spec, slots, index) for spec in specs if all(part in slots for part in spec[2])]
    return Layout(tuple(fields))


def _field(spec: Spec, slots: dict[str, int], index: int | None = None) -> Field:
    name, kind, parts = spec
    return Field(name.format(index), kind, tuple(slots[part] for part in parts))
