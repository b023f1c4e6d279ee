"""Schedules of a model's own scheduler, with another configuration and above all another shift."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from flowcorr.models import ModelFamily, Schedule
from flowcorr.models.schedule import dynamic_shift, linear_schedule
from flowcorr.questions.question import SIGMAS

Spacing = Literal["pipeline", "equal steps"]
SHIFTS = (0.1, 20.0)
"""The range of shifts that are looked for."""


@contextmanager
def scheduler_with(family: ModelFamily, changes: Mapping[str, Any]) -> Iterator[None]:
    """The family with another configuration of its scheduler; its own, where that cannot be made."""
    before = family.pipeline.scheduler
    try:
        family.pipeline.scheduler = type(before).from_config(before.config, **changes)
    except (ValueError, ImportError):
        yield
        return
    try:
        yield
    finally:
        family.pipeline.scheduler = before


def schedule_at(family: ModelFamily, places: Sequence[int], latent_shape: tuple[int, ...]) -> Schedule:
    """The model's own schedule at some places, from 0 to its number of steps, see `ReplaySamples.sigma_indices`."""
    return family.schedule(places[-1], latent_shape).begin_at(places[:-1])


def schedule(
    family: ModelFamily,
    places: Sequence[int],
    latent_shape: tuple[int, ...],
    spacing: Spacing = "pipeline",
) -> Schedule | None:
    """The scheduler's schedule at some places: as its pipeline asks for it, or in equal steps; None if it has none."""
    scheduler = family.pipeline.scheduler
    try:
        if spacing == "pipeline":
            return schedule_at(family, places, latent_shape)
        if scheduler.config.get("use_dynamic_shifting"):
            return None  # families with such a scheduler take equal steps anyway
        return linear_schedule(scheduler, places[-1], 1).begin_at(places[:-1])
    except (ValueError, ImportError):  # a spacing that the scheduler cannot make, or that needs scipy
        return None


def spacing_of(family: ModelFamily, sigmas: Sequence[float], latent_shape: tuple[int, ...]) -> Spacing:
    """How the scheduler spaces a schedule of these sigmas; as its pipeline does, where it makes them in no way."""
    table = schedule(family, range(len(sigmas)), latent_shape, "equal steps")
    if table is None or len(table.sigmas) != len(sigmas):
        return "pipeline"
    apart = max(abs(one - other) for one, other in zip(table.sigmas, sigmas, strict=True))
    return "equal steps" if apart <= SIGMAS.limit else "pipeline"


def own_shift(family: ModelFamily, latent_shape: tuple[int, ...]) -> float:
    """The shift of the model's own scheduler for latents of this shape; 1 is none."""
    config = family.pipeline.scheduler.config
    grown = dynamic_shift(config, family.image_tokens(latent_shape))
    if grown is None:
        return float(config.get("shift") or 1.0)
    return math.exp(grown) if config.get("time_shift_type", "exponential") == "exponential" else grown


def with_shift(
    family: ModelFamily,
    places: Sequence[int],
    latent_shape: tuple[int, ...],
    shift: float,
    spacing: Spacing = "pipeline",
) -> Schedule | None:
    """The schedule with one shift for all sizes; None where the scheduler cannot make it."""
    changes = {"shift": shift, "use_dynamic_shifting": False}
    config = family.pipeline.scheduler.config
    with scheduler_with(family, {name: value for name, value in changes.items() if name in config}):
        return schedule(family, places, latent_shape, spacing)
