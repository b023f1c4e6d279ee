"""The kinds of charts: curves with healthy ranges, heat maps, histograms, bars and rows of dots."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure

from flowcorr.instruments.drawing import (
    BLUE,
    END_LABEL,
    INK,
    LIMIT,
    LINE,
    MUTED,
    SOFT,
    label_lines,
    number,
    numbers,
    style_axis,
)

BandPoint = tuple[float, float, float, float]  # step, mean, smallest and largest value

UNHEALTHY, SERIOUS = "#fae3df", "#f2c4bb"
_COLOURS = ["#dce6f2", "#86b6dc", "#2563b0", "#102054"]
_RAMP = LinearSegmentedColormap.from_list("drift", _COLOURS).with_extremes(under="#e4e4e4")
_NO_LIMITS = (-math.inf, math.inf)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Curve:
    """A line with a band around it: step, mean, smallest and largest value of each point.

    Attributes:
        mark: the name at its end; empty for none.
        colour: of line, band and name.
        band: its points.
    """

    mark: str
    colour: str
    band: Sequence[BandPoint]

    def numbers(self) -> dict[str, Any]:
        """Name, steps, means, and smallest and largest values, as plain lists."""
        names = ("steps", "means", "least", "most")
        return {"name": self.mark} | dict(zip(names, map(list, zip(*self.band, strict=True)), strict=True))


def draw_curves(
    figure: Figure,
    curves: Sequence[Curve],
    healthy: tuple[float, float] = _NO_LIMITS,
    *,
    serious: float = math.inf,
    zoom: bool = True,
) -> None:
    """Curves over training steps; values outside the healthy range are shaded, and darker above `serious`.

    With `zoom`, limits far away from all values are left out; otherwise the curves would look flat.
    """
    axes = figure.subplots()
    low, high = heights(curves, healthy, zoom=zoom)
    axes.set_ylim(low, high)
    for limit, edge, colour in (
        (healthy[0], low, UNHEALTHY),
        (healthy[1], high, UNHEALTHY),
        (serious, high, SERIOUS),
    ):
        if low <= limit <= high:
            axes.axhspan(limit, edge, color=colour, linewidth=0, zorder=0.5)
            axes.axhline(limit, color=LIMIT, linewidth=1, linestyle=(0, (4, 3)), zorder=0.6)
    for curve in curves:
        steps, means, lows, highs = zip(*curve.band, strict=True)
        if lows != highs:
            axes.fill_between(steps, lows, highs, color=curve.colour, alpha=0.18, linewidth=0)
        axes.plot(steps, means, color=curve.colour)
        axes.plot(steps[-1:], means[-1:], "o", color=curve.colour, clip_on=False)
    style_axis(axes.xaxis, 6, whole=True)
    style_axis(axes.yaxis, 5)
    first, last = (pick(step for curve in curves for step, *_ in curve.band) for pick in (min, max))
    axes.set_xlim(*(first, last) if first < last else (first - 0.5, last + 0.5))
    ends = [(curve.band[-1], curve.mark, curve.colour) for curve in curves if curve.mark]
    label_lines(axes, [(mean, mark, colour) for (step, mean, *_), mark, colour in ends if step == last])
    for (step, mean, *_), mark, colour in ends:
        if step < last:  # a shorter run: its name stands beside its last point
            axes.annotate(mark, (step, mean), **END_LABEL, color=colour)


def limit_in_view(curves: Sequence[Curve], healthy: tuple[float, float], *, zoom: bool = True) -> bool:
    """Whether `draw_curves` shows any limit."""
    low, high = heights(curves, healthy, zoom=zoom)
    return any(low <= limit <= high for limit in healthy)


def heights(curves: Sequence[Curve], healthy: tuple[float, float], *, zoom: bool) -> tuple[float, float]:
    """From the lowest to the highest value that is shown, limits in view included."""
    values = [value for curve in curves for _, _, *edges in curve.band for value in edges]
    low, high = min(values), max(values)
    limits = _limits_in_view(low, high, healthy) if zoom and low < high else filter(math.isfinite, healthy)
    shown = [low, high, *limits]
    low, high = min(shown), max(shown)
    if high - low <= max(abs(low), abs(high)) * 1e-6:  # nearly constant
        low, high = (low - abs(low) * 0.05, high + abs(high) * 0.05) if low else (0.0, 1.0)
    margin = 0.06 * (high - low)
    return low - margin, high + margin


def draw_heat_map(
    figure: Figure,
    rows: Sequence[str],
    columns: Sequence[float],
    cells: Mapping[tuple[str, float], float],
    scale: tuple[float, float],
) -> None:
    """Values by row and training step on a logarithmic scale; below it they are grey, and gaps are white."""
    low, high = scale
    grid = np.array([[cells.get((row, column), math.nan) for column in columns] for row in rows])
    norm = LogNorm(low, max(high, 2 * low))
    axes = figure.subplots()
    shown = np.ma.masked_invalid(np.maximum(grid, low / 2))  # a logarithmic scale would leave 0 out
    picture = axes.imshow(shown, norm=norm, cmap=_RAMP, aspect="auto", interpolation="none")
    axes.grid(visible=False)
    axes.set_yticks(range(len(rows)), rows)
    for edge in range(1, len(rows)):
        axes.axhline(edge - 0.5, color="white", linewidth=2)
    places = range(0, len(columns), math.ceil(len(columns) / 5))
    axes.set_xticks(places, numbers([columns[place] for place in places]))
    axes.spines["bottom"].set_visible(False)
    if low < high:
        bar = figure.colorbar(picture, ax=axes, fraction=0.05, pad=0.02)
        bar.outline.set_visible(False)
        ticks = [low, math.sqrt(low * high), high]
        bar.set_ticks(ticks, labels=[number(float(f"{tick:.1e}")) for tick in ticks])
        bar.minorticks_off()


def draw_histograms(
    figure: Figure,
    rows: Mapping[str, Sequence[float]],
    edges: Sequence[float],
    limits: tuple[float, float] | None = None,
    colour: str = BLUE,
) -> None:
    """Shares of bins between `edges`, a row each with a height of its own; bins outside `limits` are dark."""
    low, high = limits or _NO_LIMITS
    ends = np.asarray(edges)
    middles = (ends[1:] + ends[:-1]) / 2
    panels = figure.subplots(len(rows), sharex=True, squeeze=False)[:, 0]
    for panel, (name, shares) in zip(panels, rows.items(), strict=True):
        inside = (low <= middles) & (middles <= high)
        for where, fill in ((inside, colour), (~inside, INK)):
            if where.any():
                panel.stairs(np.where(where, shares, 0), edges, fill=True, color=fill)
        for limit in (low, high):
            if edges[0] <= limit <= edges[-1]:
                panel.axvline(limit, color=LIMIT, linewidth=1, linestyle=(0, (4, 3)))
        panel.set_yticks([])
        panel.set_ylim(0, max(*shares, 1e-9) * 1.05)
        panel.set_xlim(edges[0], edges[-1])
        panel.set_ylabel(name, rotation=0, ha="right", va="center", color=SOFT)
        panel.grid(axis="x")
        panel.spines["bottom"].set_color(SOFT)
    style_axis(panels[-1].xaxis, 4)


def draw_bars(figure: Figure, bars: Sequence[tuple[str, float, str]], colour: str = BLUE) -> None:
    """Horizontal bars with their names on the left and their values in words at the end, the first one on top."""
    axes = figure.subplots()
    names, values, texts = zip(*bars, strict=True)
    axes.barh(range(len(bars)), values, height=0.62, color=colour)
    for place, (value, text) in enumerate(zip(values, texts, strict=True)):
        axes.annotate(
            text, (value, place), xytext=(5, 0), textcoords="offset points", va="center", color=SOFT
        )
    _name_rows(axes, names)
    axes.set_xticks([])
    axes.set_xlim(0, max(values) * 1.45)  # room for the words
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)
    axes.spines["left"].set(visible=True, color=LINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """A row of `draw_dots`; a NaN is not drawn.

    Attributes:
        name: label on the left.
        value: position of the dot.
        span: the ends of a line through the dot.
        ring: position of a red ring.
        muted: whether the dot is grey.
    """

    name: str
    value: float
    span: tuple[float, float] = (math.nan, math.nan)
    ring: float = math.nan
    muted: bool = False


def draw_dots(
    figure: Figure, rows: Sequence[Dot], view: tuple[float, float] | None = None, *, line: float | None = None
) -> None:
    """A dot a row, the first row on top; `line` is a value to compare with."""
    axes = figure.subplots()
    places = range(len(rows))
    colours = [MUTED if row.muted else BLUE for row in rows]
    if line is not None:
        axes.axvline(line, color=SOFT, linewidth=1)
    axes.hlines(places, [row.span[0] for row in rows], [row.span[1] for row in rows], colors=colours)
    axes.scatter([row.value for row in rows], places, s=26, c=colours, zorder=3)
    axes.scatter([row.ring for row in rows], places, s=64, facecolors="none", edgecolors=LIMIT, zorder=4)
    _name_rows(axes, [row.name for row in rows])
    if view is not None:
        axes.set_xlim(*view)
    style_axis(axes.xaxis, 4)
    axes.grid(axis="x")


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Names on the left, the first one on top."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)


def _limits_in_view(low: float, high: float, healthy: tuple[float, float]) -> list[float]:
    """Limits that are crossed, or so near that the values still fill a quarter of the axis."""
    least, most = healthy
    crossed = [limit for limit, broken in ((least, low < least), (most, high > most)) if broken]
    near = [
        limit
        for limit in healthy
        if math.isfinite(limit) and high - low >= (max(high, limit) - min(low, limit)) / 4
    ]
    return crossed + near
