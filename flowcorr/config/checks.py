"""Checks that sections share; each raises a `ConfigError` that names key, value and choices."""

from __future__ import annotations

import math
from collections.abc import Mapping

from flowcorr.errors import ConfigError

# Far beyond what samples images, and far below what overflows: a slip of the exponent is named as such.
MOST_STEPS, MOST_PIXELS = 1000, 16384


def at_least(key: str, value: float, bound: float) -> None:
    """Refuse a number below `bound`, or one that is not finite."""
    if not (math.isfinite(value) and value >= bound):
        raise ConfigError(f"{key}={value} is out of range; it must be {_finite(value)}at least {bound}")


def at_most(key: str, value: float, bound: float) -> None:
    """Refuse a number above `bound`, or one that is no number."""
    if not value <= bound:
        raise ConfigError(f"{key}={value} is out of range; it must be at most {bound}")


def within(key: str, value: float, least: float, most: float) -> None:
    """Refuse a number below `least` or above `most`."""
    at_least(key, value, least)
    at_most(key, value, most)


def above(key: str, value: float, bound: float) -> None:
    """Refuse a number that is not above `bound`, or not finite."""
    if not (math.isfinite(value) and value > bound):
        raise ConfigError(f"{key}={value} is out of range; it must be {_finite(value)}above {bound}")


def _finite(value: float) -> str:
    """The words "finite and " for a value that is not finite, else nothing; they stand before a required bound."""
    return "" if math.isfinite(value) else "finite and "


def not_blank(key: str, value: str) -> None:
    """Refuse a text without a character."""
    if not value.strip():
        raise ConfigError(f"{key}={value!r} is blank; name a file or folder")


def check_workers(section: str, number: int, resources: Mapping[str, float], timeout: float) -> None:
    """Check the keys that `rollout` and `reward` share for Ray workers."""
    at_least(f"{section}.num_workers", number, 1)
    above(f"{section}.timeout", timeout, 0)
    for name, amount in resources.items():
        if isinstance(amount, bool) or not isinstance(amount, int | float):
            raise ConfigError(f"{section}.worker_resources.{name}={amount!r} must be a number")
        at_least(f"{section}.worker_resources.{name}", amount, 0)
