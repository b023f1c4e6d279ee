"""Drift by step index and training step, a map for each configuration."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from flowcorr.instruments.drawing import HEIGHT, Chart
from flowcorr.instruments.plots import draw_heat_map
from flowcorr.instruments.report.runs import Group
from flowcorr.instruments.thinning import rows_text, spread_out, steps_a_point, stride_text

# Four units in the last place of a float32 log-prob near 1: two stacks that score alike to rounding differ by less.
ROUNDING = 5e-7
_STEP_DRIFT = re.compile(r"rollout_corr/step_([0-9]{1,3})/logprob_abs_diff")


def heat_maps(groups: Sequence[Group]) -> list[Chart]:
    """A map for each group, all on the scale of the largest drift."""
    charts = [chart for index, group in enumerate(groups) if (chart := _heat_map(group, index))]
    largest = max((value for chart in charts for value in chart.data["cells"].values()), default=0.0)
    return [replace(chart, data={**chart.data, "scale": (ROUNDING, largest)}) for chart in charts]


def _heat_map(group: Group, index: int) -> Chart | None:
    """Mean drift by step index and training step; the caption names steps that were left out or averaged."""
    names = {name for run in group.runs for record in run.records for name in record}
    drift_names = {int(match[1]): name for name in names if (match := _STEP_DRIFT.fullmatch(name))}
    shown = spread_out(sorted(drift_names))
    means = {f"step {place}": dict(group.means(drift_names[place])) for place in shown}
    steps = sorted({step for values in means.values() for step in values})
    if not steps:
        return None
    stride = steps_a_point(len(steps))
    parts = [steps[begin : begin + stride] for begin in range(0, len(steps), stride)]
    cells = {
        (row, part[-1]): fmean(here)
        for row, values in means.items()
        for part in parts
        if (here := [values[step] for step in part if step in values])
    }
    unit = "nats per latent element, on a logarithmic scale"
    if not max(cells.values()) > 0:
        unit = "0 everywhere: both stacks score alike, to the last bit"
    texts = ["across: training step", unit, stride_text(stride), rows_text(shown, drift_names)]
    return Chart(
        name=f"drift_by_timestep_{index}",
        title=f"Drift by timestep, {group.label}",
        draw=draw_heat_map,
        data={"rows": list(means), "columns": [part[-1] for part in parts], "cells": cells},
        caption="; ".join(filter(None, texts)),
        height=max(HEIGHT / 2, 60 + 24 * len(means)),
    )
