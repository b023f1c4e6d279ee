"""The number that explains a replay best: Gauss-Newton in one unknown, with the derivative of the last two tries."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

_TRIES = 10
_STEP = 0.01  # share of a start, for the first derivative
_SETTLED = 1e-7  # relative: closer numbers are one in float32


def fitted(residuals: Callable[[float], Tensor], starts: Sequence[float], low: float, high: float) -> float:
    """The number in `[low, high]` with the smallest sum of squared residuals near the best of `starts`.

    Args:
        residuals: of a number, float64 of any shape.
        starts: numbers in the range, the first tries.
        low, high: the range.
    """
    tried = {start: residuals(start).flatten() for start in starts}
    best = min(tried, key=lambda value: _size(tried[value]))
    now, of_now = best, tried[best]
    step = _STEP * max(abs(now), _STEP)
    before = now + step if now + step <= high else now - step
    of_before = residuals(before).flatten()
    for _ in range(_TRIES):
        slope = (of_now - of_before) / (now - before)
        curvature = float(slope @ slope)
        if not curvature > 0:
            break
        following = min(max(now - float(slope @ of_now) / curvature, low), high)
        if abs(following - now) <= _SETTLED * abs(now):
            break
        of_following = residuals(following).flatten()
        if _size(of_following) > _size(of_now):  # too far: halfway back
            following = (now + following) / 2
            of_following = residuals(following).flatten()
        before, of_before, now, of_now = now, of_now, following, of_following
        if _size(of_now) < _size(tried[best]):
            best, tried[best] = now, of_now
    return best


def _size(values: Tensor) -> float:
    return float(values.square().mean())
