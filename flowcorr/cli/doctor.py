"""A doctor's report on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from flowcorr.instruments.clip_noise import QUANTILES, clip_text
from flowcorr.instruments.doctor.findings import DoctorReport, Finding, Status
from flowcorr.instruments.terminal import Cell, console_of, show_table

STYLES: dict[Status, str] = {"PASS": "green", "WARN": "yellow", "FAIL": "bold red", "SKIP": "dim"}
_VERDICTS = {
    0: "rollout engine and actor agree",
    1: "rollout engine and actor agree, with remarks",
    2: "rollout engine and actor do not agree",
}


def show_report(report: DoctorReport, console: Console | None = None) -> None:
    """Print all findings, what to do about them, and the noise floor."""
    console = console_of(console)
    columns = ("", "check", "number", "threshold", "what was found")
    show_table(console, columns, map(_finding, report.findings), words=2, prose=True)
    _show_noise_floor(console, report)
    console.print(f"the rollout makes {report.images_per_second:.3g} images a second", markup=False)
    counts = ", ".join(f"{report.count(status)} {status}" for status in STYLES if report.count(status))
    gap = _precision_gap(report)
    if report.exit_code == 0 and gap > 0:
        verdict = (
            f"no fault found: {counts}. What is left is the gap of precision (velocities differ by {100 * gap:.2g} %); "
            "flowcorr audit measures it"
        )
    else:
        verdict = f"{_VERDICTS[report.exit_code]}: {counts}"
    console.print(verdict, markup=False)


def _precision_gap(report: DoctorReport) -> float:
    """The relative gap of both stacks' velocities; 0 where both compute in float32."""
    found = {finding.check: finding for finding in report.findings}
    return found["weights"].value or 0.0 if "float32" in found else 0.0


def _finding(finding: Finding) -> tuple[Cell, ...]:
    status = Text(finding.status, STYLES[finding.status])
    return status, finding.check, _number(finding.value), _number(finding.threshold), _message(finding)


def _message(finding: Finding) -> Text:
    text = Text(finding.message, "dim" if finding.status == "SKIP" else "")
    if finding.remedy:
        text.append(f"\n-> {finding.remedy}", "bold")
    return text


def _show_noise_floor(console: Console, report: DoctorReport) -> None:
    title = (
        f"noise floor before any update, nats a latent element; D = {report.num_elements}, "
        f"clip range {clip_text(report.clip_ratio)}"
    )
    quantiles = [f"|delta log p| {quantile:.0%}" for quantile in QUANTILES]
    rows = [
        (
            f"{step.step_index}",
            f"{step.sigma:.3f}",
            *(f"{number:.1e}" for number in (*step.abs_delta, step.exact_kl)),
            f"{step.outside_clip:.0%}",
        )
        for step in report.noise
    ]
    show_table(console, ("step", "sigma", *quantiles, "exact KL", "outside clip"), rows, title=title)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
