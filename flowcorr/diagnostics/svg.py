"""Charts as SVG text: lines with bands and healthy ranges, heat maps, histograms. Nothing is loaded from anywhere."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#2563eb", "#dc7310", "#15915b", "#9333ea", "#c02650", "#0891b2", "#7a6a00", "#64748b")
_WIDTH, _HEIGHT = 400, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 10, 10, 26
_ROW = 44
_HALF_DIGIT = 3.6
_CAPTION_COLUMNS = 66
_INSIDE, _OUTSIDE, _LIMIT = "#2563eb", "#dc7310", "#c0392b"
_UNHEALTHY, _SERIOUS = "#f7d9d4", "#eeb4aa"
_RAMP = ((226, 234, 243), (134, 182, 220), (37, 99, 176), (16, 32, 84))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Line:
    """A curve: `band` holds x, y, lowest and highest y."""

    label: str
    colour: str
    band: Sequence[tuple[float, float, float, float]]


@dataclass(frozen=True, slots=True)
class _Axis:
    low: float
    high: float
    begin: float
    end: float

    def __call__(self, value: float) -> float:
        return self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin)


def line_chart(
    title: str,
    lines: Sequence[Line],
    healthy: tuple[float, float] = (-math.inf, math.inf),
    *,
    serious: float = math.inf,
    zoom: bool = True,
) -> str:
    """Curves over training steps; what lies outside the healthy range is shaded, and darker above `serious`.

    With `zoom`, limits that all values keep far away from are left out of the picture, which would show nothing else.
    """
    steps = [point[0] for line in lines for point in line.band]
    x = _Axis(*_widened(min(steps), max(steps)), _LEFT, _WIDTH - _RIGHT)
    y = _Axis(*_heights(lines, healthy, zoom), _HEIGHT - _BOTTOM, _TOP)
    parts = [_shade(y, healthy, _UNHEALTHY), _shade(y, (-math.inf, serious), _SERIOUS), *_grid(x, y)]
    for line in lines:
        parts += _curve(line, x, y)
    return _svg(title, parts)


def limit_in_view(lines: Sequence[Line], healthy: tuple[float, float], *, zoom: bool = True) -> bool:
    """Whether `line_chart` draws any limit."""
    low, high = _heights(lines, healthy, zoom)
    return any(low <= limit <= high for limit in healthy)


def heat_map(
    title: str, rows: Sequence[str], columns: Sequence[float], cells: dict[tuple[str, float], float]
) -> str:
    """Positive values on a logarithmic scale, by row and training step; zeros and gaps are the palest.

    Args:
        title: what it shows, for those who cannot see it.
        rows: their names, the top one first.
        columns: training steps.
        cells: the values by row and column.
    """
    positive = [value for value in cells.values() if value > 0]
    low, high = (math.log(min(positive)), math.log(max(positive))) if positive else (0.0, 0.0)
    height = (_HEIGHT - _TOP - _BOTTOM) / len(rows)
    width = (_WIDTH - _LEFT - _RIGHT) / len(columns)
    parts = []
    for i, row in enumerate(rows):
        top = _TOP + i * height
        parts.append(_label(_LEFT - 6, top + height / 2 + 4, row, "end"))
        for j, column in enumerate(columns):
            value = cells.get((row, column))
            if value is None:
                continue
            share = (
                0.0
                if value <= 0
                else 1.0
                if high == low
                else 0.1 + 0.9 * (math.log(value) - low) / (high - low)
            )
            parts.append(
                f'<rect x="{_LEFT + j * width:.1f}" y="{top:.1f}" width="{width + 0.2:.1f}" '
                f'height="{height - 1:.1f}" fill="{_ramp(share)}">'
                f"<title>{escape(row)}, step {column:g}: {value:.3g}</title></rect>"
            )
    for j in sorted({0, len(columns) - 1}):
        parts.append(_below(_LEFT + (j + 0.5) * width, _HEIGHT - 8, f"{columns[j]:g}"))
    return _svg(title, parts)


def histogram(
    title: str,
    rows: Sequence[tuple[str, Sequence[float]]],
    span: tuple[float, float],
    limits: tuple[float, float] | None = None,
) -> str:
    """Shares by bin, one row above the other, each as high as its largest bin; bins outside `limits` stand out.

    Args:
        title: what it shows, for those who cannot see it.
        rows: their names and their shares in bins of one width, the top one first.
        span: the lower edge of the first bin and the upper one of the last.
        limits: a range to draw in; a bin is outside if its middle is.
    """
    x = _Axis(*span, _LEFT, _WIDTH - _RIGHT)
    row_height = max(_ROW, (_HEIGHT - _TOP - _BOTTOM) / len(rows))
    bottom = _TOP + row_height * len(rows)
    parts = []
    for tick in _ticks(*span):
        parts.append(
            f'<line x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{_TOP}" y2="{bottom:.1f}" stroke="#e3e6ea"/>'
        )
        if x(tick) < _WIDTH - 2 * _RIGHT:  # else it may meet its neighbour
            parts.append(_below(x(tick), bottom + 18, _number(tick)))
    for place, (name, shares) in enumerate(rows):
        base = _TOP + row_height * (place + 1)
        parts.append(_label(_LEFT - 6, base - 4, name, "end"))
        parts += _bars(
            name, shares, span, x, _Axis(0.0, max(*shares, 1e-9), base, base - row_height + 6), limits
        )
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{base:.1f}" y2="{base:.1f}" stroke="#b7bec8"/>'
        )
    for limit in limits or ():
        if span[0] <= limit <= span[1]:
            parts.append(
                f'<line x1="{x(limit):.1f}" x2="{x(limit):.1f}" y1="{_TOP}" y2="{bottom:.1f}" stroke="{_LIMIT}" '
                'stroke-dasharray="4 3"/>'
            )
    return _svg(title, parts, bottom + _BOTTOM)


def poster(title: str, chart: str, caption: str, keys: Sequence[tuple[str, str]]) -> str:
    """A chart that stands alone: below its title, above its caption, with names and colours of `keys`."""
    height = float(re.search(r'viewBox="0 0 \d+ (\d+)"', chart)[1])  # type: ignore[index]  # of our own making
    parts = [
        f'<text x="10" y="20" style="font-size: 14px; font-weight: bold; fill: #1c2430">{escape(title)}</text>',
        chart.replace("<svg ", f'<svg y="28" width="{_WIDTH}" height="{height:.0f}" ', 1),
    ]
    y = height + 42
    for name, colour in keys:
        parts.append(f'<rect x="10" y="{y - 9:.0f}" width="10" height="10" fill="{colour}"/>')
        parts.append(_label(25, y, name, "start"))
        y += 15
    y += 5 if keys else 0
    for line in textwrap.wrap(caption, _CAPTION_COLUMNS):
        parts.append(_label(10, y, line, "start"))
        y += 15
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y:.0f}">'
        f'<rect width="{_WIDTH}" height="{y:.0f}" fill="#fff"/>{"".join(parts)}</svg>'
    )


def _bars(
    name: str,
    shares: Sequence[float],
    span: tuple[float, float],
    x: _Axis,
    y: _Axis,
    limits: tuple[float, float] | None,
) -> list[str]:
    low, high = limits or (-math.inf, math.inf)
    width = (span[1] - span[0]) / len(shares)
    parts = []
    for index, share in enumerate(shares):
        left = span[0] + index * width
        if share > 0:
            colour = _INSIDE if low <= left + width / 2 <= high else _OUTSIDE
            parts.append(
                f'<rect x="{x(left):.1f}" y="{y(share):.1f}" width="{x(left + width) - x(left) - 0.3:.1f}" '
                f'height="{y.begin - y(share):.1f}" fill="{colour}">'
                f"<title>{escape(name)}, {left:.3g} to {left + width:.3g}: {share:.2%}</title></rect>"
            )
    return parts


def _heights(lines: Sequence[Line], healthy: tuple[float, float], zoom: bool) -> tuple[float, float]:
    """From the lowest to the highest value that is drawn, limits in view included."""
    values = [value for line in lines for _, _, *edges in line.band for value in edges]
    low, high = min(values), max(values)
    limits = _limits_in_view(low, high, healthy) if zoom and low < high else filter(math.isfinite, healthy)
    shown = [*values, *limits]
    return _padded(min(shown), max(shown))


def _limits_in_view(low: float, high: float, healthy: tuple[float, float]) -> list[float]:
    """Limits that are crossed, and those beside which the values still fill a quarter of the axis."""
    least, most = healthy
    crossed = [limit for limit, broken in ((least, low < least), (most, high > most)) if broken]
    span = high - low
    near = [
        limit
        for limit in healthy
        if span >= (max(high, limit) - min(low, limit)) / 4 and math.isfinite(limit)
    ]
    return crossed + near


def _padded(low: float, high: float) -> tuple[float, float]:
    low, high = _widened(low, high)
    margin = 0.06 * (high - low)
    return low - margin, high + margin


def _widened(low: float, high: float) -> tuple[float, float]:
    """The same range, but never an empty one, nor one below what floats can tell apart."""
    room = max(abs(low), abs(high)) * 1e-6
    if high - low > room:
        return low, high
    half = max(abs(low) * 0.05, 1e-9 if low else 0.5)
    return low - half, high + half


def _shade(y: _Axis, within: tuple[float, float], colour: str) -> str:
    parts = []
    for limit, edge in zip(within, (y.low, y.high), strict=True):
        if math.isfinite(limit) and y.low <= limit <= y.high:
            top, bottom = sorted((y(limit), y(edge)))
            parts.append(
                f'<rect x="{_LEFT}" y="{top:.1f}" width="{_WIDTH - _LEFT - _RIGHT}" '
                f'height="{bottom - top:.1f}" fill="{colour}"/>'
                f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(limit):.1f}" y2="{y(limit):.1f}" '
                f'stroke="{_LIMIT}" stroke-dasharray="4 3"/>'
            )
    return "".join(parts)


def _grid(x: _Axis, y: _Axis) -> list[str]:
    parts = []
    for tick in _ticks(y.low, y.high):
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="#e3e6ea"/>'
        )
        parts.append(_label(_LEFT - 6, y(tick) + 4, _number(tick), "end"))
    for tick in _ticks(x.low, x.high):
        if tick == int(tick):
            parts.append(_below(x(tick), _HEIGHT - 8, f"{tick:g}"))
    return parts


def _curve(line: Line, x: _Axis, y: _Axis) -> list[str]:
    middle = " ".join(f"{x(step):.1f},{y(mean):.1f}" for step, mean, _, _ in line.band)
    upper = [f"{x(step):.1f},{y(top):.1f}" for step, _, _, top in line.band]
    lower = [f"{x(step):.1f},{y(bottom):.1f}" for step, _, bottom, _ in line.band]
    last = line.band[-1]
    return [
        f'<polygon points="{" ".join(upper + lower[::-1])}" fill="{line.colour}" opacity="0.18"/>',
        f'<polyline points="{middle}" fill="none" stroke="{line.colour}" stroke-width="2" '
        f'stroke-linejoin="round"><title>{escape(line.label)}</title></polyline>',
        f'<circle cx="{x(last[0]):.1f}" cy="{y(last[1]):.1f}" r="3" fill="{line.colour}">'
        f"<title>{escape(line.label)}, step {last[0]:g}: {last[1]:.4g}</title></circle>",
    ]


def _ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers in the range."""
    raw = (high - low) / 5
    unit = 10 ** math.floor(math.log10(raw))
    step = next(factor * unit for factor in (1, 2, 2.5, 5, 10) if factor * unit >= raw)
    first = math.ceil(low / step)
    return [index * step for index in range(first, math.floor(high / step) + 1)]


def _number(value: float) -> str:
    return f"{value:.6g}" if len(f"{value:.6g}") <= 8 else f"{value:.1e}"


def _ramp(share: float) -> str:
    position = share * (len(_RAMP) - 1)
    index = min(int(position), len(_RAMP) - 2)
    rest = position - index
    mixed = (round(a + (b - a) * rest) for a, b in zip(_RAMP[index], _RAMP[index + 1], strict=True))
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def _below(x: float, y: float, text: str) -> str:
    """A label centred below `x`, or ending at the edge of the picture, which would else cut it off."""
    return _label(min(x, _WIDTH - _HALF_DIGIT * len(text)), y, text, "middle")


def _label(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(title: str, parts: Sequence[str], height: float = _HEIGHT) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
