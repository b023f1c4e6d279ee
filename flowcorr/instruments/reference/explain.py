"""The explanation of one name that a tool prints, from the tables of the tools themselves."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator
from pkgutil import resolve_name
from typing import Any

from flowcorr.correction import RolloutCorrectionConfig
from flowcorr.correction.modes import RS_MODES
from flowcorr.correction.presets import NAMES
from flowcorr.errors import ConfigError, shortened
from flowcorr.health.metric import Metric
from flowcorr.health.table import (
    METRICS,
    RULES,
    find_metric,
    own_row,
    progress_labels,
)
from flowcorr.imports import import_target
from flowcorr.instruments.doctor.checks import CAUSES, CHECKS
from flowcorr.instruments.fault_words import FAULTS
from flowcorr.instruments.reference.glossary import SYNONYMS, WATCHED, WORDS, find_word
from flowcorr.instruments.reference.interfaces import INTERFACES, find_interface, rows_of
from flowcorr.instruments.reference.keys import find_key, keys
from flowcorr.instruments.reference.tables import OF_SEVERAL_STEPS, healthy, stops
from flowcorr.losses import LOSSES

_BY_LABEL = {label: name for name, label in progress_labels(METRICS).items()}
_TYPES = ("null", "true", "false", "integer", "number", "text", "mapping")
_CHECKS = {check.name: check for check in CHECKS}
_RULES = {rule.name: rule.metric for rule in RULES}


def explanation(name: str) -> str:
    """The meaning of a name in a few lines, one paragraph for each sense that it has.

    Raises:
        ConfigError: nothing has that name, or a name of one's own cannot be imported.
    """
    senses = [_own(name)] if ":" in name else list(_senses(name)) or list(_values(name))
    if not senses:
        near = difflib.get_close_matches(name, _known(), n=3, cutoff=0.5)
        hint = f": did you mean {', '.join(near)}?" if near else "."
        raise ConfigError(
            f"{shortened(name)!r} is not a metric, configuration key, preset, check, cause or word of the tools{hint} "
            "`flowcorr explain --all` prints every name; a metric of your own is explained after its module, as "
            f"my_module:{shortened(name)}"
        )
    return "\n\n".join("\n".join(lines) for lines in senses)


def _senses(name: str) -> Iterator[Iterator[str]]:
    """The lines on each thing of that name."""
    if (word := find_word(name)) is not None:
        yield _word(word)
    if name in NAMES:
        yield _preset(name)
    if (key := find_key(name)) is not None:
        yield iter(
            (
                f"{key.name} (configuration key)",
                f"  {key.meaning}",
                f"  values: {key.choices}; default: {key.default}",
            )
        )
    if (metric := find_metric(name)) is not None:
        yield _metric(name, metric)
    else:
        if name in _BY_LABEL:
            yield _labelled(name)
        ending = [metric for metric in METRICS if metric.name.endswith(f"/{name}")]
        for metric in ending:
            if metric.name != _BY_LABEL.get(name):
                yield _metric(metric.name, metric)
    if name in _RULES or name in OF_SEVERAL_STEPS:
        yield _rule(name)
    if name in _CHECKS:
        yield _check(name)
    if name in FAULTS:
        yield iter(
            (
                f"{name} (fault of log-probs, in audit, report and watch)",
                f"  {FAULTS[name].meaning}",
                "  worry: always: the finding has its numbers, and says what to do",
            )
        )
    if name in CAUSES:
        yield iter(
            (
                f"{name} (cause that flowcorr doctor names in a dump)",
                f"  {CAUSES[name]}",
                "  worry: always: such samples teach something else; the report has the remedy behind `->`",
            )
        )
    if name in RS_MODES and word is None:
        yield _mode(name)
    if (interface := find_interface(name)) is not None:
        yield _interface(interface)


def _values(name: str) -> Iterator[Iterator[str]]:
    """The lines on each key that takes this name as a value, such as `cps`."""
    for key in keys():
        choices = LOSSES if key.name == "actor.loss_mode" else key.choices.split(" | ")
        if name in choices and name not in _TYPES:
            yield iter((f"{name} (value of {key.name})", f"  {key.meaning}"))


def _own(path: str) -> Iterator[str]:
    """A row of metrics by its parts, another row by its fields, anything else by its docstring.

    After `module:` a metric has the name of its variable, or one that tools print: its own, its label or its rule's.
    """
    module, _, name = path.partition(":")
    members = import_target("flowcorr explain", f"{module}:__dict__", "code of your own")
    printed = [
        variable
        for variable, value in members.items()
        if isinstance(value, Metric)
        and name in (value.name, value.name.rpartition("/")[2], value.label, value.rule and value.rule.name)
    ]
    path = path if name in members else f"{module}:{printed[0]}" if printed else path
    target = import_target("flowcorr explain", path, "it")
    if isinstance(target, Metric):
        row = own_row("flowcorr explain", path)
        yield from _metric(row.name, row)
        yield f"  finding: {row.rule.name}" if row.rule is not None else "  no rule judges it"
        return
    kind = next(
        (name for name in INTERFACES if not isinstance(target, type) and type(target) is resolve_name(name)),
        "",
    )
    if kind:
        yield f"{path} (a {kind} of your own)"
        for field, meaning, _ in rows_of(kind):
            value = getattr(target, field)
            yield f"  {field}: {_shown(value)} ({meaning})"
        return
    first_line, _, _ = (inspect.getdoc(target) or "it has no docstring").partition("\n")
    yield f"{path} (code of your own)"
    yield f"  {first_line}"


def _shown(value: Any) -> str:
    """A field's value; a function by its name and the first line of its docstring."""
    if not inspect.isroutine(value):
        return str(value)
    first_line, _, _ = (inspect.getdoc(value) or "").partition("\n")
    return f"{value.__name__}{f', {first_line}' if first_line else ''}"


def _word(name: str) -> Iterator[str]:
    yield f"{name} (word)"
    yield f"  {WORDS[name]}"
    if (watched := WATCHED.get(name)) is None:
        return
    if watched.worry:
        yield f"  worry: {watched.worry}"
        yield f"  do: {watched.remedy}"
    else:
        yield from _watched(watched.metrics[0])
    yield f"  metrics: {', '.join(watched.metrics)}"


def _metric(name: str, metric: Metric) -> Iterator[str]:
    yield f"{name} (metric{f', {metric.unit}' if metric.unit else ''})"
    yield f"  {metric.meaning}"
    if limits := healthy(metric):
        yield f"  healthy: {limits}"
    if metric.rule is not None:
        yield f"  outside: {metric.rule.advice}"
    if stop := stops(metric):
        yield f"  stops a run: {stop} (trainer.on_fault)"


def _labelled(label: str) -> Iterator[str]:
    name = _BY_LABEL[label]
    metric = find_metric(name)
    assert metric is not None, "labels are those of metrics"
    yield f"{label}: the label of {name} after a step of flowcorr train"
    yield from _metric(name, metric)


def _rule(name: str) -> Iterator[str]:
    yield f"{name} (finding of the health rules, in training and in flowcorr report)"
    if name in OF_SEVERAL_STEPS:
        yield f"  {OF_SEVERAL_STEPS[name].what}"
        yield f"  do: {OF_SEVERAL_STEPS[name].advice}"
        return
    metric = find_metric(_RULES[name])
    assert metric is not None, "rules belong to metrics"
    yield from _metric(metric.name, metric)


def _check(name: str) -> Iterator[str]:
    check = _CHECKS[name]
    yield f"{name} (check of flowcorr doctor)"
    for samples, question in (("", check.trials), ("of a dump: ", check.captured)):
        if question:
            yield f"  {samples}{question}"
    yield "  worry: a serious finding stops a run, a warning does not"
    yield "  do: what the report says behind `->`"
    if check.blockers:
        yield f"  skipped where one of these fails: {', '.join(check.blockers)}"


def _mode(name: str) -> Iterator[str]:
    mode = RS_MODES[name]
    yield f"{name} (rejection mode)"
    yield f"  Judges {'each step' if mode.level == 'step' else 'whole samples'}; takes {mode.bounds.threshold}."
    yield from _watched("rollout_corr/rejected_ratio")


def _interface(name: str) -> Iterator[str]:
    yield f"{name} (for code of your own)"
    for field, meaning, default in rows_of(name):
        yield f"  {field}: {meaning}{f' Default: {default}' if default else ''}"


def _preset(name: str) -> Iterator[str]:
    preset, config = NAMES[name], RolloutCorrectionConfig.from_preset(name)
    yield f"{name} (preset, {config.mode} mode)"
    yield f"  {preset.summary}"
    for key, value in preset.keys.items():
        yield f"  algorithm.rollout_correction.{key}: {value}"
    watched = (
        (config.mode == "bypass", "rollout_corr/clip_noise_fraction"),
        (config.applies_weights, "rollout_corr/rollout_is_eff_sample_size"),
        (config.rejects, "rollout_corr/rejected_ratio"),
    )
    acting = [metric for acts, metric in watched if acts]
    for metric in acting or ["rollout_corr/kl"]:
        yield from _watched(metric)


def _watched(name: str) -> Iterator[str]:
    """The healthy range and the advice of a metric of a preset or mode, two lines."""
    metric = find_metric(name)
    assert metric is not None, "a metric of the tables"
    assert metric.rule is not None, "a metric with a rule"
    yield f"  worry: {name} outside {healthy(metric)}"
    yield f"  do: {metric.rule.advice}"


def _known() -> list[str]:
    names = [
        *_BY_LABEL,
        *WORDS,
        *SYNONYMS,
        *NAMES,
        *(key.name for key in keys()),
        *(metric.name for metric in METRICS),
    ]
    names += [metric.name.rpartition("/")[2] for metric in METRICS]
    names += [interface.rpartition(".")[2] for interface in INTERFACES]
    return list(dict.fromkeys([*names, *_CHECKS, *CAUSES, *FAULTS, *_RULES, *OF_SEVERAL_STEPS, *RS_MODES]))
