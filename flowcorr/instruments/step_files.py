"""Reads the files of a folder of dumped steps, and checks that they are of one run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from flowcorr import dumps
from flowcorr.config.schema import Config
from flowcorr.dumps import DumpedTerms, LoggedLoss
from flowcorr.dumps.checks import MAX_SCHEDULE
from flowcorr.errors import ConfigError, unknown_choice
from flowcorr.imports import is_own_name
from flowcorr.losses import LOSSES
from flowcorr.trainer.run_config import CONFIG_FILE

_ROUNDING = 2.0**-8  # relative; noise levels may have been rounded to bfloat16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DumpedStep:
    """A training step that was dumped.

    Attributes:
        path: its file.
        terms: its terms; without `num_elements` in the file, with those of the other files.
        loss: its loss.
    """

    path: Path
    terms: DumpedTerms
    loss: LoggedLoss


def survey(files: Mapping[int, Path], config: Config | None) -> tuple[dict[int, DumpedStep], list[str]]:
    """Read the steps of all readable files, and note the others.

    Args:
        files: by training step.
        config: the run's, where known; a file with step indices outside its schedule cannot be read.

    Raises:
        ConfigError: the files are of different runs.
    """
    if config is not None and config.sampling.num_inference_steps > MAX_SCHEDULE:
        raise ConfigError(
            f"sampling.num_inference_steps={config.sampling.num_inference_steps} of {CONFIG_FILE} must be at most "
            f"{MAX_SCHEDULE}"
        )
    steps: dict[int, DumpedStep] = {}
    problems = []
    for number, path in files.items():
        try:
            steps[number] = _read(path, config)
        except ConfigError as error:
            problems.append(str(error))
    _check_alike("SDE steps a sample", {step.path: window_of(step.terms) for step in steps.values()})
    _check_alike("num_elements", {step.path: step.terms.num_elements for step in steps.values()})
    size = next(
        (step.terms.num_elements for step in steps.values() if step.terms.num_elements is not None), None
    )
    sized = {
        number: replace(step, terms=replace(step.terms, num_elements=size)) for number, step in steps.items()
    }
    if not problems:
        return sized, []
    return sized, [f"{len(problems)} of {len(files)} dumped steps cannot be read; the first: {problems[0]}"]


def _read(path: Path, config: Config | None) -> DumpedStep:
    terms, loss = dumps.load(path), dumps.load_loss(path)
    if loss.loss_mode not in LOSSES and not is_own_name(loss.loss_mode):
        raise ConfigError(f"{path}: {unknown_choice('loss_mode', loss.loss_mode, LOSSES)}")
    highest = num_steps_of(terms) - 1
    clip = loss.clip_ratio if config is None else config.actor.clip_ratio
    limits = {"the schedule": MAX_SCHEDULE if config is None else config.sampling.num_inference_steps}
    if isinstance(clip, Sequence):
        limits["clip_ratio"] = len(clip)
    for name, steps in limits.items():
        if highest >= steps:
            raise ConfigError(
                f"{path}: step_indices reaches {highest}, and {name} has {steps} steps; it is of another run"
            )
    return DumpedStep(path=path, terms=terms, loss=loss)


def _check_alike(what: str, sizes: Mapping[Path, int | None]) -> None:
    """Raise if files state different sizes."""
    known = [(path, size) for path, size in sizes.items() if size is not None]
    for path, size in known[1:]:
        if size != known[0][1]:
            raise ConfigError(
                f"{known[0][0]} and {path} are of different runs: {what}={known[0][1]} and {what}={size}; "
                "give each run a folder of its own"
            )


def window_of(terms: DumpedTerms) -> int:
    """SDE steps a sample, `T`."""
    return terms.rollout_log_probs.shape[1]


def num_steps_of(terms: DumpedTerms, levels: Tensor | None = None) -> int:
    """Number of steps of the terms' schedule, as `as_terms` counts them."""
    if terms.step_indices is not None:
        return int(terms.step_indices.max()) + 1
    return window_of(terms) if levels is None or terms.sigmas is None else len(levels)


def noise_levels(steps: Iterable[DumpedTerms]) -> Tensor | None:
    """Noise levels of all steps, highest first, to within bfloat16 rounding; None if the files have step indices.

    Also None if they form no schedule. Samples may have windows of their own, so that a step's place within its window
    does not tell which step it is.
    """
    leveled = [terms for terms in steps if terms.sigmas is not None]
    if all(terms.step_indices is not None for terms in leveled):
        return None
    seen = [terms.sigmas.unique() for terms in leveled if terms.sigmas is not None]
    levels = torch.cat(seen).unique().flip(0)
    new = torch.cat([levels.new_ones(1).bool(), levels[1:] < levels[:-1] * (1 - _ROUNDING)])
    highest, lowest = levels[new], levels[new.roll(-1)]  # of those that are one but for rounding
    is_schedule = len(highest) <= MAX_SCHEDULE and bool((lowest >= highest * (1 - 2 * _ROUNDING)).all())
    return highest if is_schedule else None


def counted_by_levels(terms: DumpedTerms, levels: Tensor) -> DumpedTerms:
    """Fill in step indices by the nearest of the run's `noise_levels`, where they were not dumped and sigmas were."""
    if terms.step_indices is not None or terms.sigmas is None:
        return terms
    # The place among the middles between neighbours, counted from the highest on.
    rising = levels.flip(0).to(terms.sigmas.dtype)
    places = len(levels) - 1 - torch.bucketize(terms.sigmas, (rising[1:] + rising[:-1]) / 2)
    return replace(terms, step_indices=places)


def scored_in(columns: Sequence[Tensor]) -> Tensor | None:
    """`[T]` bool, steps of the window that the trainer scores; None if no training step scores all of them.

    Args:
        columns: `scored_columns` of each training step.
    """
    each = torch.stack(list(columns))
    scored = each.any(0)
    return scored if (each == scored).all(1).any() else None


def scored_columns(dumped: DumpedTerms) -> Tensor:
    """`[T]` bool, steps of the window of which the trainer has a finite log-prob in any sample."""
    return trained_log_probs(dumped).isfinite().any(0)


def holds_trainer(dumped: DumpedTerms) -> bool:
    """Whether a step holds log-probs of the trainer; in bypass mode the old ones are the rollout's."""
    return not dumped.bypass or dumped.current_log_probs is not None


def trained_log_probs(dumped: DumpedTerms) -> Tensor:
    """`[B, T]`, the trainer's log-probs in the gap: of the old policy, in bypass mode of the current one if dumped."""
    current = dumped.current_log_probs
    return current if dumped.bypass and current is not None else dumped.old_log_probs
