"""The check of a captured schedule: is it the model's own?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from flowcorr.health.finding import Finding
from flowcorr.instruments.doctor.candidates import Candidate, Number, Tried, best, search
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
from flowcorr.questions.question import SIGMAS

UNLESS_MEANT = "unless it is meant"
"""The confidence of a fault that may be a choice."""
_STARTS = (0.5, 1.0, 2.0, 3.0, 6.0, 12.0)  # of the search for a shift, or for a factor of one
_FACTORS = (0.01, 100.0)
_SPACINGS = {
    "use_karras_sigmas": "Karras sigmas",
    "use_exponential_sigmas": "exponential sigmas",
    "use_beta_sigmas": "beta sigmas",
}
_TABLES: tuple[Spacing, ...] = ("pipeline", "equal steps")


def check_captured_schedule(captured: Captured) -> Finding:
    stack = captured.stack
    given = stack.samples.tensors().get("sigmas")
    if given is None or stack.own is None:
        return skipped("cannot tell", "capture sigmas")
    own = torch.tensor(stack.own.sigmas, dtype=torch.float64)
    sigmas = given.double()
    gap = float((sigmas - own).abs().max())
    equal_steps = _table(stack, "equal steps")
    if gap <= SIGMAS.limit:
        return passed(f"the model's own; sigmas differ by {gap:.1g}", sigma_gap=gap)
    if equal_steps is not None and float((sigmas - equal_steps).abs().max()) <= SIGMAS.limit:
        return passed(
            "equal steps from 1 to 1 / N, with the model's own shift; its pipeline ends them lower; sigmas differ from "
            f"the pipeline's by {gap:.2g}",
            sigma_gap=gap,
        )
    named = best(
        search(_schedules(stack, sigmas, own), partial(_tried, sigmas), lambda table: table - sigmas)
    )
    unknown: Candidate[Tensor] = Candidate(
        cause="other_schedule", message="the schedule is another than the model's own"
    )
    other = unknown if named is None else named.candidate
    return failed(
        f"{other.message}; sigmas differ by {gap:.2g} at most: captured {_row(sigmas)}, the model's own {_row(own)}",
        f"{SIGMAS.remedy}; a schedule that is meant belongs into the scheduler's configuration of the model that "
        "--model names",
        cause=other.cause,
        confidence="certain" if other.cause == "rounded_sigmas" else UNLESS_MEANT,
        sigma_gap=gap,
        **other.numbers,
    )


def _tried(sigmas: Tensor, candidate: Candidate[Tensor]) -> Tried[Tensor]:
    """The differences of the captured sigmas `[N + 1]` from those of a candidate."""
    score = torch.stack([(table - sigmas).abs() for table in candidate.inputs])
    left, place = score.amax(1).min(0)
    return Tried(
        candidate=candidate,
        score=score[place],
        left=float(left),
        explains=float(left) <= SIGMAS.limit,
    )


def _schedules(stack: Stack, sigmas: Tensor, own: Tensor) -> Iterator[Candidate[Tensor]]:
    """Schedules that may have been used in place of the model's own; each table is `[N + 1]`, float64."""
    schedule_of: Callable[..., Candidate[Tensor]] = partial(Candidate, about="schedule")
    for dtype in (torch.float16, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        yield schedule_of(
            cause="rounded_sigmas",
            message=f"sigmas were rounded to {name}",
            numbers={"dtype": name},
            inputs=(own.to(dtype).double(),),
        )
    config = stack.family.pipeline.scheduler.config
    for name in (name for name in _SPACINGS if name in config):
        changes = {**dict.fromkeys(_SPACINGS, False), name: not config[name]}
        with scheduler_with(stack.family, changes):
            tables = tuple(_tables(stack))
        if tables:
            yield schedule_of(
                cause="other_schedule",
                message=f"{'no ' if config[name] else ''}{_SPACINGS[name]}, unlike the model's own",
                numbers=changes,
                inputs=tables,
            )
    own_one = own_shift(stack.family, stack.latent_shape)
    for spacing in _TABLES if "shift" in config else ():
        yield schedule_of(
            cause="wrong_shift",
            message=f"the schedule has shift {{value:.4g}}, and the model's own is {own_one:.4g}",
            numbers={"own_shift": own_one},
            number=Number(
                inputs=partial(_shifted, stack, spacing), starts=_STARTS, low=SHIFTS[0], high=SHIFTS[1]
            ),
        )
    for table in _tables(stack):
        yield schedule_of(
            cause="wrong_shift",
            message="the schedule is shifted by {value:.4g} times the model's own shift",
            number=Number(
                inputs=partial(_shifted_more, table), starts=_STARTS, low=_FACTORS[0], high=_FACTORS[1]
            ),
        )


def _table(stack: Stack, spacing: Spacing) -> Tensor | None:
    """The sigmas `[N + 1]` of the family's scheduler in a spacing; None where it makes none."""
    table = schedule(stack.family, stack.places, stack.latent_shape, spacing)
    return None if table is None else torch.tensor(table.sigmas, dtype=torch.float64)


def _tables(stack: Stack) -> Iterator[Tensor]:
    return (table for table in (_table(stack, spacing) for spacing in _TABLES) if table is not None)


def _shifted(stack: Stack, spacing: Spacing, shift: float) -> Tensor:
    table = with_shift(stack.family, stack.places, stack.latent_shape, shift, spacing)
    sigmas = (
        torch.ones(len(stack.places)) if table is None else torch.tensor(table.sigmas, dtype=torch.float64)
    )
    return sigmas.double()  # ones are far from any schedule


def _shifted_more(table: Tensor, factor: float) -> Tensor:
    return factor * table / (1 + (factor - 1) * table)


def _row(values: Tensor) -> str:
    shown: Sequence[float] = values.tolist()
    return " ".join(f"{value:.4g}" for value in shown[:6]) + (" ..." if len(shown) > 6 else "")
