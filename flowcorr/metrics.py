"""Metrics whose parts merge exactly over micro-batches and ranks.

A metric is kept as the sums (or the extreme) it is made of, packed into one float64 vector a producer.
Merging adds those vectors, so the value of a mean, a standard deviation or an effective sample size is
that of the whole batch, however it was cut. Nothing leaves the device before `Metrics.compute`, which
copies everything at once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from flowcorr.distributed import Group, gather, world_size

Number = Tensor | float | int


def _mean(total: float, count: float) -> float:
    return total / count if count else math.nan


def _std(total: float, squares: float, count: float) -> float:
    if count < 2:
        return 0.0 if count else math.nan
    return math.sqrt(max(squares - total * total / count, 0.0) / (count - 1))


def _effective_sample_size(total: float, squares: float, count: float) -> float:
    return total * total / (count * squares) if count and squares else math.nan


def _shifted_ess(total: float, squares: float, count: float) -> float:
    """ESS of weights whose sums were taken of `w - 1`."""
    return _effective_sample_size(total + count, squares + 2.0 * total + count, count)


def _identity(value: float) -> float:
    return value if math.isfinite(value) else math.nan


def _negated(value: float) -> float:
    return _identity(-value)


KINDS: dict[str, Callable[..., float]] = {
    "mean": _mean,  # (total, count)
    "mean_plus_one": lambda total, count: 1.0 + _mean(total, count),  # sums of x - 1, exact near 1
    "std": _std,  # (total, squares, count), unbiased; sums may be of x - constant
    "ess": _effective_sample_size,  # (total, squares, count)
    "ess_plus_one": _shifted_ess,  # likewise, of x - 1
    "sum": _identity,  # (total)
    "max": _identity,  # (maximum)
    "min": _negated,  # (maximum of the negated values)
}
_EXTREMES = ("max", "min")


@dataclass(frozen=True, slots=True)
class Field:
    """One named value and the places of its parts.

    Attributes:
        name: the metric's name, with its prefix once it has one.
        kind: a key of `KINDS`.
        slots: positions in the packed sums, or in the packed maxima for `max` and `min`.
    """

    name: str
    kind: str
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """The fields of one packed block, the same for every micro-batch that a producer sees."""

    fields: tuple[Field, ...]
    # Layouts are dictionary keys on the hot path, and have dozens of fields: hash them once.
    _hash: int = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash(self.fields))

    def __hash__(self) -> int:
        return self._hash

    def prefixed(self, prefix: str) -> Layout:
        """The same fields under `prefix + name`."""
        return _prefixed(self, prefix)


@lru_cache(maxsize=512)
def _prefixed(layout: Layout, prefix: str) -> Layout:
    return Layout(tuple(Field(prefix + field.name, field.kind, field.slots) for field in layout.fields))


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Packed parts: `sums` `[S]` add up and `maxima` `[M]` take the maximum, both float64."""

    sums: Tensor
    maxima: Tensor


@dataclass(frozen=True, slots=True)
class Stat:
    """The parts of one metric, as a producer of a few metrics writes them; see the functions below."""

    kind: str
    parts: tuple[Number, ...]


def mean(total: Number, count: Number) -> Stat:
    """Mean of `count` terms that sum to `total`; left out of the results where no term was seen."""
    return Stat("mean", (total, count))


def std(total: Number, squares: Number, count: Number) -> Stat:
    """Unbiased standard deviation from sums of `x - c` and `(x - c)^2`, `c` any constant; 0 for one term."""
    return Stat("std", (total, squares, count))


def total(value: Number) -> Stat:
    """A quantity that adds up, such as a count."""
    return Stat("sum", (value,))


def maximum(value: Number) -> Stat:
    """The largest value; `-inf` where there was none."""
    return Stat("max", (value,))


def minimum(value: Number) -> Stat:
    """The smallest value; `inf` where there was none."""
    return Stat("min", (-value,))


class Metrics:
    """Named metrics that merge exactly; immutable.

    Two metrics of one name must come from one producer, that is share a `Layout`.
    """

    __slots__ = ("_blocks",)

    def __init__(self, blocks: Mapping[Layout, Block] | None = None) -> None:
        self._blocks: dict[Layout, Block] = dict(blocks or {})

    @classmethod
    def from_stats(cls, stats: Mapping[str, Stat]) -> Metrics:
        """Pack a few metrics, each given by its parts (0-d tensors on one device, or numbers)."""
        if not stats:
            return cls()
        layout = _layout(tuple((name, stat.kind, len(stat.parts)) for name, stat in stats.items()))
        sums = [part for stat in stats.values() if stat.kind not in _EXTREMES for part in stat.parts]
        maxima = [part for stat in stats.values() if stat.kind in _EXTREMES for part in stat.parts]
        device = next((part.device for part in (*sums, *maxima) if isinstance(part, Tensor)), None)
        return cls({layout: Block(_pack(sums, device), _pack(maxima, device))})

    @classmethod
    def merged(cls, parts: Iterable[Metrics]) -> Metrics:
        """All of `parts` in one."""
        result = cls()
        for part in parts:
            result = result.merge(part)
        return result

    def merge(self, other: Metrics) -> Metrics:
        """The metrics of both batches together."""
        blocks = dict(self._blocks)
        for layout, block in other._blocks.items():
            mine = blocks.get(layout)
            if mine is not None:
                block = Block(mine.sums + block.sums, torch.maximum(mine.maxima, block.maxima))
            blocks[layout] = block
        return Metrics(blocks)

    def prefixed(self, prefix: str) -> Metrics:
        """The same metrics under `prefix + name`."""
        return Metrics({layout.prefixed(prefix): block for layout, block in self._blocks.items()})

    def under(self, prefix: str) -> Metrics:
        """The metrics of producers whose names all start with `prefix`."""
        return Metrics(
            {
                layout: block
                for layout, block in self._blocks.items()
                if all(field.name.startswith(prefix) for field in layout.fields)
            }
        )

    def beside(self, prefix: str) -> Metrics:
        """The metrics that `under` leaves out."""
        apart = self.under(prefix)._blocks
        return Metrics({layout: block for layout, block in self._blocks.items() if layout not in apart})

    def sums(self, name: str) -> Tensor:
        """The packed sums `[S]` of the producer of metric `name`, which may keep more of them than its metrics read."""
        for layout, block in self._blocks.items():
            if any(field.name == name for field in layout.fields):
                return block.sums
        raise KeyError(name)

    def across_ranks(self, group: Group = None) -> Metrics:
        """The metrics of all ranks together, by one collective; a rank may lack some, such as where it had no samples.

        Sums are added in rank order, so every rank gets the same bits.
        """
        if world_size(group) == 1:
            return self
        mine = [(layout.fields, *parts) for layout, parts in zip(self._blocks, self._to_host(), strict=True)]
        return Metrics.merged(
            Metrics({Layout(fields): Block(*(torch.tensor(part, dtype=torch.float64) for part in parts))})
            for rank in gather(mine, "the metrics", group)
            for fields, *parts in rank
        )

    def compute(self) -> dict[str, float]:
        """All values, by one copy to the host; metrics that saw no term are left out."""
        values: dict[str, float] = {}
        for layout, (sums, maxima) in zip(self._blocks, self._to_host(), strict=True):
            for field in layout.fields:
                source = maxima if field.kind in _EXTREMES else sums
                value = KINDS[field.kind](*[source[slot] for slot in field.slots])
                if value == value:
                    assert field.name not in values, f"metric {field.name} has two producers"
                    values[field.name] = value
        return values

    def _to_host(self) -> list[tuple[list[float], list[float]]]:
        by_device: dict[torch.device, list[Tensor]] = {}
        for block in self._blocks.values():
            by_device.setdefault(block.sums.device, []).extend((block.sums, block.maxima))
        flat = {device: iter(torch.cat(parts).tolist()) for device, parts in by_device.items()}
        return [
            (
                [next(flat[block.sums.device]) for _ in range(block.sums.numel())],
                [next(flat[block.sums.device]) for _ in range(block.maxima.numel())],
            )
            for block in self._blocks.values()
        ]


@lru_cache(maxsize=512)
def _layout(specification: tuple[tuple[str, str, int], ...]) -> Layout:
    places = {"sums": 0, "maxima": 0}
    fields = []
    for name, kind, size in specification:
        vector = "maxima" if kind in _EXTREMES else "sums"
        fields.append(Field(name, kind, tuple(range(places[vector], places[vector] + size))))
        places[vector] += size
    return Layout(tuple(fields))


def _pack(parts: Sequence[Number], device: torch.device | None) -> Tensor:
    tensors = [
        part.detach().to(torch.float64)
        if isinstance(part, Tensor)
        else torch.full((), float(part), dtype=torch.float64, device=device)
        for part in parts
    ]
    return torch.stack(tensors) if tensors else torch.zeros(0, dtype=torch.float64, device=device)
