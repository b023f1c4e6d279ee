"""The kinds of charts: curves with healthy ranges, heat maps, histograms and bars."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure

from flowcorr.instruments.drawing import (
    BLUE,
    INK,
    LIMIT,
    LINE,
    SOFT,
    number,
    numbers,
    style_axis,
)

BandPoint = tuple[float, float, float, float]  # step, mean, smallest and largest value

UNHEALTHY, SERIOUS = "#fae3df", "#f2c4bb"
_COLOURS = ["#dce6f2", "#86b6dc", "#2563b0", "#102054"]
_RAMP = LinearSegmentedColormap.from_list("drift", _COLOURS).with_extremes(under="#e4e4e4")
_NO_LIMITS = (-math.inf, math.inf)
_ROWS_OF_LEGEND = 10


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Curve:
    """A line with a band around it: step, mean, smallest and largest value of each point.

    Attributes:
        mark: its name in the legend; empty for none.
        colour: of line, band and name.
        band: its points.
    """

    mark: str
    colour: str
    band: Sequence[BandPoint]

    @classmethod
    def line(cls, mark: str, colour: str, points: Iterable[tuple[float, float]]) -> Self:
        """Steps and values without a band."""
        return cls(mark=mark, colour=colour, band=[(step, value, value, value) for step, value in points])

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
    log: bool = False,
) -> None:
    """Curves over steps, with their marks in a legend, from the one that ends highest to the lowest.

    Values outside the healthy range are shaded, and darker above `serious`. With `zoom`, limits far away from all
    values are left out; otherwise the curves would look flat. A logarithmic scale (`log`) shows no limits.
    """
    axes = figure.subplots()
    low, high = heights(curves, healthy, zoom=zoom)
    if log:
        axes.set_yscale("log")
    else:
        axes.set_ylim(low, high)
        for limit, edge, colour in (
            (healthy[0], low, UNHEALTHY),
            (healthy[1], high, UNHEALTHY),
            (serious, high, SERIOUS),
        ):
            if low <= limit <= high:
                axes.axhspan(limit, edge, color=colour, linewidth=0, zorder=0.5)
                axes.axhline(limit, color=LIMIT, linewidth=1, linestyle=(0, (4, 3)), zorder=0.6)
    for curve in sorted(curves, key=lambda curve: -curve.band[-1][1]):
        steps, means, lows, highs = zip(*curve.band, strict=True)
        if lows != highs:
            axes.fill_between(steps, lows, highs, color=curve.colour, alpha=0.18, linewidth=0)
        # matplotlib's legend leaves out a label that begins with an underscore, as the name of a run may.
        axes.plot(steps, means, color=curve.colour, label=f" {curve.mark}" if curve.mark else "")
        axes.plot(steps[-1:], means[-1:], "o", color=curve.colour, clip_on=False)
    style_axis(axes.xaxis, 6, whole=True)
    style_axis(axes.yaxis, 5)
    first, last = (pick(step for curve in curves for step, *_ in curve.band) for pick in (min, max))
    axes.set_xlim(*(first, last) if first < last else (first - 0.5, last + 0.5))
    if any(curve.mark for curve in curves):
        figure.legend(loc="outside right upper", ncols=math.ceil(len(curves) / _ROWS_OF_LEGEND))


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
    axes.set_yticks(range(len(bars)), names)
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_xticks([])
    axes.set_xlim(0, max(values) * 1.45)  # room for the words
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)
    axes.spines["left"].set(visible=True, color=LINE)


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
