"""A lab report as rows of a table and as files: JSON, one HTML page, and its charts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from flowcorr.diagnostics.lab.compare import THIS_RUN, LabReport, Outcome, Replay
from flowcorr.instruments.drawing import PALETTE, Chart
from flowcorr.instruments.page import render, save_page
from flowcorr.instruments.plots import Curve, Dot, draw_curves, draw_dots

HEADER = (
    "preset",
    "weight",
    "std",
    "largest",
    "ESS",
    "rejected",
    "samples",
    "clipped",
    "loss",
    "cosine",
    "lowest",
    "norm",
    "factors",
    "changed",
)
_MAX_LINES = len(PALETTE)


def row(replay: Replay, outcome: Outcome) -> tuple[str, ...]:
    """The cells under `HEADER`; shares are of terms, but for `samples`; factors are the 1 % and 99 % quantiles."""
    return (
        _label(replay),
        *map(_number, (outcome.mean_weight, outcome.weight_std, outcome.max_weight, outcome.ess)),
        *map(_share, (outcome.rejected_terms, outcome.rejected_samples, outcome.clipped)),
        f"{outcome.loss:.2e}",
        *map(_number, (outcome.cosine, outcome.least_cosine, outcome.relative_norm)),
        "-" if outcome.factors is None else f"{outcome.factors[0]:z.2f}..{outcome.factors[-1]:z.2f}",
        _share(outcome.changed_terms),
    )


def facts(report: LabReport) -> str:
    """The replayed steps, in a line."""
    first, last = report.steps[0], report.steps[-1]
    steps = f"step {first}" if len(report.steps) == 1 else f"{len(report.steps)} steps, {first} to {last}"
    modes = {0: "decoupled", len(report.steps): "bypass"}
    mode = modes.get(report.num_bypass, f"{report.num_bypass} of the steps in bypass")
    size = "" if report.num_elements is None else f", D = {report.num_elements}"
    return (
        f"{steps}: {report.num_samples} samples of {report.window} SDE steps{size}; "
        f"loss {report.loss_mode}, {mode}"
    )


def as_json(report: LabReport) -> str:
    """The report as JSON."""
    return json.dumps(report.to_mapping(), indent=2, allow_nan=False)


def save(report: LabReport, folder: Path) -> list[Path]:
    """Write `lab.json`, `lab.html` and its charts; see `save_page`."""
    return save_page(folder, "lab", as_json(report), html(report), charts(report))


def html(report: LabReport) -> str:
    """The page."""
    return render(
        "lab.html",
        title=f"Lab: {report.run_dir}",
        facts=facts(report),
        reading=report.reading,
        header=HEADER,
        rows=[(row(replay, outcome), replay.of_run, outcome.same) for replay, outcome in _shown(report)],
        reasons=reasons(report),
        notes=report.notes,
        charts=charts(report),
    )


def reasons(report: LabReport) -> dict[str, list[str]]:
    """Why some replays have no row: their labels, by reason."""
    found: dict[str, list[str]] = {}
    for replay in report.replays:
        if replay.outcome is None:
            found.setdefault(replay.reason, []).append(replay.label)
    return found


def charts(report: LabReport) -> list[Chart]:
    """How far each preset's gradient is from no correction, and how that changes over training."""
    shown = _shown(report)
    height = 34 + 19 * len(shown)
    least = min(0.0, *(_or_nan(outcome.least_cosine) for _, outcome in shown))

    def chart(name: str, title: str, caption: str, rows: list[Dot], **options: Any) -> Chart:
        draw = partial(draw_dots, rows=rows, **options)
        return Chart(name=f"lab_{name}", title=title, caption=caption, draw=draw, height=height)

    def dots(value: Callable[[Outcome], float | None], **more: Callable[[Outcome], Any]) -> list[Dot]:
        return [
            Dot(
                name=_label(replay),
                value=_or_nan(value(outcome)),
                muted=outcome.same,
                **{name: read(outcome) for name, read in more.items()},
            )
            for replay, outcome in shown
        ]

    found = [
        chart(
            "direction",
            "Direction: cosine with no correction",
            "dot: mean over steps; line: down to the lowest step; grey: acts as no correction does",
            dots(
                lambda outcome: outcome.cosine,
                span=lambda outcome: (_or_nan(outcome.least_cosine), _or_nan(outcome.cosine)),
            ),
            view=(least - 0.04, 1.04),
        ),
        chart(
            "length",
            "Length: gradient over the uncorrected one",
            "dot: of the whole gradient; line: of 98 % of its terms",
            dots(
                lambda outcome: outcome.relative_norm,
                span=lambda outcome: (
                    (math.nan, math.nan)
                    if outcome.factors is None
                    else (outcome.factors[0], outcome.factors[-1])
                ),
            ),
            line=1.0,
        ),
        chart(
            "terms",
            "Changed and rejected terms",
            "dot: % of terms whose coefficient changes its sign, is lost or appears; red ring: % rejected",
            dots(
                lambda outcome: 100 * outcome.changed_terms,
                ring=lambda outcome: 100 * outcome.rejected_terms or math.nan,
            ),
            view=(-4, 104),
        ),
        chart(
            "ess",
            "Effective sample size",
            "share of the samples that the weights keep; no dot: no weights",
            dots(lambda outcome: outcome.ess),
            view=(-0.04, 1.04),
        ),
    ]
    curves, names = _curves_over_training(report, shown)
    if curves:
        found.append(
            Chart(
                name="lab_over_training",
                title="Cosine with no correction over training",
                draw=partial(draw_curves, curves=curves),
                caption=f"across: training steps; {names}",
            )
        )
    return found


def _curves_over_training(
    report: LabReport, shown: Sequence[tuple[Replay, Outcome]]
) -> tuple[list[Curve], str]:
    """The presets that turn the gradient, with a letter each, and the names of the letters."""
    if len(report.steps) < 2:
        return [], ""
    curves, names = [], []
    for mark, colour, (replay, outcome) in zip(ascii_uppercase, PALETTE, _distinct(shown), strict=False):
        points = [
            (float(step), cosine, cosine, cosine)
            for step, cosine in zip(report.steps, outcome.cosines, strict=True)
            if cosine is not None
        ]
        curves.append(Curve(mark=mark, colour=colour, band=points))
        names.append(f"{mark}: {_label(replay)}")
    return curves, "; ".join(names)


def _shown(report: LabReport) -> list[tuple[Replay, Outcome]]:
    return [(replay, replay.outcome) for replay in report.replays if replay.outcome is not None]


def _distinct(shown: Sequence[tuple[Replay, Outcome]]) -> list[tuple[Replay, Outcome]]:
    """Those that turn the gradient, one of each that do it alike, and evenly chosen where there are too many."""
    kinds: dict[tuple[float, ...], tuple[Replay, Outcome]] = {}
    for replay, outcome in shown:
        if not outcome.same:
            kinds.setdefault(
                tuple(round(_or_nan(cosine), 2) for cosine in outcome.cosines), (replay, outcome)
            )
    found = list(kinds.values())
    stride = max(1, math.ceil(len(found) / _MAX_LINES))
    return found[::stride]


def _label(replay: Replay) -> str:
    marked = replay.of_run and replay.name != THIS_RUN
    return f"{replay.label} (this run)" if marked else replay.label


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}" if abs(value) < 1000 else f"{value:.1e}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
