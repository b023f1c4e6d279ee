"""The check of a captured schedule: is it the model's own?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from flowcorr.health.finding import Finding
from flowcorr.instruments.doctor.candidates import fitted
from flowcorr.instruments.doctor.captured import Captured
from flowcorr.instruments.doctor.findings import failed, passed, skipped
from flowcorr.instruments.doctor.shifts import (
    SHIFTS,
    Spacing,
    own_shift,
    schedule,
    scheduler_with,
    with_shift,
)
from flowcorr.instruments.doctor.stack import Stack
from flowcorr.models import ModelFamily
from flowcorr.questions.question import SIGMAS

_FITTED = 1e-3  # relative spread of a factor of the shift over the steps
_STARTS = (0.5, 1.0, 2.0, 3.0, 6.0, 12.0)  # of the search for a shift
_SPACINGS = {
    "use_karras_sigmas": "Karras sigmas",
    "use_exponential_sigmas": "exponential sigmas",
    "use_beta_sigmas": "beta sigmas",
}
_TABLES: tuple[Spacing, ...] = ("pipeline", "equal steps")


def check_captured_schedule(captured: Captured) -> Finding:
    finding = _compared(captured.stack)
    return finding if finding.level == "serious" else captured.replayed.get("schedule", finding)


def _compared(stack: Stack) -> Finding:
    captured = stack.samples.tensors().get("sigmas")
    if captured is None or stack.own is None:
        return skipped("cannot tell", "capture sigmas")
    own = torch.tensor(stack.own.sigmas, dtype=torch.float64)
    sigmas = captured.double()
    gap = float((sigmas - own).abs().max())
    if gap > SIGMAS.limit and _matches(stack, sigmas, "equal steps"):
        return passed(
            "equal steps from 1 to 1 / N, with the model's own shift; its pipeline ends them lower; sigmas differ from "
            f"the pipeline's by {gap:.2g}",
            sigma_gap=gap,
        )
    if gap <= SIGMAS.limit:
        return passed(f"the model's own; sigmas differ by {gap:.1g}", sigma_gap=gap)
    cause, message, numbers = _named(stack, sigmas, own)
    return failed(
        f"{message}; sigmas differ by {gap:.2g} at most: captured {_row(sigmas)}, the model's own {_row(own)}",
        f"{SIGMAS.remedy}; keep this schedule only if it is meant",
        cause=cause,
        confidence="certain" if cause != "other_schedule" or "sigmas" in message else "likely",
        sigma_gap=gap,
        **numbers,
    )


def _named(stack: Stack, sigmas: Tensor, own: Tensor) -> tuple[str, str, dict[str, Any]]:
    """The cause, a sentence, and the numbers by which it was recognised."""
    for dtype in (torch.float16, torch.bfloat16):
        if float((sigmas - own.to(dtype).double()).abs().max()) <= SIGMAS.limit:
            name = str(dtype).removeprefix("torch.")
            return "rounded_sigmas", f"sigmas were rounded to {name}", {"dtype": name}
    for changes, cause, message in _schedulers(stack.family):
        with scheduler_with(stack.family, changes):
            if any(_matches(stack, sigmas, spacing) for spacing in _TABLES):
                return cause, message, changes
    shift = _shift_of(stack, sigmas)
    if shift is not None:
        of_model = own_shift(stack.family, stack.latent_shape)
        message = f"the schedule has shift {shift:.4g}, and the model's own is {of_model:.4g}"
        return "wrong_shift", message, {"shift": shift, "own_shift": of_model}
    for spacing in _TABLES:
        table = schedule(stack.family, stack.places, stack.latent_shape, spacing)
        factor = None if table is None else _factor_of(sigmas, _tensor(table.sigmas))
        if factor is not None:
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


def _matches(stack: Stack, sigmas: Tensor, spacing: Spacing) -> bool:
    table = schedule(stack.family, stack.places, stack.latent_shape, spacing)
    return table is not None and float((_tensor(table.sigmas) - sigmas).abs().max()) <= SIGMAS.limit


def _shift_of(stack: Stack, sigmas: Tensor) -> float | None:
    """The shift that makes the model's own scheduler return `sigmas`; None if no shift does."""
    config = stack.family.pipeline.scheduler.config
    if "shift" not in config:
        return None
    for spacing in _TABLES:

        def gap(shift: float, spacing: Spacing = spacing) -> Tensor:
            table = with_shift(stack.family, stack.places, stack.latent_shape, shift, spacing)
            return torch.ones_like(sigmas) if table is None else _tensor(table.sigmas) - sigmas

        shift = fitted(gap, _STARTS, *SHIFTS)
        if float(gap(shift).abs().max()) <= SIGMAS.limit:
            return shift
    return None


def _factor_of(sigmas: Tensor, table: Tensor) -> float | None:
    """The shift from `table` to `sigmas`, a factor; None if no single shift leads from one to the other."""
    inner = (table > 0) & (table < 1) & (sigmas > 0) & (sigmas < 1)
    if int(inner.sum()) < 2:
        return None
    factors = (sigmas * (1 - table) / (table * (1 - sigmas)))[inner]
    factor = float(factors.mean())
    return factor if float((factors - factor).abs().max()) <= _FITTED * factor else None


def _tensor(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _row(values: Tensor) -> str:
    shown: Sequence[float] = values.tolist()
    return " ".join(f"{value:.4g}" for value in shown[:6]) + (" ..." if len(shown) > 6 else "")
