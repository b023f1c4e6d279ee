"""Thresholds and the scale of log-ratios: from the user's notation to numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

from flowcorr.correction.modes import OUTLIER_Z, RS_MODES, Mode
from flowcorr.errors import BatchError, ConfigError, unknown_choice
from flowcorr.imports import import_target

if TYPE_CHECKING:
    from torch import Tensor

SECTION = "algorithm.rollout_correction"
IS_LEVELS = ("token", "sequence", "geometric")
RS_ALIASES = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
SCALES = ("mean", "sqrt", "sum")
AUTO = "auto"  # a threshold that is measured
_IDLE = 10.0  # times that a bound lies beyond the largest value, so that it cannot act

Band = tuple[float, float]
Threshold = float | Band | str | Sequence[object]


@dataclass(frozen=True, slots=True)
class Criterion:
    """One rejection mode with its bounds: a step or sample is kept while `lower <= value <= upper`.

    Attributes:
        name: of the mode, as metrics are named.
        mode: the divergence.
        lower: for a band of ratios, `-log` of the largest ratio; else `-inf`.
        upper: for a band of ratios, `-log` of the smallest ratio; else the largest value.
        auto: whether the bounds are measured; infinite until then.
    """

    name: str
    mode: Mode
    lower: float | Tensor
    upper: float | Tensor
    auto: bool = False

    @property
    def needs_batch(self) -> bool:
        """Whether it measures its bounds or the noise that it compares with, for which it has to see a batch."""
        return self.auto or self.mode.needs == "z"


def parse_band(value: object, key: str = "threshold") -> float | Band:
    """Read a threshold: a positive number, or a band `(lower, upper)` with `0 < lower < upper`.

    A band is written `"0.5_2"`, `[0.5, 2]` or `(0.5, 2)`; a number `2.0` or `"2.0"`. `inf` is a number.
    YAML 1.1 reads an unquoted `0.5_2` as 0.52; `config.yaml_text` prevents that.

    Raises:
        ConfigError: naming `key`, if the value is neither, or not positive, or the band is reversed.
    """
    if isinstance(value, str):
        numbers: Sequence[object] = value.split("_")
    elif isinstance(value, Sequence):
        numbers = value
    else:
        numbers = [value]
    if not 1 <= len(numbers) <= 2 or (len(numbers) == 1 and not isinstance(value, str | int | float)):
        raise ConfigError(_no_threshold(key, value))
    parsed = [_positive(number, value, key) for number in numbers]
    if len(parsed) == 1:
        return parsed[0]
    lower, upper = parsed
    if lower >= upper:
        raise ConfigError(
            f"{_label(key)}={value!r} has lower bound {lower:g} and upper bound {upper:g}; "
            f"the lower must be smaller: write {upper:g}_{lower:g}"
            if lower > upper
            else f"{_label(key)}={value!r} is an empty band; the lower bound must be below the upper"
        )
    return lower, upper


def parse_veto(threshold: object) -> float | None:
    """The veto threshold as a number; raises `ConfigError` unless it is None or a ratio below 1."""
    key = f"{SECTION}.rollout_token_veto_threshold"
    if threshold is None:
        return None
    band = parse_band(threshold, key)
    if isinstance(band, tuple) or band >= 1.0:
        raise ConfigError(f"{key}={threshold!r} must be a ratio between 0 and 1, such as 1e-4")
    return band


def parse_modes(rollout_rs: str | None) -> dict[str, Mode]:
    """The rejection modes of a comma-separated chain by name, in order, aliases resolved and repeats dropped.

    Raises:
        ConfigError: a mode is unknown, or the chain holds none.
    """
    if rollout_rs is None:
        return {}
    key = f"{SECTION}.rollout_rs"
    if not isinstance(rollout_rs, str):
        raise ConfigError(f"{key}={rollout_rs!r} must be text: a mode, or modes chained by commas")
    names = [name.strip() for name in rollout_rs.split(",")]
    return {RS_ALIASES.get(name, name): _resolve(RS_ALIASES.get(name, name), key) for name in names}


def _resolve(name: str, key: str) -> Mode:
    if name in RS_MODES:
        return RS_MODES[name]
    if ":" not in name:
        message = unknown_choice(key, name, (*RS_MODES, *RS_ALIASES))
        raise ConfigError(f"{message}; a mode of your own is given as 'package.module:name'")
    mode = import_target(key, name, "a flowcorr.correction.Mode")
    if not isinstance(mode, Mode):
        raise ConfigError(f"{key}={name!r} is of type {type(mode).__name__}; name a flowcorr.correction.Mode")
    return mode


def parse_criteria(rollout_rs: str | None, threshold: Threshold | None) -> tuple[Criterion, ...]:
    """The rejection criteria of a chain of modes and its thresholds.

    Args:
        rollout_rs: modes chained by commas, or None.
        threshold: one threshold for all modes, or as many as there are modes, in their order: chained by
            commas in text (`"0.5_2,0.01"`) or as a list whose entries are text or lists. Two bare numbers
            in a list are a band. `auto` is a band that is measured; for `step_z`, which measures by itself, 6.

    Raises:
        ConfigError: a mode is unknown, its threshold is missing or not of its kind, or two modes have one name in
            metrics.
    """
    key = f"{SECTION}.rollout_rs_threshold"
    modes = parse_modes(rollout_rs)
    if not modes:
        return ()
    if threshold is None:
        wanted = "; ".join(f"for {name} {mode.bounds.threshold}" for name, mode in modes.items())
        raise ConfigError(f"{key} is missing for {SECTION}.rollout_rs={rollout_rs!r}; give {wanted}")
    entries = _entries(threshold)
    if len(modes) == 2 and _is_pair(threshold) and not _is_band_of(modes, threshold):
        low, high = threshold
        raise ConfigError(
            f"{key}={list(threshold)!r} is one band for both modes of rollout_rs={rollout_rs!r}, and they cannot have "
            f"it; write a threshold for each as text, {low},{high}, or a band around 1 as text, such as 0.5_2.0"
        )
    if len(entries) not in (1, len(modes)):
        raise ConfigError(
            f"{key}={threshold!r} holds {len(entries)} thresholds for the {len(modes)} modes of "
            f"rollout_rs={rollout_rs!r}; give one for all, or one for each, in order"
        )
    if len(entries) == 1:
        entries = entries * len(modes)
    criteria = tuple(
        _criterion(name, mode, entry, key) for (name, mode), entry in zip(modes.items(), entries, strict=True)
    )
    labels = [criterion.name for criterion in criteria]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise ConfigError(
            f"{SECTION}.rollout_rs={rollout_rs!r} has two modes whose name in metrics is {twice[0]!r}; rename one"
        )
    return criteria


def canonical_threshold(threshold: Threshold | None) -> float | Band | str | None:
    """The threshold of a chain of modes as a number, a band, or text if there are several thresholds."""
    if threshold is None:
        return None
    key = f"{SECTION}.rollout_rs_threshold"
    entries = [AUTO if entry == AUTO else parse_band(entry, key) for entry in _entries(threshold)]
    if len(entries) == 1:
        return entries[0]
    return ",".join(_written(entry) for entry in entries)


def _entries(threshold: Threshold) -> list[object]:
    if isinstance(threshold, str):
        return [entry.strip() for entry in threshold.split(",")]
    if isinstance(threshold, Sequence):
        return [threshold] if _is_pair(threshold) else list(threshold)
    return [threshold]


def _is_pair(threshold: Threshold) -> TypeGuard[Sequence[float]]:
    """Whether a threshold is a band by two bare numbers, and not by text."""
    if isinstance(threshold, str) or not isinstance(threshold, Sequence):
        return False
    return len(threshold) == 2 and all(isinstance(entry, int | float) for entry in threshold)


def _is_band_of(modes: Mapping[str, Mode], pair: Sequence[float]) -> bool:
    """Whether two bare numbers for two modes are one band: both modes take bands of ratios, and 1 lies inside."""
    low, high = pair
    return all(mode.bounds.is_band for mode in modes.values()) and low <= 1 <= high


def _criterion(name: str, mode: Mode, entry: object, key: str) -> Criterion:
    label = name.rpartition(":")[2]  # of a mode of the user's own, its name in its module
    if entry == AUTO:
        if mode.needs == "z":
            return Criterion(label, mode, -math.inf, OUTLIER_Z)
        return Criterion(label, mode, -math.inf, math.inf, auto=True)
    band = parse_band(entry, key)
    if not mode.bounds.is_band:
        if isinstance(band, tuple):
            raise ConfigError(f"{_label(key)}={entry!r} is a band, but {name} takes {mode.bounds.threshold}")
        return Criterion(label, mode, -math.inf, band)
    if isinstance(band, float):
        if band <= 1.0:
            raise ConfigError(
                f"{_label(key)}={entry!r} for {name} stands for the ratios [1/u, u], so u must be above 1; "
                f"or give both bounds, such as 0.999_1.001"
            )
        band = (1.0 / band, band)
    smallest, largest = band
    highest = -math.log(smallest) if smallest else math.inf  # 1 / inf is 0
    return Criterion(label, mode, -math.log(largest), highest)


def idle_modes(criteria: tuple[Criterion, ...], values: Mapping[str, float]) -> list[str]:
    """Names of the modes with bounds more than ten times beyond the largest measured value.

    Such a band cannot act at the present noise floor; mean-pooled ratios and a band of 0.5..2.0 are the usual
    case. `values` are computed metrics, with or without a prefix before `rollout_corr/`.
    """
    return [criterion.name for criterion in criteria if _is_idle(criterion, values)]


def _is_idle(criterion: Criterion, values: Mapping[str, float]) -> bool:
    name = f"rollout_corr/rollout_rs_{criterion.name}"
    largest = next((value for key, value in values.items() if key.endswith(f"{name}_max")), None)
    smallest = next((value for key, value in values.items() if key.endswith(f"{name}_min")), None)
    if criterion.auto or largest is None or smallest is None:
        return False
    return bool(criterion.lower < _IDLE * smallest and _IDLE * largest < criterion.upper)


def scale_factor(scale: str | float, num_elements: int | None) -> float:
    """The factor on mean-pooled log-ratios: 1 (`mean`), `sqrt(D)` (`sqrt`), `D` (`sum`), or a number.

    `sum` makes `exp(scale delta)` the steps' density ratio; `sqrt` gives noise of one size whatever `D` is.

    Raises:
        ConfigError: the scale is unknown, or not positive.
        BatchError: the scale needs `num_elements`, and it is not given; or that is no number of elements.
    """
    check_scale(scale)
    if num_elements is not None and not num_elements >= 1:
        raise BatchError(
            f"num_elements={num_elements!r} must be the number of latent elements of a sample, 1 or more"
        )
    if not isinstance(scale, str):
        return float(scale)
    if scale == "mean":
        return 1.0
    if num_elements is None:
        raise BatchError(
            f"log_ratio_scale={scale!r} needs num_elements, the number of latent elements of a sample"
        )
    return math.sqrt(num_elements) if scale == "sqrt" else float(num_elements)


def check_scale(scale: object) -> None:
    """Raise `ConfigError` unless `scale` is the name of a scale or a positive number."""
    key = f"{SECTION}.log_ratio_scale"
    if isinstance(scale, str):
        if scale not in SCALES:
            raise ConfigError(unknown_choice(key, scale, (*SCALES, "a positive number")))
    elif isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale < math.inf:
        raise ConfigError(f"{key}={scale!r} must be mean, sqrt, sum or a positive number")


def parse_weights(rollout_is: str | None, threshold: object) -> float | Band:
    """The cap of weights at level `rollout_is`; raises `ConfigError` if either cannot be used."""
    if rollout_is is None:
        return math.inf
    if rollout_is not in IS_LEVELS:
        raise ConfigError(unknown_choice(f"{SECTION}.rollout_is", rollout_is, IS_LEVELS))
    if threshold is None:
        raise ConfigError(
            f"{SECTION}.rollout_is_threshold is null while rollout_is={rollout_is!r}; "
            f"write inf for weights without a cap, or set rollout_is: null"
        )
    return parse_band(threshold, "rollout_is_threshold")


def _positive(number: object, value: object, key: str) -> float:
    if isinstance(number, bool) or not isinstance(number, str | int | float):
        raise ConfigError(_no_threshold(key, value))
    try:
        parsed = float(number)
    except ValueError:
        raise ConfigError(_no_threshold(key, value)) from None
    if not parsed > 0.0:
        raise ConfigError(f"{_label(key)}={value!r} holds {parsed:g}; bounds must be above 0")
    return parsed


def _no_threshold(key: str, value: object) -> str:
    return f"{_label(key)}={value!r} is not a threshold; write a number (2.0) or a band (0.5_2.0)"


def _written(entry: float | Band | str) -> str:
    if entry == AUTO:
        return AUTO
    return f"{entry[0]!r}_{entry[1]!r}" if isinstance(entry, tuple) else repr(entry)


def _label(key: str) -> str:
    return key if "." in key else f"{SECTION}.{key}"
