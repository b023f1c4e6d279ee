"""The check of a captured schedule: is it the model's own?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from flowcorr.instruments.doctor.captured import Captured
from flowcorr.instruments.doctor.findings import failed, passed, skipped
from flowcorr.instruments.doctor.stack import Stack
from flowcorr.instruments.finding import Finding
from flowcorr.models import ModelFamily
from flowcorr.models.schedule import linear_schedule

_SAME = 2e-6  # of sigmas: float32 tables made in another order of operations
_FITTED = 1e-3  # relative spread of a shift over the steps
_SHIFTS = (1.0, 1.15, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 12.0)
_SPACINGS = {
    "use_karras_sigmas": "Karras sigmas",
    "use_exponential_sigmas": "exponential sigmas",
    "use_beta_sigmas": "beta sigmas",
}
Spacing = Literal["pipeline", "equal steps"]
_TABLES: tuple[Spacing, ...] = ("pipeline", "equal steps")


def check_captured_schedule(captured: Captured) -> Finding:
    found = _compared(captured.stack)
    return found if found.level == "serious" else captured.replayed.get("schedule", found)


def _compared(stack: Stack) -> Finding:
    captured = stack.samples.tensors().get("sigmas")
    if captured is None or stack.own is None:
        return skipped("cannot tell", "capture sigmas")
    own = torch.tensor(stack.own.sigmas, dtype=torch.float64)
    sigmas = captured.double()
    gap = float((sigmas - own).abs().max())
    if gap > _SAME and _matches(stack, sigmas, "equal steps"):
        return passed(
            "equal steps from 1 to 1 / N, with the model's own shift; its pipeline ends them lower; sigmas differ from "
            f"the pipeline's by {gap:.2g}",
            sigma_gap=gap,
        )
    if gap <= _SAME:
        return passed(f"the model's own; sigmas differ by {gap:.1g}", sigma_gap=gap)
    cause, message, numbers = _named(stack, sigmas, own)
    return failed(
        f"{message}; sigmas differ by {gap:.2g} at most: captured {_row(sigmas)}, the model's own {_row(own)}",
        "take sigmas and timesteps from the scheduler of the model's own folder, in both stacks; keep this one "
        "only if it is meant",
        cause=cause,
        confidence="certain" if cause != "other_schedule" or "sigmas" in message else "likely",
        sigma_gap=gap,
        **numbers,
    )


def _named(stack: Stack, sigmas: Tensor, own: Tensor) -> tuple[str, str, dict[str, Any]]:
    """The cause, a sentence, and the numbers by which it was recognised."""
    for dtype in (torch.float16, torch.bfloat16):
        if float((sigmas - own.to(dtype).double()).abs().max()) <= _SAME:
            name = str(dtype).removeprefix("torch.")
            return "rounded_sigmas", f"sigmas were rounded to {name}", {"dtype": name}
    for changes, cause, message in _schedulers(stack.family):
        with _scheduler_with(stack.family, changes):
            if any(_matches(stack, sigmas, spacing) for spacing in _TABLES):
                return cause, message, changes
    for spacing in _TABLES:
        table = _table(stack, len(sigmas) - 1, spacing)
        if table is not None and (factor := _shift_of(sigmas, table)) is not None:
            message = f"the schedule is shifted by {factor:.4g} times the model's own shift"
            return "wrong_shift", message, {"shift_factor": factor}
    return "other_schedule", "the schedule is another than the model's own", {}


def _schedulers(family: ModelFamily) -> Iterator[tuple[dict[str, Any], str, str]]:
    config = family.pipeline.scheduler.config
    for name, words in _SPACINGS.items():
        if name in config:
            off = dict.fromkeys(_SPACINGS, False)
            chosen = not config[name]
            yield (
                {**off, name: chosen},
                "other_schedule",
                f"{'' if chosen else 'no '}{words}, unlike the model's own",
            )
    own = config.get("shift", 1.0)
    for shift in _SHIFTS:
        yield {"shift": shift}, "wrong_shift", f"its shift is {shift:g}, and the model's own is {own:g}"
        if config.get("use_dynamic_shifting"):
            yield (
                {"shift": shift, "use_dynamic_shifting": False},
                "wrong_shift",
                f"its shift is {shift:g} for all sizes, and the model's own grows with the image",
            )


def _matches(stack: Stack, sigmas: Tensor, spacing: Spacing) -> bool:
    table = _table(stack, len(sigmas) - 1, spacing)
    return table is not None and float((table - sigmas).abs().max()) <= _SAME


def _table(stack: Stack, count: int, spacing: Spacing) -> Tensor | None:
    """Sigmas of the family's scheduler: as its pipeline asks for them, or in equal steps; None if it has none such."""
    scheduler = stack.family.pipeline.scheduler
    try:
        if spacing == "pipeline":
            schedule = stack.family.schedule(count, stack.latent_shape)
        elif scheduler.config.get("use_dynamic_shifting"):
            return None  # families with such a scheduler take equal steps anyway
        else:
            schedule = linear_schedule(scheduler, count, 1)
    except (ValueError, ImportError):  # a spacing that the scheduler cannot make, or that needs scipy
        return None
    return torch.tensor(schedule.sigmas, dtype=torch.float64)


def _shift_of(sigmas: Tensor, table: Tensor) -> float | None:
    """By how much `sigmas` is shifted from `table`; None where no shift leads from one to the other."""
    inner = (table > 0) & (table < 1) & (sigmas > 0) & (sigmas < 1)
    if int(inner.sum()) < 2:
        return None
    factors = (sigmas * (1 - table) / (table * (1 - sigmas)))[inner]
    factor = float(factors.mean())
    return factor if float((factors - factor).abs().max()) <= _FITTED * factor else None


@contextmanager
def _scheduler_with(family: ModelFamily, changes: Mapping[str, Any]) -> Iterator[None]:
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


def _row(values: Tensor) -> str:
    shown: Sequence[float] = values.tolist()
    return " ".join(f"{value:.4g}" for value in shown[:6]) + (" ..." if len(shown) > 6 else "")
