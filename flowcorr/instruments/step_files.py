"""Reads the files of a folder of dumped steps, checks that they are of one run, and collects facts about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpedFile:
    """Facts about a run that the file of one step contains.

    Attributes:
        path: the file.
        loss: its loss.
        num_samples: `B`.
        window: SDE steps a sample, `T`.
        num_elements: `D`, where known.
        last_index: its highest step index, where known.
        has_levels: whether it tells noise levels.
        scored: `scored_columns`.
        bypass: whether the step was in bypass mode.
        has_trainer: whether it holds log-probs of the trainer, see `holds_trainer`.
        missing: names of optional fields that it lacks, see `dumps.missing`.
    """

    path: Path
    loss: LoggedLoss
    num_samples: int
    window: int
    num_elements: int | None
    last_index: int | None
    has_levels: bool
    scored: Tensor
    bypass: bool
    has_trainer: bool
    missing: Sequence[str]

    def num_steps(self, levels: Tensor | None) -> int:
        """Number of steps of the terms' schedule, as `as_terms` counts them."""
        if self.last_index is not None:
            return self.last_index + 1
        return self.window if levels is None or not self.has_levels else len(levels)


def survey(files: Mapping[int, Path], config: Config | None) -> tuple[dict[int, DumpedFile], list[str]]:
    """The files that can be read, and a note on the others.

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
    examined: dict[int, DumpedFile] = {}
    problems = []
    for step, path in files.items():
        try:
            examined[step] = _examined(path, config)
        except ConfigError as error:
            problems.append(str(error))
    _check_alike(list(examined.values()))
    if not problems:
        return examined, []
    return examined, [
        f"{len(problems)} of {len(files)} dumped steps cannot be read; the first: {problems[0]}"
    ]


def _examined(path: Path, config: Config | None) -> DumpedFile:
    terms, loss = dumps.load(path), dumps.load_loss(path)
    if loss.loss_mode not in LOSSES and not is_own_name(loss.loss_mode):
        raise ConfigError(f"{path}: {unknown_choice('loss_mode', loss.loss_mode, LOSSES)}")
    samples, window = terms.rollout_log_probs.shape
    last = None if terms.step_indices is None else int(terms.step_indices.max())
    highest = window - 1 if last is None else last
    clip = loss.clip_ratio if config is None else config.actor.clip_ratio
    limits = {"the schedule": MAX_SCHEDULE if config is None else config.sampling.num_inference_steps}
    if isinstance(clip, Sequence):
        limits["clip_ratio"] = len(clip)
    for name, steps in limits.items():
        if highest >= steps:
            raise ConfigError(
                f"{path}: step_indices reaches {highest}, and {name} has {steps} steps; it is of another run"
            )
    return DumpedFile(
        path=path,
        loss=loss,
        num_samples=samples,
        window=window,
        num_elements=terms.num_elements,
        last_index=last,
        has_levels=terms.sigmas is not None,
        scored=scored_columns(terms),
        bypass=terms.bypass,
        has_trainer=holds_trainer(terms),
        missing=dumps.missing(terms, loss),
    )


def _check_alike(files: Sequence[DumpedFile]) -> None:
    """Raise if files state windows or latents of different sizes."""
    for name, what in (("window", "SDE steps a sample"), ("num_elements", "num_elements")):
        known = [file for file in files if getattr(file, name) is not None]
        for file in known[1:]:
            sizes = [getattr(one, name) for one in (known[0], file)]
            if sizes[0] != sizes[1]:
                raise ConfigError(
                    f"{known[0].path} and {file.path} are of different runs: {what}={sizes[0]} and {what}={sizes[1]}; "
                    "give each run a folder of its own"
                )


def size_of(files: Iterable[DumpedFile]) -> int | None:
    """`D` from the first file that states it, since all must agree; None if none does."""
    return next((file.num_elements for file in files if file.num_elements is not None), None)


def noise_levels(paths: Sequence[Path]) -> Tensor | None:
    """Noise levels of all steps, highest first, to within bfloat16 rounding; None if the files have step indices.

    Also None if they form no schedule. Samples may have windows of their own, so that a step's place within its window
    does not tell which step it is.
    """
    loaded = [terms for terms in map(dumps.load, paths) if terms.sigmas is not None]
    if all(terms.step_indices is not None for terms in loaded):
        return None
    seen = [terms.sigmas.unique() for terms in loaded if terms.sigmas is not None]
    levels = torch.cat(seen).unique().flip(0)
    new = torch.cat([levels.new_ones(1).bool(), levels[1:] < levels[:-1] * (1 - _ROUNDING)])
    highest, lowest = levels[new], levels[new.roll(-1)]  # of those that are one but for rounding
    is_schedule = len(highest) <= MAX_SCHEDULE and bool((lowest >= highest * (1 - 2 * _ROUNDING)).all())
    return highest if is_schedule else None


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
