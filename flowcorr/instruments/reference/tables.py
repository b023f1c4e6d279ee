"""Everything that `flowcorr explain` knows, as Markdown tables: `flowcorr explain --all`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import flowcorr
from flowcorr.correction import PRESETS, RolloutCorrectionConfig
from flowcorr.correction.modes import RS_MODES
from flowcorr.health import image_drift, jumps, replicas
from flowcorr.health.metric import Metric
from flowcorr.health.rule import Rule, Units
from flowcorr.health.table import METRICS, SECTIONS, progress_labels
from flowcorr.instruments.doctor.checks import CAUSES, CHECKS
from flowcorr.instruments.fault_words import FAULTS
from flowcorr.instruments.reference.glossary import SYNONYMS, WATCHED, WORDS, Watched
from flowcorr.instruments.reference.interfaces import INTERFACES, rows_of
from flowcorr.instruments.reference.keys import keys

OF_SEVERAL_STEPS: Mapping[str, Rule] = {
    rule.name: rule for rule in (image_drift.RULE, jumps.RULE, jumps.RISE, replicas.RULE)
}
"""Findings that need several training steps, by their name."""


def everything() -> str:
    """All tables, each below a heading."""
    tables = [f"## {heading}\n\n{_table(*table)}" for heading, table in _tables()]
    return "\n\n".join([f"# The words of flowcorr {flowcorr.__version__}", *tables])


def healthy(metric: Metric) -> str:
    """The healthy range of a metric; empty if no rule judges it by a number alone."""
    if metric.rule is None:
        return ""
    low, high = metric.rule.limits(Units())
    bounds = [f"≥ {low:.3g}"] * (low > -float("inf")) + [f"≤ {high:.3g}"] * (high < float("inf"))
    return ", ".join(bounds)


def stops(metric: Metric) -> str:
    """From which value on a training run stops, in words; empty where it never does."""
    fault = math.inf if metric.rule is None else metric.rule.fault
    if callable(fault):
        return "beyond a multiple of its limit that depends on the run"
    if math.isinf(fault):
        return ""
    return "beyond its limit" if fault == 1 else f"beyond {fault:g} times its limit"


_Table = tuple[Sequence[str], Iterable[Sequence[str]]]


def _tables() -> Iterator[tuple[str, _Table]]:
    """Heading, header and rows of each table."""
    for section, rows in _keys().items():
        yield f"Keys of `{section}`", (("key", "meaning", "values", "default"), rows)
    for section, metrics in SECTIONS.items():
        rows = [_metric(metric) for metric in metrics]
        yield (
            f"Metrics: {section.lower()}",
            (("metric", "meaning", "unit", "healthy", "stops a run", "finding", "outside"), rows),
        )
    labels = [(label, f"`{name}`") for name, label in progress_labels(METRICS).items()]
    yield "Labels of `flowcorr train` after each step", (("label", "metric"), labels)
    yield "Presets", (("preset", "aliases", "mode", "what it does", "keys"), _presets())
    modes = [(f"`{name}`", mode.level, mode.bounds.threshold) for name, mode in RS_MODES.items()]
    yield "Rejection modes", (("mode", "judges each", "threshold"), modes)
    samples = ("on samples of the engine", "on samples of a dump")
    yield "Checks of `flowcorr doctor`", (("check", *samples, "skipped where one of these fails"), _checks())
    causes = [(f"`{name}`", meaning) for name, meaning in CAUSES.items()]
    yield "Causes that `flowcorr doctor` names in a dump", (("cause", "meaning"), causes)
    faults = [(f"`{name}`", fault.meaning) for name, fault in FAULTS.items()]
    yield "Faults of log-probs, in audit, report and watch", (("fault", "meaning"), faults)
    several = [(f"`{name}`", rule.what, rule.advice) for name, rule in OF_SEVERAL_STEPS.items()]
    yield "Findings of several training steps", (("finding", "about", "what to do"), several)
    yield "Words", (("word", "meaning", "worry", "what to do", "metrics"), _words())
    for name in INTERFACES:
        rows = [(f"`{field}`", meaning, _code(default)) for field, meaning, default in rows_of(name)]
        yield f"`{name}`", (("name", "meaning", "default"), rows)


def _keys() -> dict[str, list[tuple[str, ...]]]:
    sections: dict[str, list[tuple[str, ...]]] = {}
    for key in keys():
        row = (f"`{key.name}`", key.meaning, _code(key.choices), _code(key.default))
        sections.setdefault(key.name.rpartition(".")[0], []).append(row)
    return sections


def _metric(metric: Metric) -> tuple[str, ...]:
    finding, advice = (metric.rule.name, metric.rule.advice) if metric.rule else ("", "")
    limits = healthy(metric), stops(metric)
    return f"`{metric.name}`", metric.meaning, metric.unit, *limits, _code(finding), advice


def _presets() -> Iterator[tuple[str, ...]]:
    for name, preset in PRESETS.items():
        aliases = ", ".join(_code(alias) for alias in preset.aliases)
        values = ", ".join(_code(f"{key}: {value}") for key, value in preset.keys.items())
        yield f"`{name}`", aliases, RolloutCorrectionConfig.from_preset(name).mode, preset.summary, values


def _checks() -> Iterator[tuple[str, ...]]:
    for check in CHECKS:
        yield f"`{check.name}`", check.trials, check.captured, ", ".join(map(_code, check.blockers))


def _words() -> Iterator[tuple[str, ...]]:
    for name, meaning in WORDS.items():
        names = [name, *(synonym for synonym, of in SYNONYMS.items() if of == name)]
        watched = WATCHED.get(name, Watched(metrics=()))
        metrics = ", ".join(map(_code, watched.metrics))
        yield ", ".join(map(_code, names)), meaning, watched.worry, watched.remedy, metrics


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in lines)
