"""A row of a table of planted faults, and the search for the smallest size of a fault that is named."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flowcorr.errors import unknown_choice

SMALLER = 4.0  # factor between two sizes of a fault


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault.

    Attributes:
        name: its name.
        stands_for: the mistake in words.
        plant: a size -> what plants a fault of that size.
        size: a large size, at which the fault does harm; None where there is only all or nothing.
        applies: whether a run can have it, by what its table knows of a run.
    """

    name: str
    stands_for: str
    plant: Callable[[float], Any]
    size: float | None = None
    applies: Callable[[Any], bool] = lambda run: True


def whole(name: str, stands_for: str, plant: Any, **more: Any) -> Fault:
    """A fault without a size."""
    return Fault(name=name, stands_for=stands_for, plant=lambda size: plant, **more)


def sized(name: str, stands_for: str, plant: Callable[[float], Any], size: float, **more: Any) -> Fault:
    """A fault that `size` makes larger or smaller."""
    return Fault(name=name, stands_for=stands_for, plant=plant, size=size, **more)


def parse_fault(faults: Sequence[Fault], text: str) -> tuple[Fault, float]:
    """The fault and its size that `NAME` or `NAME=SIZE` stands for on a command line."""
    name, _, size = text.partition("=")
    by_name = {fault.name: fault for fault in faults}
    if name not in by_name:
        raise ArgumentTypeError(unknown_choice("fault", name, [*by_name]))
    return by_name[name], float(size or by_name[name].size or 0.0)


def smallest_named(is_named: Callable[[float], bool], size: float, number: int) -> tuple[float, float | None]:
    """The smallest of `number` sizes that is named, from `size` down, and the next one if that is not named.

    `size` itself is taken to be named.
    """
    smallest = size
    for exponent in range(1, number):
        if not is_named(size / SMALLER**exponent):
            return smallest, size / SMALLER**exponent
        smallest = size / SMALLER**exponent
    return smallest, None
