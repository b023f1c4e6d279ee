"""The charts of a report as PNG files: the page's own SVG, so that there is one way of drawing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flowcorr.diagnostics.report_charts import ChartSection
from flowcorr.diagnostics.svg import poster
from flowcorr.errors import MissingExtraError

_ZOOM = 2
_STYLE = "text { font: 11px sans-serif; fill: #5b6675; }"


def save_charts(
    sections: Sequence[ChartSection], keys: Sequence[tuple[str, str]], folder: Path
) -> list[Path]:
    """Write every chart as `folder/<name>.png`, with its title and caption.

    Args:
        sections: of the report.
        keys: names and colours of the groups of runs.
        folder: made if it is missing.

    Raises:
        MissingExtraError: resvg_py, which draws, or matplotlib, whose font is used on every machine, is missing.
        OSError: a file cannot be written.
    """
    try:
        import matplotlib
        import resvg_py
    except ImportError as error:
        raise MissingExtraError("a report's PNG", "resvg_py and matplotlib", "plot", error) from error
    fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for section in sections:
        legend = keys if section.by_colour and len(keys) > 1 else []
        for chart in section.charts:
            caption = "; ".join(filter(None, [chart.caption, chart.metric]))
            picture = resvg_py.svg_to_bytes(
                svg_string=poster(chart.title, chart.svg, caption, legend),
                zoom=_ZOOM,
                style_sheet=_STYLE,
                skip_system_fonts=True,
                font_files=[str(fonts / name) for name in ("DejaVuSans.ttf", "DejaVuSans-Bold.ttf")],
                sans_serif_family="DejaVu Sans",
            )
            paths.append(folder / f"{chart.name}.png")
            paths[-1].write_bytes(picture)
    return paths
