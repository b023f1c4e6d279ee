"""The bands of `auto` thresholds that a run measured, at each step of the schedule."""

from __future__ import annotations

import re
from collections.abc import Sequence

from flowcorr.instruments.drawing import PALETTE, Chart
from flowcorr.instruments.plots import BandPoint, Curve, draw_curves
from flowcorr.instruments.report.runs import Group
from flowcorr.instruments.thinning import MAX_POINTS, rows_text, spread_out

MAX_BANDS = len(PALETTE)  # of a chart
_CAPTION = (
    "by step of the schedule, without the clip range that is added to them; a k1 mode bounds ratios on both sides, "
    "the others from above"
)
_THRESHOLD = re.compile(r"rollout_corr/step_([0-9]{1,3})/rollout_rs_(\w{1,40})_threshold_high")


def band_charts(groups: Sequence[Group]) -> list[Chart]:
    """A chart of measured bands for each group and rejection mode."""
    charts = []
    for index, group in enumerate(groups):
        names = {
            name
            for run in group.runs
            for record in run.records
            for name, value in record.items()
            if value is not None
        }
        matches = [match for name in names if (match := _THRESHOLD.fullmatch(name))]
        for mode in sorted({match[2] for match in matches}):
            measured = sorted(int(match[1]) for match in matches if match[2] == mode)
            steps = spread_out(measured, MAX_BANDS)
            curves = [
                Curve(mark=f"step {step}", colour=colour, band=_band(group, step, mode))
                for step, colour in zip(steps, PALETTE, strict=False)
            ]
            charts.append(
                Chart(
                    name=f"bands_{mode}_{index}",
                    title=f"Measured bands of {mode}, {group.label}",
                    draw=draw_curves,
                    data={"curves": curves},
                    caption="; ".join(filter(None, (_CAPTION, rows_text(steps, measured)))),
                    metric=f"rollout_corr/step_<i>/rollout_rs_{mode}_threshold_high",
                )
            )
    return charts


def _band(group: Group, step: int, mode: str) -> list[BandPoint]:
    prefix = f"rollout_corr/step_{step}/rollout_rs_{mode}_threshold_"
    low, points = dict(group.means(prefix + "low")), []
    for at, high in group.means(prefix + "high"):
        below = low.get(at, high)
        points.append((at, (below + high) / 2, below, high))
    return spread_out(points, MAX_POINTS)
