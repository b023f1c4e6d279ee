"""Long runs and long schedules, in fewer steps than they have."""

from __future__ import annotations

import math
from collections.abc import Sequence, Sized
from typing import TypeVar

MAX_POINTS = 200  # of a curve, or columns of a heat map: a chart is 330 pixels wide
MAX_ROWS = 40  # of steps in a chart; a run has fewer
Item = TypeVar("Item")


def steps_a_point(count: int) -> int:
    """How many training steps make a point."""
    return math.ceil(count / MAX_POINTS)


def stride_text(stride: int) -> str:
    """A note that a point is a mean over steps; empty if it is one step."""
    return f"means over {stride} steps" if stride > 1 else ""


def spread_out(items: Sequence[Item], most: int = MAX_ROWS) -> list[Item]:
    """All items, or `most` of them from the first to the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]


def rows_text(shown: Sized, everything: Sized) -> str:
    """A note that some steps are left out; empty if none is."""
    return f"{len(shown)} of {len(everything)} steps" if len(shown) < len(everything) else ""
