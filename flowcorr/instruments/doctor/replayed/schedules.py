"""Is the captured schedule the model's own, and is the noise what it should be?"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from flowcorr.dumps.replay import ReplaySamples
from flowcorr.instruments.doctor.replayed.legs import Legs
from flowcorr.instruments.doctor.replayed.stack import Stack
from flowcorr.instruments.doctor.replayed.verdicts import Verdict
from flowcorr.models import ModelFamily
from flowcorr.models.base import linear_schedule

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
_ERRORS = 6.0  # standard errors of noise
_SHARED = 0.5  # correlation above which two draws are one


def examine_schedule(stack: Stack, step: int) -> Verdict:
    """Whether the captured sigmas and timesteps are those of the model's own scheduler."""
    captured = stack.samples.tensors().get("sigmas")
    if captured is None or stack.own is None:
        return Verdict(
            part="schedule", status="SKIP", step=step, message="cannot tell", remedy="capture sigmas"
        )
    own = torch.tensor(stack.own.sigmas, dtype=torch.float64)
    sigmas = captured.double()
    gap = float((sigmas - own).abs().max())
    if gap > _SAME and _matches(stack, sigmas, "equal steps"):
        return Verdict(
            part="schedule",
            status="PASS",
            step=step,
            message="equal steps from 1 to 1 / N, with the model's own shift; its pipeline ends them lower",
            evidence=f"sigmas differ from the pipeline's by {gap:.2g}",
        )
    shown = f"sigmas differ by {gap:.2g} at most: captured {_row(sigmas)}, the model's own {_row(own)}"
    if gap <= _SAME:
        return Verdict(
            part="schedule",
            status="PASS",
            step=step,
            message="the model's own",
            evidence=f"sigmas differ by {gap:.1g}",
        )
    cause, message = _named(stack, sigmas, own)
    return Verdict(
        part="schedule",
        status="FAIL",
        step=step,
        cause=cause,
        confidence="certain" if cause != "other_schedule" or "sigmas" in message else "likely",
        message=message,
        evidence=shown,
        remedy="take sigmas and timesteps from the scheduler of the model's own folder, in both stacks; keep this one "
        "only if it is meant",
    )


def _named(stack: Stack, sigmas: Tensor, own: Tensor) -> tuple[str, str]:
    for dtype in (torch.float16, torch.bfloat16):
        if float((sigmas - own.to(dtype).double()).abs().max()) <= _SAME:
            return "rounded_sigmas", f"sigmas were rounded to {str(dtype).removeprefix('torch.')}"
    for changes, cause, message in _schedulers(stack.family):
        with _scheduler_with(stack.family, changes):
            if any(_matches(stack, sigmas, spacing) for spacing in _TABLES):
                return cause, message
    for spacing in _TABLES:
        table = _table(stack, len(sigmas) - 1, spacing)
        if table is not None and (factor := _shift_of(sigmas, table)) is not None:
            return "wrong_shift", f"the schedule is shifted by {factor:.4g} times the model's own shift"
    return "other_schedule", "the schedule is another than the model's own"


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


def examine_noise(stack: Stack, legs: Legs, step: int, earlier: Mapping[int, ReplaySamples]) -> Verdict:
    """Whether initial noise, and the noise of the steps, is standard normal and not drawn twice."""
    noise = stack.tensor("initial_noise")
    assert noise is not None, "`Stack` has checked it"
    flat = noise.flatten(1).cpu().double()
    remedy = "seed the noise by training step, prompt and member"
    prompts = stack.samples.prompts

    def failed(cause: str, message: str, evidence: str) -> Verdict:
        return Verdict(
            part="noise",
            status="FAIL",
            step=step,
            cause=cause,
            confidence="certain",
            message=message,
            evidence=evidence,
            remedy=remedy,
        )

    for number, samples in earlier.items():
        past = samples.tensors()["initial_noise"].flatten(1).double()
        if past.shape[1] == flat.shape[1] and (pair := _same_rows(flat, past)):
            return failed(
                "noise_reused",
                f"the initial noise is that of training step {number}",
                f"of {pair} of {len(flat)} samples",
            )
    twins = [
        pair for pair in itertools.combinations(range(len(flat)), 2) if _alike(flat[pair[0]], flat[pair[1]])
    ]
    strange = [pair for pair in twins if prompts[pair[0]] != prompts[pair[1]]]
    if strange:
        return failed(
            "noise_reused",
            "samples of different prompts begin with the same noise",
            f"samples {', '.join(f'{left} and {right}' for left, right in strange)}",
        )
    size = flat.numel()
    mean, std = float(flat.mean()), float(flat.std())
    if not (abs(mean) <= _ERRORS / math.sqrt(size) and abs(std - 1) <= _ERRORS / math.sqrt(2 * size)):
        return failed(
            "noise_scale", "the initial noise is not standard normal", f"mean {mean:.3g}, std {std:.4g}"
        )
    of_steps = _of_steps(legs)
    if of_steps is not None:
        return failed(*of_steps)
    told = "; samples of one prompt begin with the same noise" if twins else ""
    return Verdict(
        part="noise",
        status="PASS",
        step=step,
        message=f"standard normal, and drawn once{told}",
        evidence=f"initial noise: mean {mean:.2g}, std {std:.4g}",
    )


def _of_steps(legs: Legs) -> tuple[str, str, str] | None:
    """What is wrong with the noise of the window's steps, where the replay agrees with the log-probs."""
    if not legs.agrees:
        return None
    noise = legs.noise.flatten(2).cpu()
    flat = noise.flatten(0, 1)
    for left, right in itertools.combinations(range(len(flat)), 2):
        if _alike(flat[left], flat[right]):
            return "noise_reused", "steps of the window share their noise", f"terms {left} and {right}"
    return None


def _alike(one: Tensor, other: Tensor) -> bool:
    """Whether two draws are one, or nearly."""
    return float(torch.nn.functional.cosine_similarity(one, other, dim=0)) > _SHARED


def _same_rows(flat: Tensor, past: Tensor) -> int:
    return sum(any(_alike(row, other) for other in past) for row in flat)


def _row(values: Tensor) -> str:
    shown: Sequence[float] = values.tolist()
    return " ".join(f"{value:.4g}" for value in shown[:6]) + (" ..." if len(shown) > 6 else "")
