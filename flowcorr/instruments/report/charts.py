"""The charts of some runs, in sections, for the page and as PNG files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean, median

import torch
from torch import Tensor

from flowcorr.config.run import SERVED
from flowcorr.health.rule import Rule
from flowcorr.health.table import rule_of
from flowcorr.instruments.drawing import HEIGHT, PALETTE, Chart
from flowcorr.instruments.outcome import Charts
from flowcorr.instruments.plan.answers import duration
from flowcorr.instruments.plots import (
    BandPoint,
    Curve,
    draw_bars,
    draw_curves,
    draw_histograms,
    limit_in_view,
)
from flowcorr.instruments.report.bands import band_charts
from flowcorr.instruments.report.heat_maps import ROUNDING, heat_maps
from flowcorr.instruments.report.runs import Group
from flowcorr.instruments.report.terms import Spread, reach, read_spread, shares
from flowcorr.instruments.thinning import MAX_POINTS, rows_text, spread_out, steps_a_point, stride_text
from flowcorr.trainer.timing import PHASES

_REPLAY_TEXT = (
    "Images that the training stack repeated, one of each prompt, every rollout.replay_every steps: what the ratio of "
    "log-probs does not cover."
)
_IMAGES_TEXT = (
    "Statistics that nothing optimises. Where one drifts far from its start while the reward rises, "
    "the policy may exploit the reward: look at the images."
)
_BINS = 64
_MIN_SHARE = 0.005  # of a step's time that is worth a bar
_MAX_MARK = 12  # characters beside a chart
MAX_CHARTS = 100  # of metrics in a section; a run has fewer
_HISTOGRAMS = "All dumped steps together. Each row is scaled to its largest bin."
_NO_TERMS = (
    "Train with trainer.dump_log_probs=true to see here how the ratios of the update lie in the clip range, and how "
    "rollout and training differ at each step."
)


def chart_sections(groups: Sequence[Group]) -> list[Charts]:
    """All sections that have something to say: did it learn, how far do the stacks drift apart, time, images."""
    sections = [
        _curves(groups, "Learning", _learning_metrics(groups, of_images=False), _learning_text(groups)),
        _curves(
            groups,
            "Drift between rollout and training",
            _rows_of(groups, "drift"),
            _drift_text(groups),
            zoom=True,
        ),
        Charts(
            title="Drift by timestep",
            text="Mean |Δ log p| at each step of the sampling schedule, before anything was learned from the batch. "
            f"All maps have one scale; grey: below {ROUNDING:g}, the rounding of float32; white: not in the window.",
            pictures=_named(heat_maps(groups)),
        ),
        _curves(groups, "Outside the log-probs", _rows_of(groups, "replay"), _REPLAY_TEXT),
        _did(groups),
        _curves(groups, "The update", _rows_of(groups, "update"), ""),
    ]
    timing = Charts(
        title="Where the time goes",
        text="Median seconds of each phase of a training step.",
        pictures=_named(
            chart
            for index, (group, colour) in enumerate(zip(groups, colours(groups), strict=True))
            if (chart := _timing(group, index, colour))
        ),
    )
    statistics = _curves(groups, "Image statistics", _learning_metrics(groups, of_images=True), _IMAGES_TEXT)
    return [
        *(section for section in sections if section.pictures),
        _histograms(groups),
        *(section for section in (timing, statistics) if section.pictures),
    ]


def colours(groups: Sequence[Group]) -> list[str]:
    """The colour of each group."""
    return [PALETTE[index % len(PALETTE)] for index in range(len(groups))]


def legend(groups: Sequence[Group]) -> list[tuple[str, str, str]]:
    """Mark, name and colour of each group's lines."""
    names = [group.label for group in groups]
    return list(zip(marks(groups), names, colours(groups), strict=True))


def marks(groups: Sequence[Group]) -> list[str]:
    """The name of each group's lines in legends: none for one group, its label if all are short, or a letter."""
    names = [group.label for group in groups]
    if len(names) == 1:
        return [""]
    if max(map(len, names)) <= _MAX_MARK:
        return names
    return [chr(ord("A") + index) if index < 26 else str(index) for index in range(len(names))]


# Curves --------------------------------------------------------------------------------------------------------


def _rows_of(groups: Sequence[Group], section: str) -> list[tuple[str, str, str]]:
    """Name, title and remark of a section's metrics, then of the copies for the whole update."""
    every = {metric.name: metric for group in groups for metric in group.rows}
    charted = [
        (metric, (metric.chart.title, metric.unit if metric.chart.remark is None else metric.chart.remark))
        for metric in every.values()
        if metric.chart is not None and metric.chart.section == section
    ]
    in_update = [
        (f"actor/{metric.name}", f"{title} in the update", "current against rollout policy")
        for metric, (title, _) in charted
        if metric.rule is not None and metric.rule.applied
    ]
    return [*((metric.name, *words) for metric, words in charted), *in_update]


def _learning_metrics(groups: Sequence[Group], *, of_images: bool) -> tuple[tuple[str, str, str], ...]:
    """Rewards and held-out scores, or the statistics of images."""
    logged = dict.fromkeys(
        name
        for prefix in ("eval/", "reward/")
        for group in groups
        for run in group.runs
        for record in run.records
        for name in record
        if name.startswith(prefix)
    )
    skipped = ("_std", "/std", "/min", "/max", "/scored_images", "/failed_samples")
    return tuple(
        (name, *_in_words(name))
        for name in logged
        if not name.endswith(skipped) and ("/image/" in name) == of_images
    )


def _in_words(name: str) -> tuple[str, str]:
    """Title and remark of a score: `eval/exact_match` is the exact match, held out."""
    if name.startswith(SERVED):
        words, _ = _in_words(f"eval/{name.removeprefix(SERVED)}")
        return words, "held out, on the unquantized base"
    where, _, score = name.partition("/")
    words = score.removeprefix("image/").replace("_", " ").replace("/", ", ")
    words = "mean reward" if name == "reward/mean" else words
    return f"{words[:1].upper()}{words[1:]}", "held out" if where == "eval" else "training samples"


def _learning_text(groups: Sequence[Group]) -> str:
    longest = max(len(run.records) for group in groups for run in group.runs)
    if max(len(group.runs) for group in groups) == 1 and longest <= MAX_POINTS:
        return ""
    return "Lines are means over seeds, and over steps where a caption says so; bands go from least to most."


def _drift_text(groups: Sequence[Group]) -> str:
    text = "Log-probs are means over the elements of a latent, so these numbers are small"
    known = sorted({group.num_elements for group in groups if group.num_elements is not None})
    return (
        f"{text}: KL and Δ log p of whole steps are {' or '.join(map(str, known))} times as large."
        if known
        else f"{text}."
    )


def _did(groups: Sequence[Group]) -> Charts:
    """Charts of the correction, and of the bands that it measured."""
    section = _curves(groups, "What the correction did", _rows_of(groups, "correction"), "")
    return replace(section, pictures={**section.pictures, **_named(band_charts(groups))})


def _curves(
    groups: Sequence[Group],
    title: str,
    metrics: Sequence[tuple[str, str, str]],
    text: str,
    *,
    zoom: bool = False,
) -> Charts:
    charts = [chart for metric in metrics[:MAX_CHARTS] if (chart := _curve(groups, *metric, zoom=zoom))]
    if len(metrics) > MAX_CHARTS:
        text = f"{text} Of {len(metrics)} metrics, the first {MAX_CHARTS} are drawn.".strip()
    if any(chart.shaded for chart in charts):
        text = f"{text} Shaded: outside the healthy range.".strip()
    return Charts(
        title=title,
        text=f"{text} Across: training steps.".strip(),
        pictures=_named(charts),
        legend=legend(groups) if len(groups) > 1 else (),
    )


def _named(charts: Iterable[Chart]) -> dict[str, Chart]:
    """The charts by name; `reward/a/b` and `reward/a_b` would share one."""
    by_name: dict[str, Chart] = {}
    for chart in charts:
        name = chart.name
        while name in by_name:
            name += "_"
        by_name[name] = replace(chart, name=name)
    return by_name


def _curve(groups: Sequence[Group], metric: str, title: str, unit: str, *, zoom: bool) -> Chart | None:
    """The curve of a metric; `zoom` fits the axis to the values if they are small compared with the limits."""
    bands = {index: band for index, group in enumerate(groups) if (band := group.band(metric))}
    if not bands:
        return None
    stride = steps_a_point(max(map(len, bands.values())))
    names, palette = marks(groups), colours(groups)
    curves = [
        Curve(mark=names[index], colour=palette[index], band=_pooled(band, stride))
        for index, band in bands.items()
    ]
    rules = {index: rule_of(metric, groups[index].rows) or Rule() for index in bands}
    ranges = {rule.limits(groups[index].units) for index, rule in rules.items()}
    serious = min(rule.serious for rule in rules.values())
    healthy, limits = (-math.inf, math.inf), "its limits differ between the runs"
    if len(ranges) == 1:
        healthy = ranges.pop()
        limits = _healthy_text(curves, healthy, serious, zoom)
    return Chart(
        name=metric.replace("/", "_"),
        title=title,
        draw=draw_curves,
        data={"curves": curves, "healthy": healthy, "serious": serious, "zoom": zoom},
        caption="; ".join(filter(None, [unit, limits, stride_text(stride)])),
        metric="" if title == metric else metric,
        shaded=limit_in_view(curves, healthy, zoom=zoom),
    )


def _pooled(band: Sequence[BandPoint], stride: int) -> list[BandPoint]:
    """Merge every `stride` points of a band into one, at the last of their steps."""
    parts = [band[begin : begin + stride] for begin in range(0, len(band), stride)]
    return [
        (
            part[-1][0],
            fmean(mean for _, mean, _, _ in part),
            min(low for _, _, low, _ in part),
            max(high for *_, high in part),
        )
        for part in parts
    ]


def _healthy_text(curves: Sequence[Curve], healthy: tuple[float, float], serious: float, zoom: bool) -> str:
    low, high = healthy
    if math.isfinite(low) and math.isfinite(high):
        text = f"healthy from {low:.3g} to {high:.3g}"
    elif math.isfinite(high):
        text = f"healthy up to {high:.3g}" + f", serious above {serious:.3g}" * math.isfinite(serious)
    elif math.isfinite(low):
        text = f"healthy from {low:.3g}"
    else:
        return ""
    return text if limit_in_view(curves, healthy, zoom=zoom) else f"{text}, outside this plot"


# Histograms ----------------------------------------------------------------------------------------------------


def _histograms(groups: Sequence[Group]) -> Charts:
    charts = []
    for index, (group, colour) in enumerate(zip(groups, colours(groups), strict=True)):
        spread = read_spread(group)
        if spread is not None:
            if spread.num_updates:
                charts.append(_ratio_chart(group, spread, index, colour))
            if spread.mismatch:
                charts.append(_mismatch_chart(group, spread, index, colour))
    return Charts(
        title="Ratios and mismatch",
        text=_HISTOGRAMS if charts else _NO_TERMS,
        pictures=_named(charts),
    )


def _ratio_chart(group: Group, spread: Spread, index: int, colour: str) -> Chart:
    moved = spread.ratios[spread.ratios != 0]
    view = reach(moved, spread.limits)
    unit = (
        "ratio less 1, in clip ranges of its step" if spread.in_ranges else "log-ratio as the loss clips it"
    )
    what = "current less rollout" if spread.num_bypass == spread.num_steps else "current less old log-prob"
    texts = [
        f"{unit}: {what}, {len(spread.ratios)} terms of {spread.num_updates} training steps",
        _clip_text(spread, view),
        _still_text(spread),
        _beyond(moved, view),
    ]
    return Chart(
        name=f"ratios_{index}",
        title=f"Ratios of the update, {group.label}",
        draw=draw_histograms,
        data={
            "rows": {"": shares(moved, view, _BINS)},
            "edges": _edges(view),
            "limits": spread.limits,
            "colour": colour,
        },
        caption="; ".join(filter(None, texts)),
    )


def _clip_text(spread: Spread, view: float) -> str:
    if spread.limits is None:
        return "the clip range is not known" if spread.hides_limits else "this loss has no clip range"
    low, high = spread.limits
    above, below = (_share(where) for where in (spread.ratios > high, spread.ratios < low))
    place = "dashed" if min(abs(low), abs(high)) <= view else "outside this plot"
    return f"clip range {place}: {above:.1%} above, {below:.1%} below"


def _still_text(spread: Spread) -> str:
    still = _share(spread.ratios == 0)
    return f"{still:.0%} are 0, scored before the first optimizer step, and not drawn" if still else ""


def _mismatch_chart(group: Group, spread: Spread, index: int, colour: str) -> Chart:
    everything = torch.cat(list(spread.mismatch.values()))
    view = reach(everything)
    shown = spread_out(list(spread.mismatch))
    rows = {f"step {step}": shares(spread.mismatch[step], view, _BINS) for step in shown}
    what = "current less rollout log-prob"
    if spread.num_bypass < spread.num_steps:
        also = f", of steps in bypass mode {what}" if spread.num_bypass else ""
        what = f"old less rollout log-prob{also}"
    summary = "0 everywhere: both stacks score alike, to the last bit"
    if everything.any():
        summary = "mean ± std of step " + ", ".join(
            f"{step}: {spread.mismatch[step].mean():.1e} ± {spread.mismatch[step].std(correction=0):.1e}"
            for step in shown
        )
    texts = [
        f"{what}, nats per latent element, by step of the schedule",
        rows_text(shown, spread.mismatch),
        summary,
        _beyond(everything, view),
    ]
    return Chart(
        name=f"mismatch_by_step_{index}",
        title=f"Rollout mismatch, {group.label}",
        draw=draw_histograms,
        data={"rows": rows, "edges": _edges(view), "colour": colour},
        caption="; ".join(filter(None, texts)),
        height=max(HEIGHT, 30 + 40 * len(rows)),
    )


def _edges(view: float) -> list[float]:
    return torch.linspace(-view, view, _BINS + 1, dtype=torch.float64).tolist()


def _beyond(values: Tensor, view: float) -> str:
    share = _share(values.abs() > view)
    return f"{share:.1%} lie beyond the picture" if share else ""


def _share(where: Tensor) -> float:
    return float(where.double().mean()) if len(where) else 0.0


# Time ----------------------------------------------------------------------------------------------------------


def _timing(group: Group, index: int, colour: str) -> Chart | None:
    whole = _median(group, "timing/step")
    if not whole:
        return None
    seconds = {phase.replace("_", " "): _median(group, f"timing/{phase}") for phase in PHASES}
    seconds["other"] = max(0.0, whole - sum(seconds.values()))
    total = sum(seconds.values())
    bars = [
        (phase, value, f"{duration(value)}, {value / total:.0%}")
        for phase, value in seconds.items()
        if value / total >= _MIN_SHARE
    ]
    return Chart(
        name=f"time_{index}",
        title=f"Time, {group.label}",
        draw=draw_bars,
        data={"bars": bars, "colour": colour},
        caption=f"a step takes {duration(whole)} in the median",
        height=30 + 28 * len(bars),
    )


def _median(group: Group, metric: str) -> float:
    values = [value for run in group.runs for _, value in run.series(metric)]
    return median(values) if values else 0.0
