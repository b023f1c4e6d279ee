"""Checks that sections share; each raises a `ConfigError` that names key, value and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Mapping

from flowcorr.errors import ConfigError


def at_least(key: str, value: float, bound: float) -> None:
    """Refuse a number below `bound`."""
    if not (math.isfinite(value) and value >= bound):
        raise ConfigError(f"{key}={value} is out of range; it must be at least {bound}")


def at_most(key: str, value: float, bound: float) -> None:
    """Refuse a number above `bound`, or one that is no number."""
    if not value <= bound:
        raise ConfigError(f"{key}={value} is out of range; it must be at most {bound}")


def above(key: str, value: float, bound: float) -> None:
    """Refuse a number that is not above `bound`."""
    if not (math.isfinite(value) and value > bound):
        raise ConfigError(f"{key}={value} is out of range; it must be above {bound}")


def check_workers(section: str, number: int, resources: Mapping[str, float], timeout: float) -> None:
    """Check the keys that `rollout` and `reward` share for Ray workers."""
    at_least(f"{section}.num_workers", number, 1)
    above(f"{section}.timeout", timeout, 0)
    for name, amount in resources.items():
        if isinstance(amount, bool) or not isinstance(amount, int | float):
            raise ConfigError(f"{section}.worker_resources.{name}={amount!r} must be a number")
        at_least(f"{section}.worker_resources.{name}", amount, 0)
