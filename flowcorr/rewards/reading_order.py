"""The order in which a reader takes the words that a detector of text found in a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

_LONG = 1.5  # times its height: the angle of a shorter box is noise
_OVERLAP = (
    0.5  # of the lower of two boxes on one line; less than a line's distance, more than errors of an angle
)
_SHRINK = 0.2  # of a box's height, on each side: detected boxes have margins that may overlap


@dataclass(frozen=True, slots=True, kw_only=True)
class _Word:
    """A box of text by its own baseline: middles of its left and right edge, height, unit vector of its direction."""

    left: np.ndarray
    right: np.ndarray
    height: float
    direction: np.ndarray


def reading_order(boxes: np.ndarray) -> list[int]:
    """Places of boxes line by line from the top, and along each line from its left end.

    A line is followed along the boxes' own direction, so it may be tilted, bent, or mix letters of two heights. Lines
    are read from the top where white space runs between them; else side by side, as a tall word beside two lines. Two
    columns of lines at equal heights are read across, since a picture does not tell a table from columns.

    Args:
        boxes: `[N, 4, 2]`, the corners in pixels: upper left, upper right, lower right, lower left.
    """
    corners = np.asarray(boxes, dtype=np.float64)
    lines = _lines(_words(corners))
    chords = [corners[line[-1]][1:3].mean(0) - corners[line[0]][[0, 3]].mean(0) for line in lines]
    angle = _median([_angle(chord) for chord in chords], [float(np.hypot(*chord)) for chord in chords])
    turn = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    level = corners @ turn.T
    return [place for line in _sorted(lines, level) for place in line]


def _words(corners: np.ndarray) -> list[_Word]:
    left, right = corners[:, [0, 3]].mean(1), corners[:, [1, 2]].mean(1)
    widths = np.hypot(*(right - left).T)
    heights = np.hypot(*(corners[:, [3, 2]] - corners[:, [0, 1]]).mean(1).T)
    angles = [_angle(along) for along in right - left]
    common = _median(angles, (widths - heights).clip(0).tolist())
    words = []
    for place, angle in enumerate(angles):
        own = angle if widths[place] >= _LONG * heights[place] else common
        direction = np.array([np.cos(own), np.sin(own)])
        words.append(
            _Word(left=left[place], right=right[place], height=float(heights[place]), direction=direction)
        )
    return words


def _lines(words: Sequence[_Word]) -> list[list[int]]:
    """Words that continue one another; each follows its nearest neighbour on the left, if that one is sure."""
    count = range(len(words))
    gaps = {
        (before, after): gap
        for before in count
        for after in count
        if before != after and (gap := _gap(words[before], words[after])) is not None
    }
    follows = {
        before: _nearest({b: gap for (a, b), gap in gaps.items() if a == before}, gaps) for before in count
    }
    leads = {after: _nearest({a: gap for (a, b), gap in gaps.items() if b == after}, gaps) for after in count}
    linked = {
        before: after for before, after in follows.items() if after is not None and leads[after] == before
    }
    lines = []
    for first in sorted(set(count) - set(linked.values())):
        line = [first]
        while line[-1] in linked:
            line.append(linked[line[-1]])
        lines.append(line)
    return lines


def _gap(before: _Word, after: _Word) -> float | None:
    """The distance to a word that continues another on its line; None if it does not.

    Both tangents of an arc make the same angle with its chord, so that the mean direction also fits a bent line.
    """
    direction = before.direction + after.direction
    direction = direction / max(float(np.hypot(*direction)), 1e-9)
    between = after.left - before.right
    along = float(between @ direction)
    aside = float(direction[0] * between[1] - direction[1] * between[0])
    lower, upper = sorted((before.height, after.height))
    overlap = min(lower, (lower + upper) / 2 - abs(aside))
    return along if overlap >= _OVERLAP * lower and along > -lower else None  # margins may overlap


def _nearest(gaps: dict[int, float], all_gaps: dict[tuple[int, int], float]) -> int | None:
    """The nearest neighbour; None if another neighbour is above or below it, as next to a tall word."""
    if not gaps:
        return None
    nearest = min(gaps, key=lambda place: (gaps[place], place))
    for other in gaps:
        if other != nearest and (other, nearest) not in all_gaps and (nearest, other) not in all_gaps:
            return None
    return nearest


def _sorted(lines: Sequence[list[int]], level: np.ndarray) -> Iterator[list[int]]:
    """Sort lines from the top if gaps separate them, else from the left, else by their middles.

    Args:
        lines: places of words.
        level: corners of the words, `[N, 4, 2]`, turned so that lines are level.
    """
    if len(lines) == 1:
        yield lines[0]
        return
    tops, bottoms = level[:, :2, 1].mean(1), level[:, 2:, 1].mean(1)
    lefts, rights = level[:, [0, 3], 0].mean(1), level[:, [1, 2], 0].mean(1)
    margin = _SHRINK * (bottoms - tops)
    for begins, ends in ((tops, bottoms), (lefts, rights)):
        parts = _apart(lines, begins + margin, ends - margin)
        if len(parts) > 1:
            for part in parts:
                yield from _sorted(part, level)
            return
    yield from sorted(lines, key=lambda line: float((tops + bottoms)[line].mean()))


def _apart(lines: Sequence[list[int]], begins: np.ndarray, ends: np.ndarray) -> list[list[list[int]]]:
    """Lines in parts between which there is space, along one axis on which words begin and end there."""
    parts: list[list[list[int]]] = []
    reached = -np.inf
    for line in sorted(lines, key=lambda line: float(begins[line].min())):
        if begins[line].min() > reached:
            parts.append([])
        parts[-1].append(line)
        reached = max(reached, float(ends[line].max()))
    return parts


def _angle(along: np.ndarray) -> float:
    return float(np.arctan2(along[1], along[0]))


def _median(values: Sequence[float], weights: Sequence[float]) -> float:
    """The weighted median; 0 if all weights are 0."""
    if sum(weights) <= 0:
        return 0.0
    order = np.argsort(values)
    summed = np.cumsum(np.asarray(weights)[order])
    return float(np.asarray(values)[order][np.searchsorted(summed, summed[-1] / 2)])
