"""The doctor's reports: verdict, findings in the order of their levels, and the noise floor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from flowcorr.health.finding import LEVELS, Finding, Level
from flowcorr.instruments.doctor.checks.clip import noise_floor
from flowcorr.instruments.doctor.checks.schedule import UNLESS_MEANT
from flowcorr.instruments.doctor.exam import Exam
from flowcorr.instruments.gap_words import percent
from flowcorr.instruments.outcome import Fact, Report, on_files
from flowcorr.rollout.precision import NO_GAP

_COUNTED: Mapping[Level, str] = {"warning": "warnings", "note": "notes"}
"""By level, its word for several findings, where that is another one."""
_INPUTS = ("embeddings", "guidance", "lora")
_BY_STEPS: Sequence[Level] = ("serious", "warning", "healthy", "note")
"""From the worst; a note is of a step that a check could not judge."""


def of_trials(exam: Exam, findings: Sequence[Finding]) -> Report:
    """The report on the engine at hand."""
    config, speed = exam.config, exam.trials.images_per_second
    report = Report(
        title=f"{config.model.path} in {config.rollout.name}",
        verdict="",
        facts=(
            Fact(name="num_elements", value=exam.trials.base.rollout.num_elements),
            Fact(name="clip_ratio", value=config.actor.clip_ratio),
            Fact(name="velocity_gap", value=exam.trials.bare.velocity_gap()),
            Fact(
                name="images_per_second",
                value=speed,
                text=f"the rollout makes {speed:.3g} images a second",
            ),
        ),
        tables=(noise_floor(exam),),
    )
    return with_findings(report, findings)


def with_findings(report: Report, findings: Sequence[Finding]) -> Report:
    """A report on the engine at hand with these findings, and the verdict that follows from them."""
    return replace(report, verdict=_verdict_of_trials(report, findings), findings=_sorted(findings))


def _verdict_of_trials(report: Report, findings: Sequence[Finding]) -> str:
    named: dict[Level, list[str]] = {level: [] for level in LEVELS}
    for finding in findings:
        named[finding.level].append(finding.cause)
    counts = ", ".join(_counted(level, len(causes)) for level, causes in named.items() if causes)
    if named["serious"]:
        return f"FAIL: rollout engine and actor do not agree on {', '.join(named['serious'])}: {counts}"
    if named["warning"]:
        return f"rollout engine and actor agree, with remarks on {', '.join(named['warning'])}: {counts}"
    gap = report.fact("velocity_gap")
    if gap > NO_GAP:
        return (
            f"no fault found: {counts}; what is left is the gap of precision (velocities differ by "
            f"{percent(gap)}), which flowcorr audit measures"
        )
    return f"rollout engine and actor agree: {counts}"


def _counted(level: Level, count: int) -> str:
    return f"{count} {_COUNTED.get(level, level) if count > 1 else level}"


def of_captured(
    folder: str, model: str, by_step: Mapping[int, Mapping[str, Finding]], notes: Sequence[str]
) -> Report:
    """The report on captured samples.

    Args:
        folder: the dump.
        model: its pipeline, which replayed them.
        by_step: the findings by check, of each training step whose samples were replayed.
        notes: what was not captured, a line each.
    """
    findings, steps = _sorted(worst(by_step)), list(by_step)
    text = f"samples of training step {', '.join(map(str, steps))}, replayed with {model}"
    return Report(
        title=text,
        verdict=_verdict_of_captured(findings),
        facts=(
            Fact(name="folder", value=folder),
            Fact(name="model", value=model),
            Fact(name="steps", value=steps, text=text),
        ),
        findings=[*findings, *on_files(notes)],
    )


def _verdict_of_captured(findings: Sequence[Finding]) -> str:
    causes: dict[str, str] = {}  # with the words on a cause that may be a choice
    for finding in findings:
        if finding.level == "serious":
            chosen = finding.numbers.get("confidence") == UNLESS_MEANT and finding.cause not in causes
            causes[finding.cause] = f"{finding.cause} ({UNLESS_MEANT})" if chosen else finding.cause
    if causes:
        return f"at fault: {', '.join(causes.values())}"
    unclear, agree = (
        [finding.cause for finding in findings if finding.level == level] for level in ("warning", "healthy")
    )
    if unclear:
        differ = "differs" if len(unclear) == 1 else "differ"
        return f"{' and '.join(unclear)} {differ} from the replay, and the cause cannot be told"
    if not agree:
        return "nothing can be told from what was captured"
    return f"no fault found in {', '.join(agree)}"


def worst(by_step: Mapping[int, Mapping[str, Finding]]) -> list[Finding]:
    """The worst finding of each check over several training steps; of equal ones, the first.

    A note, from a step that a check could not judge, gives way to a finding of any step that it could. If a step's
    replay differs and no cause explains it, its inputs have no finding; healthy findings on the inputs of other steps
    then become notes, so that they do not seem to speak for all steps.

    Args:
        by_step: by training step, the findings by check.
    """
    of_check: dict[str, dict[int, Finding]] = defaultdict(dict)
    for step, findings in by_step.items():
        for check, finding in findings.items():
            of_check[check][step] = replace(finding, numbers={"step": step, **finding.numbers})
    worst_by_check = {
        check: min(steps.values(), key=lambda finding: _BY_STEPS.index(finding.level))
        for check, steps in of_check.items()
    }
    unclear = {
        step
        for step, findings in by_step.items()
        if any(finding.level == "warning" for finding in findings.values())
    }
    for check in _INPUTS:
        judged, others = {*of_check[check]}, unclear - {*of_check[check]}
        if judged and others and worst_by_check[check].level == "healthy":
            worst_by_check[check] = _of_some_steps(worst_by_check[check], judged, others)
    return list(worst_by_check.values())


def _of_some_steps(finding: Finding, judged: set[int], unclear: set[int]) -> Finding:
    at, others = (", ".join(map(str, sorted(steps))) for steps in (judged, unclear))
    return replace(
        finding,
        level="note",
        sentence=f"{finding.sentence} at training step {at}; not judged at {others}, where the replay differs",
        numbers={**finding.numbers, "judged": sorted(judged), "not_judged": sorted(unclear)},
    )


def _sorted(findings: Sequence[Finding]) -> list[Finding]:
    """Sort findings: the worst first, each level in the order of the checks, and mere pointers to others last."""

    def order(finding: Finding) -> tuple[int, bool]:
        return LEVELS.index(finding.level), finding.level == "serious" and not finding.remedy

    return sorted(findings, key=order)
