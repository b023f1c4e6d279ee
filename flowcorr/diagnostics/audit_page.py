"""An audit as files: JSON, a picture, and one HTML page that needs nothing but itself."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import flowcorr
from flowcorr.diagnostics.audit import AuditReport, PresetOutcome, ScaleWorth, StepGap
from flowcorr.diagnostics.audit_advice import BASIS, as_overrides, limit_at
from flowcorr.diagnostics.report import QUANTILES, clip_text
from flowcorr.errors import BackendError

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

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 60rem; padding: 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.verdict { border-left: .3rem solid #3a7; padding: .5rem 1rem; font-size: 1.1rem; }
.verdict.leave, .verdict.correct { border-color: #c90; } .verdict.repair { border-color: #c33; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .15rem .5rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #8884; }
th:first-child, td:first-child { text-align: left; }
pre { background: #8882; padding: .7rem 1rem; white-space: pre-wrap; overflow-wrap: anywhere; }
img { max-width: 100%; min-width: 38rem; height: auto; }
small { opacity: .75; }
"""


def save(report: AuditReport, folder: Path, *, title: str) -> list[Path]:
    """Write `audit.json`, `audit.html` and, where matplotlib is installed, `audit.png`.

    Args:
        report: what was measured.
        folder: made if it is missing.
        title: the recipe, with its overrides.

    Returns:
        The files written.

    Raises:
        BackendError: the folder cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        data, page, picture = (folder / f"audit.{kind}" for kind in ("json", "html", "png"))
        data.write_text(as_json(report, title) + "\n", encoding="utf-8")
        drawn = draw(report, picture)
        page.write_text(html(report, title, picture.read_bytes() if drawn else None), encoding="utf-8")
    except OSError as error:
        raise BackendError(
            f"the audit cannot be written to {folder}: {error}; give another --out DIR"
        ) from error
    return [data, page, picture] if drawn else [data, page]


def as_json(report: AuditReport, title: str) -> str:
    """The report as JSON, with what was audited."""
    origin = {"flowcorr": flowcorr.__version__, "recipe": title}
    return json.dumps(origin | report.to_mapping(), indent=2, allow_nan=False)


def facts(report: AuditReport) -> list[str]:
    """What holds for all steps, a line each."""
    cost = report.cost
    lines = [
        f"{report.num_samples} samples of {report.num_steps} SDE steps, D = {report.num_elements}, "
        f"loss {report.loss_mode}",
        f"joint nats of a window, D times its exact KL: {report.joint_nats:.3g}",
        f"recompute pass: {cost.recompute:.2g} s a step beside {cost.rollout:.2g} s of rollout and {cost.update:.2g} s "
        f"of update, {cost.share:.0%} of the three together (reward not counted)",
    ]
    if report.outside_clip is not None and report.clip_limit is not None:
        lines.insert(
            2,
            f"terms outside the clip range of {clip_text(report.clip_limit)} before any update: "
            f"{report.outside_clip:.1%}",
        )
    if report.staleness:
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
    return str(step.step_index), f"{step.sigma:.3f}", str(step.num_terms), *sizes, outside, needed


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


def _lines(lines: str) -> str:
    return f"<pre>{escape(lines)}</pre><p>Or, in a command:</p><pre>{escape(as_overrides(lines))}</pre>"


def html(report: AuditReport, title: str, picture: bytes | None) -> str:
    """The page; a PNG `picture` lies inside it."""
    advice = report.advice
    parts = [
        f"<h1>Audit of {escape(title)}</h1>",
        f'<p class="verdict {advice.kind}">{escape(advice.verdict)}</p>',
        _list((*advice.reasons, BASIS)),
        "<h2>For the recipe</h2><p>In place of what it says of these keys:</p>",
        _lines(advice.yaml),
    ]
    if advice.alternative:
        parts += ["<p>Or bypass, with a clip range above the noise:</p>", _lines(advice.alternative)]
    parts += ["<h2>Measured</h2>", _list(facts(report))]
    if picture is not None:
        source = base64.b64encode(picture).decode("ascii")
        picture_tag = f'<img alt="The gap by step" src="data:image/png;base64,{source}">'
        parts.append(f'<div class="scroll">{picture_tag}</div>')
    parts += [
        "<h2>By step</h2><small>delta log p, in nats a latent element</small>",
        _table(STEP_HEADER, map(step_row, report.steps)),
        f"<h2>Weights without a cap</h2><small>{SCALE_NOTE}</small>",
        _table(SCALE_HEADER, map(scale_row, report.scales)),
        "<h2>Presets at their own thresholds</h2>",
        _table(PRESET_HEADER, map(preset_row, report.presets)),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Audit of {escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def draw(report: AuditReport, path: Path) -> bool:
    """Draw the gap by step beside the clip range, and what presets reject, if any do; False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    acting = [outcome for outcome in report.presets if outcome.rejected_samples > 0]
    figure = Figure(figsize=(11 if acting else 5.5, 4.2), dpi=110, layout="constrained")
    panels = figure.subplots(1, 2 if acting else 1, squeeze=False)[0]
    _draw_gap(panels[0], report)
    if acting:
        _draw_rejection(panels[1], acting)
    figure.savefig(path)
    return True


def _draw_gap(axes: Any, report: AuditReport) -> None:
    positions = range(len(report.steps))
    for place, level in enumerate(QUANTILES):
        sizes = [step.abs_delta[place] for step in report.steps]
        axes.plot(positions, sizes, "o-", label=f"|delta log p|, {level:.0%}")
    needed = [step.clip_needed for step in report.steps]
    axes.plot(positions, needed, "k^--", label="clip range that bypass needs")
    if report.clip_limit is not None:
        limits = [limit_at(report.clip_limit, step.step_index) for step in report.steps]
        axes.plot(positions, limits, "_-", color="tab:red", label="clip range")
    axes.set_xticks(positions, [f"{step.step_index}\nσ {step.sigma:.2f}" for step in report.steps])
    if all(step.abs_delta[0] > 0 for step in report.steps):
        axes.set_yscale("log")
    axes.set(xlabel="step of the schedule", ylabel="nats a latent element", title="The gap by step")
    axes.legend(fontsize=8)


def _draw_rejection(axes: Any, acting: Sequence[PresetOutcome]) -> None:
    shares = [100 * outcome.rejected_samples for outcome in acting]
    axes.barh([outcome.name for outcome in acting], shares)
    axes.invert_yaxis()
    axes.set(xlabel="% of samples", xlim=(0, 100), title="Rejected, at each preset's own band")
    axes.tick_params(axis="y", labelsize=8)


def _list(lines: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'
