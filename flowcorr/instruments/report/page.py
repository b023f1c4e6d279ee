"""Runs on one page: did they learn, which rules did they break, and their curves, times and images."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flowcorr.health.finding import LEVELS, Finding
from flowcorr.health.rules import examine_run, is_step, matters
from flowcorr.health.table import rules_of
from flowcorr.instruments.outcome import Charts, Column, Fact, Report, Table, on_files
from flowcorr.instruments.report.charts import chart_sections, legend, marks
from flowcorr.instruments.report.learning import CHANGES, Change, learning_of
from flowcorr.instruments.report.pictures import pictures
from flowcorr.instruments.report.runs import Group, Run, differences, group_by_seed, read_run
from flowcorr.instruments.rollout_workers import places_of, worker_table
from flowcorr.trainer.run_folder import resume_command

_HEADLINES = ("eval/reward", "eval/exact_match", "reward/mean")
_BROKEN = {"serious": "serious finding", "warning": "warning"}  # by level


def report(folders: Sequence[Path], *, allow_imports: Collection[str] = ()) -> Report:
    """The report on one or more runs; runs that differ by seed only are drawn as one, with a band.

    Args:
        folders: the runs' folders.
        allow_imports: names of losses and rejection modes of the runs' own, `package.module:name`, that may be
            imported; nothing else of a run is.

    Raises:
        ConfigError: a folder holds no run, or a file cannot be read.
    """
    different = {os.path.realpath(folder): folder for folder in folders}
    groups = group_by_seed([read_run(folder, allow_imports=allow_imports) for folder in different.values()])
    runs = [run for group in groups for run in group.runs]
    learned = [learning_of(run) for run in runs]
    of_runs = [
        (run.name, finding) for group in groups for run in group.runs for finding in _findings(run, group)
    ]
    findings = [finding for _, finding in (*learned, *of_runs)]
    workers = [
        worker_table(run.name, run.records, places_of(run.folder), place) for place, run in enumerate(runs)
    ]
    return Report(
        title=" · ".join(group.label for group in groups),
        verdict=_verdict([change for change, _ in learned], of_runs),
        facts=_facts(groups),
        tables=[
            _summary(groups),
            *(table for table in workers if table.rows),
            *([_differences(groups)] if len(groups) > 1 else []),
        ],
        charts=[*chart_sections(groups), *_images(groups)],
        findings=sorted(findings, key=lambda finding: LEVELS.index(finding.level)),
    )


def _facts(groups: Sequence[Group]) -> list[Fact]:
    """Number of runs, models and dates."""
    runs = [run for group in groups for run in group.runs]
    models = sorted({path for run in runs if (path := run.settings.get("model.path")) is not None})
    dates = sorted({run.started for run in runs if run.started})
    text = "; ".join(
        filter(
            None,
            [
                f"{_plural(len(runs), 'run')} in {_plural(len(groups), 'configuration')}",
                f"model {', '.join(models)}" if models else "",
                f"started {dates[0]}" + (f" to {dates[-1]}" if len(dates) > 1 else "") if dates else "",
            ],
        )
    )
    return [
        Fact(name="runs", value=len(runs), text=text),
        Fact(name="models", value=models),
        Fact(name="started", value=dates),
    ]


def _verdict(changes: Sequence[Change], findings: Sequence[tuple[str, Finding]]) -> str:
    """Whether the runs learned, how many rules they broke, and the worst finding.

    Args:
        changes: of the held-out reward, by run.
        findings: names of runs, and their other findings.
    """
    if len(changes) == 1:
        told = {"unknown": "whether it learned cannot be told"}.get(
            changes[0], f"the held-out reward {changes[0]}"
        )
    else:
        counted = [(changes.count(change), change) for change in CHANGES if change in changes]
        told = "held-out reward: " + ", ".join(
            f"{change} in {_plural(count, 'run')}" for count, change in counted
        )
    levels = [finding.level for _, finding in findings]
    counts = {noun: levels.count(level) for level, noun in _BROKEN.items() if level in levels}
    if not counts:
        return f"{told}; no rule was broken"
    name, first = min(findings, key=lambda of_run: LEVELS.index(of_run[1].level))
    told += "; " + " and ".join(_plural(count, noun) for noun, count in counts.items())
    told += ", the worst" if sum(counts.values()) > 1 else ""
    return f"{told}{f' in {name}' if len(changes) > 1 else ''}: {first.sentence}"


# Findings ------------------------------------------------------------------------------------------------------


def _findings(run: Run, group: Group) -> Iterator[Finding]:
    rules, places = rules_of(group.rows), places_of(run.folder)
    broken = examine_run(run.records, group.units, rules, places=places, by_step=run.units)
    findings = [*run.faults, *(finding for finding in broken if matters(finding, run.faults))]
    if run.ending:
        findings.insert(0, _ending(run))
    elif not any(map(is_step, run.records)):
        text = "no training step was logged, so there is nothing to judge"
        findings.append(Finding(level="note", cause="steps", sentence=text))
    elif not findings:
        text = "no rule was broken"
        if run.setting.correction.mode == "off":
            text += "; without rollout_correction, the gap was not measured"
        mode = {"correction": run.setting.correction.mode}
        findings.append(Finding(level="healthy", cause="rules", sentence=text, numbers=mode))
    findings += on_files(run.notes)
    for finding in findings:
        yield replace(finding, numbers={"run": run.name, **finding.numbers})


def _ending(run: Run) -> Finding:
    planned = None if run.config is None else run.config.trainer.total_steps
    return Finding(
        level="serious" if run.failed else "note",
        cause="ending",
        sentence=f"the run {run.ending}",
        numbers={"last logged step": run.last_step, "of": planned},
        remedy=f"if it is not running, continue it with `{resume_command(run.folder)}`",
    )


# Tables --------------------------------------------------------------------------------------------------------


def _summary(groups: Sequence[Group]) -> Table:
    headlines = [name for name in _HEADLINES if any(group.band(name) for group in groups)]
    note = "first to last value"
    if max(len(group.runs) for group in groups) > 1:
        note += "; with several seeds their mean, and in brackets the smallest and largest last one"
    if any(len({run.last_step for run in group.runs}) > 1 for group in groups):
        note += "; last values are of the seeds that got furthest"
    return Table(
        name="summary",
        title="Summary",
        note=note,
        columns=[
            Column(name="runs", words=True),
            Column(name="correction", words=True),
            Column(name="steps"),
            *(Column(name=name) for name in headlines),
        ],
        rows=[
            (
                f"{mark} {group.label}" if mark and mark != group.label else group.label,
                group.runs[0].correction,
                _range(sorted({run.last_step for run in group.runs})),
                *(_change(group, name) for name in headlines),
            )
            for group, mark in zip(groups, marks(groups), strict=True)
        ],
    )


def _range(steps: Sequence[int]) -> str:
    return f"{steps[0]}–{steps[-1]}" if len(steps) > 1 else f"{steps[0]}"


def _change(group: Group, metric: str) -> str | None:
    band = group.band(metric)
    if not band:
        return None
    first, (_, mean, low, high) = band[0][1], band[-1]
    spread = f" ({low:.3g} to {high:.3g})" if len(group.runs) > 1 else ""
    return f"{first:.3g} → {mean:.3g}{spread}"


def _differences(groups: Sequence[Group]) -> Table:
    rows: list[tuple[Any, ...]] = [(key, *values) for key, values in differences(groups).items()]
    return Table(
        name="configuration",
        title="Configuration: what differs",
        columns=[
            Column(name="key", words=True),
            *(Column(name=mark, heading=name, words=True) for mark, name, _ in legend(groups)),
        ],
        rows=rows,
    )


def _images(groups: Sequence[Group]) -> Iterator[Charts]:
    seeds = max(len(group.runs) for group in groups) > 1
    for group in groups:
        shown = pictures(group.runs[0])
        if shown:
            yield Charts(
                title=f"Pictures, {group.runs[0].name}",
                text="Of runs that differ by seed only, the images of the first one." if seeds else "",
                pictures={picture.title: picture for picture in shown},
                wide=True,
            )


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
