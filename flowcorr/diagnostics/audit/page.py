"""An audit as files: JSON, one HTML page that needs nothing but itself, and its charts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

import flowcorr
from flowcorr.diagnostics.audit.advice import BASIS, WORDS, Kind, as_overrides, limit_at
from flowcorr.diagnostics.audit.measure import NO_ADVICE, AuditReport
from flowcorr.diagnostics.audit.tables import PresetOutcome, ScaleWorth, StepGap
from flowcorr.diagnostics.clip_noise import QUANTILES, clip_text
from flowcorr.instruments.drawing import INK, LIMIT, PALETTE, Chart, label_lines, style_axis
from flowcorr.instruments.page import render, save_page
from flowcorr.instruments.plots import draw_bars

STEP_HEADER = (
    "step",
    "sigma",
    "terms",
    "mean",
    *(f"|delta| {quantile:.0%}" for quantile in QUANTILES),
    "exact KL",
    "outside clip",
    "clip needed",
)
SCALE_HEADER = ("scale", "level", "ESS", "ESS expected", "chi-squared")
SCALE_NOTE = (
    "expected: from the exact KLs, for many samples; chi-squared: mean square less 1, so it may be negative"
)
PRESET_HEADER = ("preset", "rejected terms", "rejected samples", "mean weight", "ESS")
_MAX_NAMES = 20  # of steps below a chart
_LEVELS: Mapping[Kind, str] = {
    "none": "healthy",
    "leave": "warning",
    "correct": "warning",
    "repair": "serious",
}


def save(report: AuditReport, folder: Path, *, title: str) -> list[Path]:
    """Write `audit.json`, `audit.html` and its charts; `title` is the recipe with its overrides. See `save_page`."""
    return save_page(folder, "audit", as_json(report, title), html(report, title), charts(report))


def as_json(report: AuditReport, title: str) -> str:
    """The report as JSON, with what was audited."""
    origin = {"flowcorr": flowcorr.__version__, "recipe": title}
    return json.dumps(origin | report.to_mapping(), indent=2, allow_nan=False)


def facts(report: AuditReport) -> list[str]:
    """Facts that hold for all steps, a line each."""
    size = "" if report.num_elements is None else f", D = {report.num_elements}"
    lines = [f"{report.num_samples} samples of {report.num_steps} SDE steps{size}, loss {report.loss_mode}"]
    if report.joint_nats is not None:
        lines.append(f"joint nats of a window, D times its exact KL: {report.joint_nats:.3g}")
    if report.outside_clip is not None and report.clip_limit is not None:
        lines.append(
            f"terms outside the clip range of {clip_text(report.clip_limit)} before any update: "
            f"{report.outside_clip:.1%}"
        )
    cost = report.cost
    if cost is not None:
        lines.append(
            f"recompute pass: {cost.recompute:.2g} s a step beside {cost.rollout:.2g} s of rollout and "
            f"{cost.update:.2g} s of update, {cost.share:.0%} of the three together (reward not counted)"
        )
        lines.append(f"the rollout makes {cost.images_per_second:.3g} images a second")
    lines += report.notes
    if report.staleness and cost is not None:
        lines.append(
            f"the engine lags {report.staleness} training steps behind; they were made on random advantages, which "
            f"stand in for learning: {report.stale_nats:.3g} joint nats are staleness, {report.precision_nats:.3g} the "
            "engine's"
        )
    return lines


def step_row(step: StepGap) -> tuple[str, ...]:
    """The cells under `STEP_HEADER`."""
    outside = "-" if step.outside_clip is None else f"{step.outside_clip:.0%}"
    sizes = (f"{value:.1e}" for value in (step.mean_delta, *step.abs_delta, step.exact_kl))
    needed = f"{step.clip_needed:.1e}"
    sigma = "-" if step.sigma is None else f"{step.sigma:.3f}"
    return str(step.step_index), sigma, str(step.num_terms), *sizes, outside, needed


def scale_row(worth: ScaleWorth) -> tuple[str, ...]:
    """The cells under `SCALE_HEADER`."""
    chi2 = "overflows" if worth.chi2 is None else f"{worth.chi2:.2g}"
    return worth.scale, worth.level, f"{worth.ess:.3f}", f"{worth.expected_ess:.3f}", chi2


def preset_row(outcome: PresetOutcome) -> tuple[str, ...]:
    """The cells under `PRESET_HEADER`."""
    name = ", ".join((outcome.name, *outcome.aliases))
    weights = (outcome.mean_weight, outcome.ess)
    rejected = (f"{share:.1%}" for share in (outcome.rejected_terms, outcome.rejected_samples))
    return name, *rejected, *("-" if value is None else f"{value:.3f}" for value in weights)


def level(report: AuditReport) -> str:
    """How bad the verdict is: `healthy`, `note`, `warning` or `serious`."""
    if report.diagnoses:
        return report.diagnoses[0].level
    return "note" if report.advice is None else _LEVELS[report.advice.kind]


def reasons(report: AuditReport) -> list[str]:
    """The reasons of the verdict: the diagnoses, then the advice and its reasons where these do not hide the gap."""
    lines = [
        f"{one.verdict[:1].upper()}{one.verdict[1:]}{'' if one.sure else ', most likely'}: {one.evidence}. "
        f"{one.remedy[:1].upper()}{one.remedy[1:]}."
        for one in report.diagnoses
    ]
    if report.hidden:
        return lines
    if report.diagnoses and report.advice is None:
        lines.append(f"{NO_ADVICE}.")
    if report.advice is not None:
        lines += [f"{report.advice.verdict}."] * bool(report.diagnoses)
        lines += [*report.advice.reasons, BASIS]
    if report.assumes_newest:
        lines.append(
            "The dump does not tell whether these weights were the newest (policy_versions, version); if they were "
            "not, recompute old log-probs (decoupled)."
        )
    return lines


def suggestions(report: AuditReport) -> list[tuple[str, str, str]]:
    """Lines for the recipe: a heading, the lines, and the same as arguments of a command."""
    advice = report.advice
    if advice is None or report.hidden or not report.of_recipe:
        return []
    blocks = [
        ("Replace these keys of the recipe, and leave out a preset", advice.yaml),
        ("Or bypass, with a clip range above the noise", advice.alternative),
    ]
    return [(heading, lines, as_overrides(lines)) for heading, lines in blocks if lines]


def in_words(report: AuditReport) -> str:
    """The changes for the owner of another trainer; empty where a recipe takes lines."""
    if report.advice is None or report.hidden or report.of_recipe:
        return ""
    return WORDS[report.advice.kind == "correct", report.advice.mode]


def html(report: AuditReport, title: str) -> str:
    """The page."""
    return render(
        "audit.html",
        title=f"Audit of {title}",
        level=level(report),
        verdict=report.verdict,
        reasons=reasons(report),
        suggestions=suggestions(report),
        words=in_words(report),
        facts=facts(report),
        charts=charts(report),
        # Heading, note, header, rows, and how many columns hold words.
        tables=[
            ("By step", "delta log p, in nats a latent element", STEP_HEADER, map(step_row, report.steps), 1),
            *(
                [("Weights without a cap", SCALE_NOTE, SCALE_HEADER, map(scale_row, report.scales), 2)]
                if report.scales
                else []
            ),
            ("Presets at their own thresholds", "", PRESET_HEADER, map(preset_row, report.presets), 1),
        ],
    )


def charts(report: AuditReport) -> list[Chart]:
    """The gap by step beside the clip range, and what presets reject, if any do."""
    quantiles = ", ".join(f"{level:.0%}" for level in QUANTILES)
    found = [
        Chart(
            name="audit_gap",
            title="The gap by step of the schedule",
            draw=partial(_draw_gap, report=report),
            caption=f"{quantiles}: quantiles of |delta log p|, nats per latent element; needed: the clip range that "
            "bypass needs" + ("; clip: the configured clip range" if report.clip_limit is not None else ""),
        )
    ]
    acting = [outcome for outcome in report.presets if outcome.rejected_samples > 0]
    if acting:
        bars = [(row.name, row.rejected_samples, f"{row.rejected_samples:.0%}") for row in acting]
        found.append(
            Chart(
                name="audit_rejected",
                title="Rejected samples, at each preset's own band",
                draw=partial(draw_bars, bars=bars),
                height=30 + 22 * len(bars),
            )
        )
    return found


def _draw_gap(figure: Figure, report: AuditReport) -> None:
    axes = figure.subplots()
    steps = report.steps
    places = range(len(steps))
    lines = [
        (f"{level:.0%}", [step.abs_delta[place] for step in steps], PALETTE[0], "-")
        for place, level in enumerate(QUANTILES)
    ]
    lines.append(("needed", [step.clip_needed for step in steps], INK, "--"))
    if report.clip_limit is not None:
        limits = [limit_at(report.clip_limit, step.step_index) for step in steps]
        lines.append(("clip", limits, LIMIT, "-"))
    for _, values, colour, style in lines:
        axes.plot(places, values, f"o{style}", color=colour, clip_on=False)
    if all(step.abs_delta[0] > 0 for step in steps):
        axes.set_yscale("log")
    style_axis(axes.yaxis)
    names = [
        f"step {step.step_index}" + ("" if step.sigma is None else f"\nσ {step.sigma:.2f}") for step in steps
    ]
    stride = math.ceil(len(names) / _MAX_NAMES)
    axes.set_xticks(places[::stride], names[::stride])
    axes.set_xlim(-0.3, len(steps) - 1)
    label_lines(axes, [(values[-1], name, colour) for name, values, colour, _ in lines])
