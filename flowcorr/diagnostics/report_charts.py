"""The charts of some runs, in sections: what the page shows, and what lies beside it as PNG."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from flowcorr.diagnostics.health import healthy_range, serious_limit
from flowcorr.diagnostics.report_terms import Spread, reach, read_spread, shares
from flowcorr.diagnostics.run_data import BandPoint, Group
from flowcorr.diagnostics.svg import COLOURS, Line, heat_map, histogram, limit_in_view, line_chart

_DRIFT = (
    ("rollout_corr/kl", "KL of rollout and old policy, K1", "nats per latent element"),
    ("rollout_corr/exact_kl", "exact KL of a step", "nats per latent element"),
    ("rollout_corr/k3_kl", "K3", "of mean-pooled ratios: about half the mean square of Δ log p, and no KL"),
    ("rollout_corr/logprob_abs_diff_mean", "mean |Δ log p|", "nats per latent element"),
    ("rollout_corr/ppl_ratio", "perplexity ratio", "training / rollout"),
    ("rollout_corr/chi2_token", "χ² of one step", "of mean-pooled ratios"),
    ("rollout_corr/chi2_seq", "χ² of the window", "of mean-pooled ratios"),
)
_CORRECTION = (
    ("rollout_corr/rollout_is_mean", "mean importance weight", "after its cap"),
    ("rollout_corr/rollout_is_std", "std of the importance weights", "after their cap"),
    ("rollout_corr/rollout_is_eff_sample_size", "effective sample size", "share of the batch"),
    ("rollout_corr/rejected_ratio", "rejected samples", "share with a rejected step"),
    ("rollout_corr/rollout_is_veto_fraction", "vetoed samples", "share"),
    *(
        (f"actor/rollout_corr/{name}", f"{title} in the update", "current against rollout policy")
        for name, title in (
            ("rollout_is_mean", "mean importance weight"),
            ("rollout_is_std", "std of the importance weights"),
            ("rollout_is_eff_sample_size", "effective sample size"),
            ("rejected_ratio", "rejected samples"),
            ("rollout_is_veto_fraction", "vetoed samples"),
        )
    ),
    ("rollout_corr/clip_noise_fraction", "outside the clip before learning", "share of drift-1 ratios"),
)
_UPDATE = (
    ("actor/pg_clipfrac", "clipped terms", "share of the update's"),
    ("actor/ratio_std", "std of the PPO ratio", ""),
    ("actor/ppo_kl", "KL of the update", "nats per latent element"),
    ("actor/grad_norm", "gradient norm", ""),
)
_BINS = 64
MAX_POINTS = 200  # of a curve, or columns of a heat map: pictures are 330 units wide
_STEP_DRIFT = re.compile(r"rollout_corr/step_(\d+)/logprob_abs_diff")
_HISTOGRAMS = "Of all dumped steps together. Each row is as high as its largest bin."
_NO_TERMS = (
    "Train with trainer.dump_log_probs=true to see here how the ratios of the update lie in the clip range, and how "
    "rollout and training differ at each step."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One chart.

    Attributes:
        name: its file's, without a suffix.
        title: what it shows.
        svg: the picture, without its title.
        caption: unit and limits.
        metric: the metric that it is of, if it is of one and its title does not say so.
    """

    name: str
    title: str
    svg: str
    caption: str
    metric: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartSection:
    """Charts under a heading.

    Attributes:
        title: the heading.
        text: what holds for all of them, or is to be said in their place.
        charts: in order.
        by_colour: whether a colour stands for a group of runs.
    """

    title: str
    text: str
    charts: Sequence[Chart]
    by_colour: bool


def chart_sections(groups: Sequence[Group]) -> list[ChartSection]:
    """All sections that have something to say."""
    sections = [
        _curves(groups, "Learning", _learning_metrics(groups), _learning_text(groups)),
        _curves(groups, "Drift between rollout and training", _DRIFT, _drift_text(groups), zoom=True),
        ChartSection(
            title="Drift by timestep",
            text="Mean |Δ log p| at each step of the sampling schedule, before anything was learned from the batch.",
            charts=[chart for index, group in enumerate(groups) if (chart := _heat_map(group, index))],
            by_colour=False,
        ),
        _curves(groups, "What the correction did", _CORRECTION, ""),
        _curves(groups, "The update", _UPDATE, ""),
    ]
    return [*(section for section in sections if section.charts), _histograms(groups)]


def colours(groups: Sequence[Group]) -> list[str]:
    """The colour of each group."""
    return [COLOURS[index % len(COLOURS)] for index in range(len(groups))]


# Curves --------------------------------------------------------------------------------------------------------


def _learning_metrics(groups: Sequence[Group]) -> tuple[tuple[str, str, str], ...]:
    logged = dict.fromkeys(
        name
        for prefix in ("eval/", "reward/")
        for group in groups
        for run in group.runs
        for record in run.records
        for name in record
        if name.startswith(prefix)
    )
    skipped = ("_std", "/std", "/min", "/max", "/failed_samples")
    return tuple(
        (name, name, "held out" if name.startswith("eval/") else "training samples")
        for name in logged
        if not name.endswith(skipped)
    )


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


def _curves(
    groups: Sequence[Group],
    title: str,
    metrics: Sequence[tuple[str, str, str]],
    text: str,
    *,
    zoom: bool = False,
) -> ChartSection:
    charts = [chart for metric in metrics if (chart := _curve(groups, *metric, zoom=zoom))]
    return ChartSection(title=title, text=text, charts=charts, by_colour=True)


def _curve(groups: Sequence[Group], metric: str, title: str, unit: str, *, zoom: bool) -> Chart | None:
    """The curve of a metric; with `zoom` as large as its values allow, where these are small beside its limits."""
    bands = {index: band for index, group in enumerate(groups) if (band := group.band(metric))}
    if not bands:
        return None
    stride = _stride(max(map(len, bands.values())))
    lines = [
        Line(label=groups[index].label, colour=colours(groups)[index], band=_pooled(band, stride))
        for index, band in bands.items()
    ]
    ranges = {healthy_range(metric, groups[index].units) for index in bands}
    healthy, limits = (-math.inf, math.inf), "its healthy range depends on log_ratio_scale"
    if len(ranges) == 1:
        healthy = ranges.pop()
        limits = _healthy_text(lines, healthy, serious_limit(metric), zoom)
    return Chart(
        name=metric.replace("/", "_"),
        title=title,
        svg=line_chart(title, lines, healthy, serious=serious_limit(metric), zoom=zoom),
        caption="; ".join(filter(None, [unit, limits, _stride_text(stride)])),
        metric="" if title == metric else metric,
    )


def _stride(count: int) -> int:
    """How many training steps make a point."""
    return math.ceil(count / MAX_POINTS)


def _stride_text(stride: int) -> str:
    return f"means over {stride} steps" if stride > 1 else ""


def _pooled(band: Sequence[BandPoint], stride: int) -> list[BandPoint]:
    """A band with one point for `stride` steps, at the last of them."""
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


def _healthy_text(lines: Sequence[Line], healthy: tuple[float, float], serious: float, zoom: bool) -> str:
    low, high = healthy
    if math.isfinite(low) and math.isfinite(high):
        text = f"healthy from {low:.3g} to {high:.3g}"
    elif math.isfinite(high):
        text = f"healthy up to {high:.3g}" + f", serious above {serious:.3g}" * math.isfinite(serious)
    elif math.isfinite(low):
        text = f"healthy from {low:.3g}"
    else:
        return ""
    return text if limit_in_view(lines, healthy, zoom=zoom) else f"{text}, far from all values here"


def _heat_map(group: Group, index: int) -> Chart | None:
    names = {name for run in group.runs for record in run.records for name in record}
    found = {int(match[1]): name for name in names if (match := _STEP_DRIFT.fullmatch(name))}
    means = {f"step {index}": dict(group.means(name)) for index, name in sorted(found.items())}
    steps = sorted({step for values in means.values() for step in values})
    if not steps:
        return None
    stride = _stride(len(steps))
    parts = [steps[begin : begin + stride] for begin in range(0, len(steps), stride)]
    cells = {
        (row, part[-1]): fmean(here)
        for row, values in means.items()
        for part in parts
        if (here := [values[step] for step in part if step in values])
    }
    low, high = min(cells.values()), max(cells.values())
    scale = (
        f"palest {low:.2g}, darkest {high:.2g} nats per latent element; logarithmic"
        if high > 0
        else "0 everywhere: both stacks score alike, to the last bit"
    )
    title = f"drift by timestep, {group.label}"
    return Chart(
        name=f"drift_by_timestep_{index}",
        title=title,
        svg=heat_map(title, list(means), [part[-1] for part in parts], cells),
        caption="; ".join(
            filter(None, ["across: training step", "blank: not in the window", scale, _stride_text(stride)])
        ),
    )


# Histograms ----------------------------------------------------------------------------------------------------


def _histograms(groups: Sequence[Group]) -> ChartSection:
    charts = []
    for index, group in enumerate(groups):
        spread = read_spread(group)
        if spread is not None:
            charts += [_ratio_chart(group, spread, index), _mismatch_chart(group, spread, index)]
    return ChartSection(
        title="Ratios and mismatch",
        text=_HISTOGRAMS if charts else _NO_TERMS,
        charts=charts,
        by_colour=False,
    )


def _ratio_chart(group: Group, spread: Spread, index: int) -> Chart:
    title = f"ratios of the update, {group.label}"
    moved = spread.ratios[spread.ratios != 0]
    view = reach(moved, spread.limits)
    unit = (
        "ratio less 1, in clip ranges of its step" if spread.in_ranges else "log-ratio as the loss clips it"
    )
    what = "current less rollout" if spread.num_bypass == spread.num_steps else "current less old log-prob"
    texts = [
        f"{unit}: {what}, {len(spread.ratios)} terms of {spread.num_steps} training steps",
        _clip_text(spread, view),
        _still_text(spread),
        _beyond(moved, view),
    ]
    return Chart(
        name=f"ratios_{index}",
        title=title,
        svg=histogram(title, [("", shares(moved, view, _BINS))], (-view, view), spread.limits),
        caption="; ".join(filter(None, texts)),
    )


def _clip_text(spread: Spread, view: float) -> str:
    if spread.limits is None:
        return "this loss has no clip range"
    low, high = spread.limits
    above, below = (_share(where) for where in (spread.ratios > high, spread.ratios < low))
    place = "dashed" if min(abs(low), abs(high)) <= view else "far from all values here"
    return f"clip range {place}: {above:.1%} above, {below:.1%} below"


def _still_text(spread: Spread) -> str:
    still = _share(spread.ratios == 0)
    return f"{still:.0%} are 0, scored before the first optimizer step, and not drawn" if still else ""


def _mismatch_chart(group: Group, spread: Spread, index: int) -> Chart:
    title = f"rollout mismatch, {group.label}"
    everything = torch.cat(list(spread.mismatch.values()))
    view = reach(everything)
    rows = [(f"step {step}", shares(values, view, _BINS)) for step, values in spread.mismatch.items()]
    what = "current less rollout log-prob"
    if spread.num_bypass < spread.num_steps:
        also = f", of steps in bypass mode {what}" if spread.num_bypass else ""
        what = f"old less rollout log-prob{also}"
    found = "0 everywhere: both stacks score alike, to the last bit"
    if everything.any():
        found = "mean ± std of step " + ", ".join(
            f"{step}: {values.mean():.1e} ± {values.std(correction=0):.1e}"
            for step, values in spread.mismatch.items()
        )
    texts = [f"{what}, nats per latent element, by step of the schedule", found, _beyond(everything, view)]
    return Chart(
        name=f"mismatch_by_step_{index}",
        title=title,
        svg=histogram(title, rows, (-view, view)),
        caption="; ".join(filter(None, texts)),
    )


def _beyond(values: Tensor, view: float) -> str:
    share = _share(values.abs() > view)
    return f"{share:.1%} lie beyond the picture" if share else ""


def _share(where: Tensor) -> float:
    return float(where.double().mean()) if len(where) else 0.0
