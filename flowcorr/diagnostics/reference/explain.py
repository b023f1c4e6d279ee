"""The explanation of one name: a metric, a configuration key or a preset."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from flowcorr.correction import RolloutCorrectionConfig
from flowcorr.correction.presets import NAMES
from flowcorr.diagnostics.reference.keys import find_key, keys
from flowcorr.diagnostics.reference.metrics import METRICS, PROGRESS_LABELS, find_metric
from flowcorr.diagnostics.reference.pages import healthy
from flowcorr.errors import ConfigError

_DRIFT_ADVICE = (
    "find the cause with `flowcorr doctor`; inside, clip_noise_fraction says whether the gap matters"
)
_BY_LABEL = {label: name for name, label in PROGRESS_LABELS.items()}


def explanation(name: str) -> str:
    """The meaning of a name in a few lines.

    Raises:
        ConfigError: nothing has that name.
    """
    return "\n".join(_lines(name))


def _lines(name: str) -> Iterator[str]:
    if name in NAMES:
        yield from _preset(name)
    elif (key := find_key(name)) is not None:
        yield f"{key.name} (configuration key)"
        yield f"  {key.meaning}"
        yield f"  values: {key.choices}; default: {key.default}"
    elif (metric := find_metric(name)) is not None:
        yield f"{name} (metric{f', {metric.unit}' if metric.unit else ''})"
        yield f"  {metric.meaning}"
        if limits := healthy(metric):
            yield f"  healthy at log_ratio_scale mean: {limits}"
        if metric.rule is not None:
            yield f"  outside: {metric.rule.advice}"
        elif limits:
            yield f"  outside: {_DRIFT_ADVICE}"
    elif (metric_name := _BY_LABEL.get(name)) is not None:
        yield f"{name}: the label of {metric_name} after a step of flowcorr train"
        yield from _lines(metric_name)
    else:
        known = [*_BY_LABEL, *NAMES, *(key.name for key in keys())]
        known += [metric.name for metric in METRICS]
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        hint = f": did you mean {', '.join(near)}?" if near else "."
        raise ConfigError(
            f"{name!r} is not a metric, configuration key or preset{hint} The tables are in "
            "flowcorr/diagnostics/README.md, recipes/README.md and flowcorr/correction/README.md"
        )


def _preset(name: str) -> Iterator[str]:
    preset, config = NAMES[name], RolloutCorrectionConfig.preset(name)
    yield f"{name} (preset, {config.mode} mode)"
    yield f"  {preset.summary}"
    for key, value in preset.keys.items():
        yield f"  algorithm.rollout_correction.{key}: {value}"
