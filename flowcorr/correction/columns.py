"""The collector behind the metrics of a correction: one packed block from dozens of values.

Everything is first brought to rows of `[B]` values, whose sums and extremes are then taken together. Nothing is
read by the host.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flowcorr.correction.ratios import LogRatios
from flowcorr.metrics import Block, Field, Layout

# A metric: its name, its kind in `flowcorr.metrics.KINDS`, and the parts it is made of.
Spec = tuple[str, str, tuple[str, ...]]


_LONG_ROW = 2048


class Columns:
    """Named values of one batch, whose sums and extremes are the parts of its metrics.

    The parts of `x` are named `x/samples` and `x/terms`, its sums over samples that have a valid term and over
    valid terms, `x/all`, its sum over all samples, `x/max` and `x/min`, its extremes over valid terms or their
    samples, and `step/x`, its sum over the valid terms of each step index.
    """

    def __init__(self, ratios: LogRatios) -> None:
        self.ratios = ratios
        self.sums: dict[str, dict[str, Tensor]] = {"terms": {}, "samples": {}}
        self.totals: dict[str, Tensor] = {}
        self.peaks: dict[str, Tensor] = {}
        self.steps: dict[str, Tensor] = {}
        # Short rows are reduced together at the end, as all are on a GPU. Long ones are reduced as they come,
        # while a CPU has them in its cache.
        self._at_once = len(ratios.delta) > _LONG_ROW and ratios.delta.device.type == "cpu"
        self._weights = {"terms": ratios.num_valid, "samples": ratios.has_valid}
        self._offset = ratios.has_valid.log()  # 0, or -inf where a sample has no valid term

    def add(self, name: str, values: Tensor, *over: str) -> None:
        """Take the sums of `[B]` values over `samples` or `terms`."""
        for domain in over:
            self.sums[domain][name] = torch.dot(values, self._weights[domain]) if self._at_once else values

    def add_all(self, name: str, values: Tensor) -> None:
        """Take the sum of `[B]` values over all samples, with or without a valid term."""
        self.totals[f"{name}/all"] = values.sum()

    def add_steps(self, name: str, values: Tensor) -> None:
        """Take the sum of `[B, T]` values over terms; they must be 0 where invalid."""
        self.totals[f"{name}/terms"] = values.sum()

    def add_range(self, name: str, values: Tensor) -> None:
        """Take the extremes of `[B]` or `[B, T]` values."""
        self.add_max(f"{name}/max", values)
        self.add_max(f"{name}/min", -values)

    def add_max(self, name: str, values: Tensor) -> None:
        """Take the largest of `[B]` or `[B, T]` values as the part `name`."""
        if values.dim() == 2:
            values = values.masked_fill(self.ratios.valid == 0, -math.inf).amax(1)
        self.peaks[name] = (values + self._offset).amax() if self._at_once else values

    def pack(self, step_indices: Tensor | None, num_steps: int) -> Block:
        """All parts, in the order of `layout`."""
        if self._at_once:
            sums = [torch.stack([total for totals in self.sums.values() for total in totals.values()])]
            peaks = torch.stack(tuple(self.peaks.values()))
        else:
            sums = [
                torch.mv(torch.stack(tuple(rows.values())), self._weights[domain])
                for domain, rows in self.sums.items()
            ]
            peaks = torch.stack(tuple(self.peaks.values())).add_(self._offset).amax(1)
        sums.append(torch.stack(tuple(self.totals.values())))
        if step_indices is not None:
            steps = torch.stack(tuple(self.steps.values())).flatten(1)
            sums.append((steps @ _one_hot(step_indices, num_steps)).flatten())
        return Block(torch.cat(sums), peaks)

    def names(self) -> Names:
        """What was taken, which with `num_steps` determines the order of the parts."""
        return Names(
            terms=tuple(self.sums["terms"]),
            samples=tuple(self.sums["samples"]),
            totals=tuple(self.totals),
            peaks=tuple(self.peaks),
            steps=tuple(self.steps),
        )


@dataclass(frozen=True, slots=True)
class Names:
    """The names of a `Columns`, in order."""

    terms: tuple[str, ...]
    samples: tuple[str, ...]
    totals: tuple[str, ...]
    peaks: tuple[str, ...]
    steps: tuple[str, ...]

    def sum_slots(self) -> dict[str, int]:
        """The places of the sums of a block."""
        terms = [f"{name}/terms" for name in self.terms]
        samples = [f"{name}/samples" for name in self.samples]
        parts = (*terms, *samples, *self.totals)
        return {part: slot for slot, part in enumerate(parts)}


def layout(names: Names, specs: tuple[Spec, ...], num_steps: int) -> Layout:
    """The fields of those `specs` whose parts were taken; with 0 `num_steps`, of no part by step index."""
    sums = names.sum_slots()
    slots = sums | {name: slot for slot, name in enumerate(names.peaks)}
    fields = [_field(spec, slots) for spec in specs if all(part in slots for part in spec[2])]
    for index in range(num_steps if names.steps else 0):
        slots = {f"step/{name}": len(sums) + row * num_steps + index for row, name in enumerate(names.steps)}
        fields += [_field(spec, slots, index) for spec in specs if all(part in slots for part in spec[2])]
    return Layout(tuple(fields))


def step_layout(names: Names, specs: tuple[Spec, ...], index: int) -> Layout:
    """The fields of one step index, in a block of the parts `step/x` of that index alone."""
    slots = {f"step/{name}": slot for slot, name in enumerate(names.steps)}
    return Layout(
        tuple(_field(spec, slots, index) for spec in specs if all(part in slots for part in spec[2]))
    )


def _field(spec: Spec, slots: dict[str, int], index: int | None = None) -> Field:
    name, kind, parts = spec
    return Field(name.format(index), kind, tuple(slots[part] for part in parts))


def _one_hot(step_indices: Tensor, num_steps: int) -> Tensor:
    # A product with it is deterministic on every device, which index_add is not.
    steps = torch.arange(num_steps, device=step_indices.device)
    return (step_indices.flatten().unsqueeze(1) == steps).double()
