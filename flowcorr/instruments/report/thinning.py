"""Long runs and long schedules in charts of a few hundred pixels."""

from __future__ import annotations

import math
from collections.abc import Sequence, Sized

MAX_POINTS = 200  # of a curve, or columns of a heat map: a chart is 330 pixels wide
MAX_ROWS = 40  # of steps in a chart; a run has fewer


def steps_a_point(count: int) -> int:
    """How many training steps make a point."""
    return math.ceil(count / MAX_POINTS)


def stride_text(stride: int) -> str:
    """That a point is a mean over steps, if it is."""
    return f"means over {stride} steps" if stride > 1 else ""


def spread_out(steps: Sequence[int]) -> list[int]:
    """All steps, or `MAX_ROWS` of them from the first to the last."""
    if len(steps) <= MAX_ROWS:
        return list(steps)
    return [steps[round(i * (len(steps) - 1) / (MAX_ROWS - 1))] for i in range(MAX_ROWS)]


def rows_text(shown: Sized, found: Sized) -> str:
    """That some steps are left out, if they are."""
    return f"{len(shown)} of {len(found)} steps" if len(shown) < len(found) else ""
