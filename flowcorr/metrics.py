"""Metrics that merge exactly over micro-batches and ranks.

A producer describes each metric by a `Stat`: the parts that it is computed from, such as a sum and a count. Merging
keeps the parts of every micro-batch, still on the device. `Metrics.compute` copies all of them to the host at once and
merges them there in float64, so a mean, a standard deviation or an effective sample size is that of the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, zip_longest

import torch
from torch import Tensor

from flowcorr.distributed import Group, gather, world_size

Number = Tensor | float | int
Parts = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Kind:
    """How the parts of two batches merge, and the value of merged parts; None if there was no term."""

    merge: Callable[[Parts, Parts], Parts]
    value: Callable[..., float | None]


def _add(one: Parts, other: Parts) -> Parts:
    return tuple(a + b for a, b in zip(one, other, strict=True))


def _merge_moments(one: Parts, other: Parts) -> Parts:
    """Count, mean and sum of squared deviations of both; Chan, Golub and LeVeque (1983), eq. 1.5."""
    (count_a, mean_a, squares_a), (count_b, mean_b, squares_b) = one, other
    count = count_a + count_b
    if not count:
        return one
    shift = mean_b - mean_a
    mean = mean_a + shift * count_b / count
    return count, mean, squares_a + squares_b + shift * shift * count_a * count_b / count


def _mean(total: float, count: float) -> float | None:
    return total / count if count else None


def _std(count: float, mean: float, squares: float) -> float | None:
    if count < 2:
        return 0.0 if count else None
    return math.sqrt(squares / (count - 1))


def _effective_sample_size(count: float, mean: float, squares: float) -> float | None:
    """`(sum w)^2 / (n sum w^2)` from the mean and the variance of weights, neither of which cancels."""
    second_moment = mean * mean + squares / count if count else 0.0
    return mean * mean / second_moment if second_moment else None


def _largest(one: Parts, other: Parts) -> Parts:
    """NaN if one of them is, whichever comes first: `max` alone keeps its first argument."""
    both = (*one, *other)
    return (math.nan if any(map(math.isnan, both)) else max(both),)


def _smallest(one: Parts, other: Parts) -> Parts:
    return tuple(-value for value in _largest((-one[0],), (-other[0],)))


def _unless(empty: float) -> Callable[[float], float | None]:
    """A reader of the value; it returns None for `empty`, the value of a metric without terms."""
    return lambda value: None if value == empty else value


KINDS: dict[str, Kind] = {
    "mean": Kind(_add, _mean),  # (total, count)
    "std": Kind(_merge_moments, _std),  # (count, mean, sum of squared deviations); unbiased
    "ess": Kind(_merge_moments, _effective_sample_size),  # likewise
    "sum": Kind(_add, lambda value: value),
    "max": Kind(_largest, _unless(-math.inf)),
    "min": Kind(_smallest, _unless(math.inf)),
    "counts": Kind(_add, lambda count: None),  # not logged; read by `Metrics.parts`
    "moments": Kind(_merge_moments, lambda *parts: None),  # the parts of `std`; likewise
}


@dataclass(frozen=True, slots=True, eq=False)
class Stat:
    """One metric by its parts.

    Attributes:
        kind: a key of `KINDS`.
        parts: numbers or 0-d tensors; or `[S]` tensors for `S` metrics whose index replaces `{}` in their name.
    """

    kind: str
    parts: tuple[Number, ...]


Stats = dict[str, Stat]
"""The stats of one micro-batch, by the names of their metrics."""


def mean(total: Number, count: Number) -> Stat:
    """Mean of `count` terms that sum to `total`; not logged for a count of 0."""
    return Stat("mean", (total, count))


def total(value: Number) -> Stat:
    """A quantity that adds up, such as a count."""
    return Stat("sum", (value,))


def maximum(value: Number) -> Stat:
    """The largest value; `-inf` stands for none, and is not logged."""
    return Stat("max", (value,))


def minimum(value: Number) -> Stat:
    """The smallest value; `inf` stands for none, and is not logged."""
    return Stat("min", (value,))


class Over:
    """Stats over the terms of a bool mask `where`. Values outside the mask must be finite and within float32."""

    __slots__ = ("count", "indicator", "where")

    def __init__(self, where: Tensor) -> None:
        self.where, self.indicator = where, where.double().flatten()
        self.count = self.indicator.sum()

    def mean(self, values: Tensor) -> Stat:
        return mean(self._sum(values), self.count)

    def share(self, of: Tensor) -> Stat:
        """The share of terms in which the bools `of` hold."""
        return mean((of & self.where).count_nonzero().double(), self.count)

    def std(self, values: Tensor) -> Stat:
        """The unbiased standard deviation; 0 for one term. A stat `ess` has the same parts."""
        values = values.double()
        mean = self._sum(values) / self.count.clamp(min=1)
        return Stat("std", (self.count, mean, self._sum((values - mean).square())))

    def max(self, values: Tensor) -> Stat:
        values = torch.where(self.where, values, -math.inf)
        return maximum(values.amax() if values.numel() else -math.inf)

    def min(self, values: Tensor) -> Stat:
        values = torch.where(self.where, values, math.inf)
        return minimum(values.amin() if values.numel() else math.inf)

    def _sum(self, values: Tensor) -> Tensor:
        return self.indicator @ values.double().flatten()


class Metrics:
    """Named stats of any number of micro-batches; immutable. One name has one kind.

    Args:
        batches: metrics, or the stats of one micro-batch; the result is that of all of them together.
    """

    __slots__ = ("_batches",)

    def __init__(self, *batches: Metrics | Mapping[str, Stat]) -> None:
        self._batches: tuple[Stats, ...] = tuple(
            chain.from_iterable(
                batch._batches if isinstance(batch, Metrics) else [_detached(batch)] for batch in batches
            )
        )

    def merge(self, other: Metrics | Mapping[str, Stat]) -> Metrics:
        """The metrics of both together."""
        return Metrics(self, other)

    def prefixed(self, prefix: str) -> Metrics:
        """The same metrics under `prefix + name`."""
        return self.renamed(lambda name: prefix + name)

    def renamed(self, rename: Callable[[str], str | None]) -> Metrics:
        """Rename metrics; a metric is dropped if `rename` returns None for it."""
        return Metrics(
            *(
                {new: stat for name, stat in batch.items() if (new := rename(name)) is not None}
                for batch in self._batches
            )
        )

    def on_host(self) -> Metrics:
        """The same metrics, copied to the host at once and merged there to one stat a name."""
        return Metrics({name: _stat(kind, rows) for name, (kind, rows) in self._by_name().items()})

    def across_ranks(self, group: Group = None) -> Metrics:
        """The metrics of all ranks together, by one collective; a rank may lack some of them.

        Every rank merges in rank order, so all get the same bits.
        """
        if world_size(group) == 1:
            return self
        return Metrics(*gather(self.on_host(), "the metrics", group))

    def compute(self) -> dict[str, float]:
        """All values, by one copy to the host; metrics that saw no term are left out, and NaN is told from that."""
        values = {
            name.replace("{}", str(index)): KINDS[kind].value(*parts)
            for name, (kind, rows) in self._by_name().items()
            for index, parts in enumerate(rows)
        }
        return {name: value for name, value in values.items() if value is not None}

    def parts(self, name: str) -> list[Parts]:
        """The merged parts of the stat `name`, one for each index; empty if there is none."""
        _, rows = self._by_name().get(name, ("", []))
        return rows

    def _by_name(self) -> dict[str, tuple[str, list[Parts]]]:
        """Kind and merged parts of each metric: a list of one, or of one for each index of a name with `{}`."""
        merged: dict[str, tuple[str, list[Parts]]] = {}
        for name, kind, rows in self._copied():
            known, old = merged.get(name, (kind, []))
            assert known == kind, f"metric {name} has two producers"
            merge = KINDS[kind].merge
            merged[name] = kind, [merge(a, b) if a and b else a or b for a, b in zip_longest(old, rows)]
        return merged

    def _copied(self) -> Iterable[tuple[str, str, list[Parts]]]:
        """Name, kind and rows of parts of each stat, after one copy to the host."""
        stats = [pair for batch in self._batches for pair in batch.items()]
        tensors = [part for _, stat in stats for part in stat.parts if isinstance(part, Tensor)]
        numbers = iter(_concatenated(tensors).tolist())
        for name, stat in stats:
            columns = [
                [next(numbers) for _ in range(part.numel())] if isinstance(part, Tensor) else [float(part)]
                for part in stat.parts
            ]
            yield name, stat.kind, list(zip(*columns, strict=True))


def _stat(kind: str, rows: list[Parts]) -> Stat:
    if len(rows) == 1:
        return Stat(kind, rows[0])
    return Stat(kind, tuple(torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True)))


def _detached(stats: Mapping[str, Stat]) -> Stats:
    return {name: Stat(stat.kind, tuple(map(_without_graph, stat.parts))) for name, stat in stats.items()}


def _without_graph(part: Number) -> Number:
    return part.detach() if isinstance(part, Tensor) and part.requires_grad else part


def _concatenated(tensors: list[Tensor]) -> Tensor:
    """All values in float64, on the device of the first."""
    if not tensors:
        return torch.zeros(0)
    device = tensors[0].device
    return torch.hstack([part.to(device) for part in tensors]).double()
