"""Draws every chart in one style with matplotlib, as SVG inside a page and as a PNG file."""

from __future__ import annotations

import contextlib
import io
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import Formatter, MaxNLocator, NullFormatter

PALETTE = ("#2563eb", "#d9730d", "#138a5b", "#9333ea", "#c02650", "#0e8aa8", "#7a6a00", "#64748b")
BLUE = PALETTE[0]
INK, SOFT, LINE, LIMIT = "#1c2430", "#5b6675", "#dfe4ea", "#c0392b"
WIDTH, HEIGHT = 380, 220  # pixels of a chart in a page, as wide as a phone; one point is one pixel there
_POINTS = 72  # an inch
_PNG_SCALE = 2
_CAPTION_COLUMNS = 64
_LOOK = ("colour", "zoom", "scale", "log")  # arguments of a drawing that are no numbers
_STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib; a page shows its own font instead
    "font.size": 12,
    "text.color": INK,
    "text.parse_math": False,  # names of runs may hold dollar signs
    "axes.edgecolor": LINE,
    "axes.labelcolor": SOFT,
    "axes.labelsize": 12,
    "axes.titlesize": 12,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.8,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelsize": 12,
    "ytick.labelsize": 12,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "lines.linewidth": 2,
    "lines.markersize": 5,
    "legend.frameon": False,
    "legend.labelcolor": "linecolor",
    "legend.handlelength": 1.0,
    "legend.columnspacing": 1.0,
    "figure.constrained_layout.use": True,
    "svg.fonttype": "none",  # text stays text: it can be read aloud, searched and copied
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chart:
    """One chart.

    Attributes:
        name: of its PNG, without a suffix; no two charts of a page share one.
        title: what it shows.
        draw: draws `data` into an empty figure.
        data: the arguments of `draw` by name.
        caption: unit, limits and what else is to be said about it.
        metric: the metric that it shows, if it shows one and the title is not its name.
        height: in pixels, where it is `WIDTH` wide.
        shaded: whether values outside a healthy range are shaded.
    """

    name: str
    title: str
    draw: Callable[..., None]
    data: Mapping[str, Any] = field(default_factory=dict)
    caption: str = ""
    metric: str = ""
    height: float = HEIGHT
    shaded: bool = False

    def html(self) -> Markup:
        """The chart in a page, with its title and its caption."""
        caption = Markup("<br>").join(
            filter(None, (self.caption, self.metric and Markup("<code>{}</code>").format(self.metric)))
        )
        return Markup(
            '<figure class="card"><h3>{}</h3><div role="img" aria-label="{}">{}</div>'
            "<figcaption>{}</figcaption></figure>"
        ).format(self.title, self.title, self.svg(), caption)

    def numbers(self) -> dict[str, Any]:
        """Everything that is drawn, as plain values: curves with their bands, shares of bins, cells, limits."""
        words = {name: getattr(self, name) for name in ("title", "caption", "metric") if getattr(self, name)}
        return words | {name: _plain(value) for name, value in self.data.items() if name not in _LOOK}

    def svg(self) -> Markup:
        """The chart alone."""
        with _drawing({"svg.hashsalt": self.name}):
            canvas, buffer = FigureCanvasSVG(self._figure(self.height)), io.StringIO()
            # matplotlib would write the time and its address into an SVG.
            canvas.print_svg(buffer, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
        return _inline(buffer.getvalue(), self.title)

    def png(self, note: str = "") -> bytes:
        """The chart for a slide, with its title and caption, and `note` below them."""
        caption = "; ".join(filter(None, (self.caption, self.metric)))
        caption = "\n".join(textwrap.fill(text, _CAPTION_COLUMNS) for text in (caption, note) if text)
        with _drawing({}):
            figure = self._figure(self.height + 30 + 15 * len(caption.splitlines()))
            title = textwrap.fill(self.title, _CAPTION_COLUMNS)
            figure.suptitle(title, x=0.02, ha="left", fontsize=12, fontweight="bold")
            figure.supxlabel(caption, x=0.02, ha="left", fontsize=10, color=SOFT)
            buffer = io.BytesIO()
            FigureCanvasAgg(figure).print_png(buffer)
            return buffer.getvalue()

    def _figure(self, height: float) -> Figure:
        # A canvas prints it: `savefig` would draw it once more before, a tenth of its time.
        figure = Figure(figsize=(WIDTH / _POINTS, height / _POINTS), dpi=_PNG_SCALE * _POINTS)
        self.draw(figure, **self.data)
        return figure


def _plain(value: Any) -> Any:
    """A value of `Chart.data`; cells by row and column become triples."""
    if hasattr(value, "numbers"):
        return value.numbers()
    if isinstance(value, Mapping):
        if any(isinstance(key, tuple) for key in value):
            return [[*key, part] for key, part in value.items()]
        return {key: _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


@contextlib.contextmanager
def _drawing(style: dict[str, Any]) -> Iterator[None]:
    """The look of every chart, without a warning at each letter of a run's name that the font lacks.

    A page shows such a letter in its own font; a PNG has a box in its place.
    """
    with matplotlib.rc_context(_STYLE | style), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        yield


def number(value: float) -> str:
    """A number in few characters: `0.25`, `1200`, `2e-5`."""
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.6g}"
    mantissa, _, power = f"{value:.3g}".partition("e")
    return f"{mantissa}e{int(power)}" if power else mantissa


def numbers(values: Sequence[float]) -> list[str]:
    """Write numbers in few characters, or in more if two would read alike: `100100`, not `1e5`."""
    texts = list(map(number, values))
    return texts if len(set(texts)) == len(texts) else [f"{value:.10g}" for value in values]


class _Numbers(Formatter):
    """Writes the numbers at an axis."""

    def __call__(self, value: float, pos: int | None = None) -> str:
        return number(value)

    def format_ticks(self, values: Sequence[float]) -> list[str]:
        return numbers(values)


def style_axis(axis: Axis, ticks: int = 4, *, whole: bool = False) -> None:
    """At most so many ticks at round, or even whole, numbers that are written by `numbers`."""
    if axis.get_scale() == "linear":
        least = 1 if whole else 2  # with two, a single training step would stand between fractions
        axis.set_major_locator(MaxNLocator(ticks, steps=[1, 2, 2.5, 5, 10], integer=whole, min_n_ticks=least))
    axis.set_major_formatter(_Numbers())
    axis.set_minor_formatter(NullFormatter())


def _inline(text: str, title: str) -> Markup:
    """An SVG file as an element of a page: with a title, without the XML header, at full width."""
    text = re.sub(r"<defs>\s*<style.*?</defs>", "", text[text.index("<svg") :], count=1, flags=re.DOTALL)
    head = Markup("<title>{}</title>").format(title)
    text = re.sub(
        r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', lambda match: f"<svg {match[1]}>{head}", text, count=1
    )
    used = set(re.findall(r"#([\w-]+)", text))
    return Markup(re.sub(r' id="([^"]*)"', lambda match: match[0] if match[1] in used else "", text))
