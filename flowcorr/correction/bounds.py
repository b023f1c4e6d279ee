"""Thresholds of the correction: how bands are written, which rejection modes exist, what bounds they mean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from flowcorr.correction.robust import OUTLIER_Z
from flowcorr.errors import ConfigError, unknown_choice

SECTION = "algorithm.rollout_correction"
IS_LEVELS = ("token", "sequence", "geometric")
K1_MODES = ("token_k1", "seq_sum_k1", "seq_mean_k1")
RS_MODES = (
    *("token_k1", "token_k2", "token_k3"),
    *("seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3"),
    *("seq_max_k2", "seq_max_k3"),
    *("step_kl", "seq_kl", "step_z"),
)
RS_ALIASES = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
EXACT_KL_MODES = ("step_kl", "seq_kl")
GLOBAL_MODES = ("step_z",)
AUTO = "auto"  # a threshold that is measured

Band = tuple[float, float]
Threshold = float | Band | str | Sequence[object]


@dataclass(frozen=True, slots=True)
class Criterion:
    """One rejection mode with its bounds: a term or sample is kept while `lower <= value <= upper`.

    Attributes:
        mode: one of `RS_MODES`.
        lower: for k1 modes the log of the smallest ratio `exp(delta)`, else `-inf`.
        upper: for k1 modes the log of the largest ratio, else the largest divergence.
        auto: whether the bounds, infinite here, are to be measured on the batch.
    """

    mode: str
    lower: float
    upper: float
    auto: bool = False

    @property
    def needs_batch(self) -> bool:
        """Whether it looks at the whole batch."""
        return self.auto or self.mode in GLOBAL_MODES

    @property
    def per_step(self) -> bool:
        """Whether it judges each step on its own, not the sample."""
        return self.mode.startswith(("token_", "step_"))

    @property
    def bounds_ratio(self) -> bool:
        return self.mode in K1_MODES


def parse_band(value: object, key: str = "threshold") -> float | Band:
    """Read a threshold: a positive number, or a band `(lower, upper)` with `0 < lower < upper`.

    A band is written `"0.5_2"`, `[0.5, 2]` or `(0.5, 2)`; a number `2.0` or `"2.0"`. `inf` is a number.
    YAML 1.1 reads an unquoted `0.5_2` as 0.52: that is for the reader of the file to prevent.

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
        raise ConfigError(
            f"{_label(key)}={value!r} is no threshold; write a number (2.0) or a band (0.5_2.0)"
        )
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


def parse_modes(rollout_rs: str | None) -> tuple[str, ...]:
    """The rejection modes of a comma-separated chain, in order, aliases resolved and repeats dropped.

    Raises:
        ConfigError: a mode is unknown, or the chain holds none.
    """
    if rollout_rs is None:
        return ()
    key = f"{SECTION}.rollout_rs"
    if not isinstance(rollout_rs, str):
        raise ConfigError(f"{key}={rollout_rs!r} must be text: a mode, or modes chained by commas")
    names = [name.strip() for name in rollout_rs.split(",")]
    modes = [RS_ALIASES.get(name, name) for name in names]
    for mode in modes:
        if mode not in RS_MODES:
            raise ConfigError(unknown_choice(key, mode, (*RS_MODES, *RS_ALIASES)))
    return tuple(dict.fromkeys(modes))


def parse_criteria(rollout_rs: str | None, threshold: Threshold | None) -> tuple[Criterion, ...]:
    """The rejection criteria of a chain of modes and its thresholds.

    Args:
        rollout_rs: modes chained by commas, or None.
        threshold: one threshold for all modes, or as many as there are modes, in their order: chained by
            commas in text (`"0.5_2,0.01"`) or as a list whose entries are text or lists. Two bare numbers
            in a list are a band. `auto` is a band that is measured on each batch; for `step_z`, which measures
            by itself, 6.

    Raises:
        ConfigError: a mode is unknown, its threshold is missing, or is not of its kind.
    """
    return _parse_criteria(rollout_rs, _frozen(threshold))


def _frozen(value: Any) -> Any:
    # Only numbers, text and (nested) lists of them can be thresholds; anything else is shown in the error.
    if isinstance(value, list | tuple):
        return tuple(_frozen(entry) for entry in value)
    return value if value is None or isinstance(value, str | int | float) else repr(value)


@lru_cache(maxsize=128)
def _parse_criteria(rollout_rs: str | None, threshold: Threshold | None) -> tuple[Criterion, ...]:
    key = f"{SECTION}.rollout_rs_threshold"
    modes = parse_modes(rollout_rs)
    if not modes:
        return ()
    if threshold is None:
        wanted = "; ".join(f"for {mode} {_wanted(mode)}" for mode in modes)
        raise ConfigError(f"{key} is missing for {SECTION}.rollout_rs={rollout_rs!r}; give {wanted}")
    entries = _entries(threshold)
    if len(entries) not in (1, len(modes)):
        raise ConfigError(
            f"{key}={threshold!r} holds {len(entries)} thresholds for the {len(modes)} modes of "
            f"rollout_rs={rollout_rs!r}; give one for all, or one for each, in order"
        )
    if len(entries) == 1:
        entries = entries * len(modes)
    return tuple(_criterion(mode, entry, key) for mode, entry in zip(modes, entries, strict=True))


def canonical_threshold(rollout_rs: str | None, threshold: Threshold | None) -> float | Band | str | None:
    """The threshold of a chain as a number, a band, or text where the modes have several."""
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
        is_band = len(threshold) == 2 and all(isinstance(entry, int | float) for entry in threshold)
        return [threshold] if is_band else list(threshold)
    return [threshold]


def _wanted(mode: str) -> str:
    """What can be written as the threshold of a mode."""
    if mode == "step_z":
        return "one upper bound in robust standard deviations, such as 6, or auto"
    if mode in K1_MODES:
        return "a band of ratios, such as 0.999_1.001 at log_ratio_scale mean, or auto (decoupled mode only)"
    return "one upper bound, or auto (decoupled mode only), or inf, which only measures"


def _criterion(mode: str, entry: object, key: str) -> Criterion:
    if entry == AUTO and mode == "step_z":
        return Criterion(mode, -math.inf, OUTLIER_Z)
    if entry == AUTO:
        return Criterion(mode, -math.inf, math.inf, auto=True)
    band = parse_band(entry, key)
    if mode not in K1_MODES:
        if isinstance(band, tuple):
            raise ConfigError(f"{_label(key)}={entry!r} is a band, but {mode} takes {_wanted(mode)}")
        return Criterion(mode, -math.inf, band)
    if isinstance(band, float):
        if band <= 1.0:
            raise ConfigError(
                f"{_label(key)}={entry!r} for {mode} stands for the ratios [1/u, u], so u must be above 1; "
                f"or give both bounds, such as 0.999_1.001"
            )
        band = (1.0 / band, band)
    lower, upper = band
    return Criterion(mode, math.log(lower) if lower > 0 else -math.inf, math.log(upper))


def _positive(number: object, value: object, key: str) -> float:
    if isinstance(number, bool) or not isinstance(number, str | int | float):
        raise ConfigError(
            f"{_label(key)}={value!r} is no threshold; write a number (2.0) or a band (0.5_2.0)"
        )
    try:
        parsed = float(number)
    except ValueError:
        raise ConfigError(
            f"{_label(key)}={value!r} is no threshold; write a number (2.0) or a band (0.5_2.0)"
        ) from None
    if not parsed > 0.0:
        raise ConfigError(f"{_label(key)}={value!r} holds {parsed:g}; bounds must be above 0")
    return parsed


def _written(entry: float | Band | str) -> str:
    if entry == AUTO:
        return AUTO
    return f"{entry[0]!r}_{entry[1]!r}" if isinstance(entry, tuple) else repr(entry)


def _label(key: str) -> str:
    return key if "." in key else f"{SECTION}.{key}"
