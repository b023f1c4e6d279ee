"""Runs on one page: `write_report` makes a single HTML file without scripts, which loads nothing from anywhere.

On request its charts lie beside it as PNG files, for where a page cannot go.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from flowcorr.diagnostics.health import examine_run, is_step
from flowcorr.diagnostics.measured import measure_apart
from flowcorr.diagnostics.replicas import places_of, worker_rows
from flowcorr.diagnostics.report.charts import ChartSection, chart_sections, colours, marks
from flowcorr.diagnostics.report.learning import Change, Learning, learning_of
from flowcorr.diagnostics.report.pictures import pictures
from flowcorr.diagnostics.report.runs import Group, Run, differences, group_by_seed, read_run
from flowcorr.errors import ConfigError
from flowcorr.instruments.page import render, save_charts, write
from flowcorr.trainer.run_folder import resume_command

_HEADLINES = ("eval/reward", "eval/exact_match", "reward/mean")
_LEVELS = ("serious", "warning", "note", "healthy")
_LEARNED: Mapping[Change, str] = {
    "rose": "healthy",
    "did not move": "warning",
    "fell": "serious",
    "unknown": "note",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """How a group of runs is shown.

    Attributes:
        label: its name.
        mark: what stands at the end of its lines, see `charts.marks`.
        colour: of its lines.
    """

    label: str
    mark: str
    colour: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The report on some runs.

    Attributes:
        level: `healthy`, `note`, `warning` or `serious`.
        runs: their names.
        message: a sentence without its full stop.
        where: at which steps.
        advice: what to do, another sentence.
        metric: that was judged.
        command: that continues the run.
    """

    level: str
    runs: str
    message: str
    where: str = ""
    advice: str = ""
    metric: str = ""
    command: str = ""


def write_report(
    folders: Sequence[Path],
    out: Path,
    *,
    charts: Path | None = None,
    allow_imports: Collection[str] = (),
) -> Path:
    """Write the page of one or more runs; runs that differ by seed only are drawn as one, with a band.

    Args:
        folders: the runs' folders.
        out: the file; its folder is made.
        charts: a folder that gets every chart as PNG, or None for none.
        allow_imports: names of losses and rejection modes of the runs' own, `package.module:name`, that may be
            imported; nothing else of a run is.

    Raises:
        ConfigError: a folder holds no run, or a file cannot be read or written.
    """
    different = {os.path.realpath(folder): folder for folder in folders}
    groups = group_by_seed([read_run(folder, allow_imports=allow_imports) for folder in different.values()])
    sections = chart_sections(groups)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write(out, report_page(groups, sections))
        if charts is not None:
            note = "; ".join(f"{key.mark}: {key.label}" for key in _keys(groups) if key.mark != key.label)
            for section in sections:
                save_charts(
                    section.charts, charts, note=note if section.has_curves and len(groups) > 1 else ""
                )
    except OSError as error:
        raise ConfigError(
            f"--out {out} cannot be written ({error.strerror or error}); name another file"
        ) from error
    return out


def report_page(groups: Sequence[Group], sections: Sequence[ChartSection]) -> str:
    """The page as HTML text."""
    keys = _keys(groups)
    seeds = max(len(group.runs) for group in groups) > 1
    headlines = [name for name in _HEADLINES if any(group.band(name) for group in groups)]
    runs = [run for group in groups for run in group.runs]
    learned = [learning_of(run) for run in runs]
    findings = _findings(groups)
    of_learning = [
        Finding(level=_LEARNED[one.change], runs=run.name, message=one.text)
        for run, one in zip(runs, learned, strict=True)
    ]
    return render(
        "report.html",
        title=" · ".join(key.label for key in keys),
        facts=_facts(groups),
        level=min((finding.level for finding in [*of_learning, *findings]), key=_LEVELS.index),
        verdict=_verdict(learned, findings),
        keys=keys,
        headlines=headlines,
        summary=[_summary_row(group, key, headlines) for group, key in zip(groups, keys, strict=True)],
        summary_note=_summary_note(groups),
        findings=[*of_learning, *findings],
        sections=sections,
        measured=[
            {"name": group.runs[0].name, **run}
            for group in groups
            if (run := measure_apart(group.runs[0].folder)) is not None
        ],
        workers=[
            {"name": run.name, "rows": rows}
            for run in runs
            if (rows := worker_rows(run.records, places_of(run.folder)))
        ],
        pictures=[
            {"name": group.runs[0].name, "pictures": found}
            for group in groups
            if (found := pictures(group.runs[0]))
        ],
        images_note="Of runs that differ by seed only, the images of the first one." if seeds else "",
        differences=differences(groups),
    )


def _keys(groups: Sequence[Group]) -> list[Key]:
    return [
        Key(label=group.label, mark=mark, colour=colour)
        for group, mark, colour in zip(groups, marks(groups), colours(groups), strict=True)
    ]


def _facts(groups: Sequence[Group]) -> str:
    """Number of runs, models and dates, in a line."""
    runs = [run for group in groups for run in group.runs]
    models = sorted({path for run in runs if (path := run.settings.get("model.path")) is not None})
    dates = sorted({run.started for run in runs if run.started})
    facts = [
        _plural(len(runs), "run"),
        _plural(len(groups), "configuration"),
        f"model {', '.join(models)}" if models else "",
        f"started {dates[0]}" + (f" to {dates[-1]}" if len(dates) > 1 else "") if dates else "",
    ]
    return "; ".join(filter(None, facts))


def _verdict(learned: Sequence[Learning], findings: Sequence[Finding]) -> str:
    """Whether the runs learned, how many rules they broke, and the worst finding."""
    changes = [one.change for one in learned]
    if len(changes) == 1:
        told = {"unknown": "whether it learned cannot be told"}.get(
            changes[0], f"the held-out reward {changes[0]}"
        )
    else:
        counted = [(changes.count(change), change) for change in _LEARNED if change in changes]
        told = "held-out reward: " + ", ".join(f"{change} in {count} runs" for count, change in counted)
    broken = [
        (level, sum(finding.level == level for finding in findings)) for level in ("serious", "warning")
    ]
    counts = ", ".join(f"{count} of level {level}" for level, count in broken if count)
    if not counts:
        return f"{told}; no rule was broken"
    worst = min(findings, key=lambda finding: _LEVELS.index(finding.level))
    return f"{told}; findings: {counts}; first of all, {worst.runs}: {worst.message}"


# Summary and health --------------------------------------------------------------------------------------------


def _summary_row(group: Group, key: Key, headlines: Sequence[str]) -> dict[str, Any]:
    last = sorted({run.last_step for run in group.runs})
    return {
        "key": key,
        "correction": group.config.algorithm.rollout_correction.label,
        "steps": f"{last[0]}–{last[-1]}" if len(last) > 1 else f"{last[0]}",
        "changes": [_change(group, metric) for metric in headlines],
    }


def _summary_note(groups: Sequence[Group]) -> str:
    note = "First to last value; with several seeds their mean, and in brackets the smallest and largest last one."
    if any(len({run.last_step for run in group.runs}) > 1 for group in groups):
        note += " Last values are of the seeds that got furthest."
    return note


def _change(group: Group, metric: str) -> str:
    band = group.band(metric)
    if not band:
        return "–"
    first, (_, mean, low, high) = band[0][1], band[-1]
    spread = f" ({low:.3g} to {high:.3g})" if len(group.runs) > 1 else ""
    return f"{first:.3g} → {mean:.3g}{spread}"


def _findings(groups: Sequence[Group]) -> list[Finding]:
    """Healthy runs first, then what is to be said about the others."""
    found = [finding for group in groups for run in group.runs for finding in _findings_of(run, group)]
    healthy = [finding for finding in found if finding.level == "healthy"]
    alike = groupby(sorted(healthy, key=lambda finding: finding.message), lambda finding: finding.message)
    return [
        *(
            Finding(level="healthy", message=message, runs=", ".join(finding.runs for finding in same))
            for message, same in alike
        ),
        *(finding for finding in found if finding.level != "healthy"),
    ]


def _findings_of(run: Run, group: Group) -> Iterator[Finding]:
    steps = sum(map(is_step, run.records))
    if run.ending:
        yield Finding(
            level="serious" if run.failed else "note",
            runs=run.name,
            message=f"the run {run.ending}",
            where=f"last logged step {run.last_step} of {run.config.trainer.total_steps}",
            command=resume_command(run.folder),
        )
    for note in run.notes:
        yield Finding(level="note", runs=run.name, message=note)
    for diagnosis in run.diagnoses:
        yield Finding(
            level=diagnosis.level,
            runs=run.name,
            message=diagnosis.verdict,
            where=diagnosis.evidence,
            advice=diagnosis.remedy,
        )
    broken = examine_run(run.records, group.units, places_of(run.folder))
    for finding in broken:
        if run.diagnoses and finding.level == "note":  # noise is no news beside a fault
            continue
        yield Finding(
            level=finding.level,
            runs=run.name,
            message=finding.message,
            where=f"worst at step {finding.step}; on {finding.num_steps} of {_plural(steps, 'step')}",
            advice=finding.advice,
            metric=finding.metric,
        )
    if run.failed:
        return
    if not steps:
        text = "no training step was logged, so there is nothing to judge"
        yield Finding(level="note", runs=run.name, message=text)
    elif not broken and not run.diagnoses:
        text = "no rule was broken"
        if run.config.algorithm.rollout_correction.mode == "off":
            text += "; without rollout_correction, the gap was not measured"
        yield Finding(level="healthy", runs=run.name, message=text)


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
