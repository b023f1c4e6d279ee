"""The input of checks on another trainer's run: the captured samples of one training step, and their replay."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from flowcorr import dumps
from flowcorr.config.schema import Config
from flowcorr.dumps.replay import ReplaySamples
from flowcorr.health.finding import Finding
from flowcorr.instruments.doctor.explanations import examine_inputs, examine_trainer
from flowcorr.instruments.doctor.legs import Legs
from flowcorr.instruments.doctor.stack import Stack
from flowcorr.instruments.step_files import trained_log_probs
from flowcorr.instruments.steps import ages_of

_SAME = 1e-6  # relative: log-probs of one sample, captured and dumped in float32


@dataclass(frozen=True, kw_only=True, eq=False)
class Captured:
    """The input of the checks of captured samples.

    Attributes:
        stack: the model with the samples.
        step: their training step.
        earlier: captured samples of earlier training steps.
        pool: all prompts that were captured, those of the nearest training steps first.
        config: the recipe that replays them, which brings its reward; None for a plain pipeline.
        terms: the files of dumped terms by training step.
    """

    stack: Stack
    step: int
    earlier: Mapping[int, ReplaySamples]
    pool: Sequence[str]
    config: Config | None
    terms: Mapping[int, Path]

    @cached_property
    def legs(self) -> Legs:
        """The legs that can be replayed."""
        return Legs(self.stack)

    @cached_property
    def replayed(self) -> Mapping[str, Finding]:
        """The findings of the replay, by check."""
        return examine_inputs(self.legs, self.pool)

    @cached_property
    def trained(self) -> Finding | None:
        """The finding on the trainer's log-probs of the captured samples; None where they were not dumped."""
        log_probs = self._trained_log_probs()
        return None if log_probs is None else examine_trainer(self.stack, log_probs, self.pool)

    def _trained_log_probs(self) -> Tensor | None:
        """`[n, T]`, those of the dumped samples that were captured; None where newer weights scored them."""
        own, path = self.stack.samples.tensors().get("log_probs"), self.terms.get(self.step)
        if own is None or path is None:
            return None
        terms = dumps.load(path)
        if terms.rollout_log_probs.shape[1:] != own.shape[1:] or (
            terms.bypass and terms.before_update is None
        ):
            return None
        near = torch.cdist(own.double(), terms.rollout_log_probs.double(), p=math.inf)
        rounding = _SAME * own.double().abs().amax(1).clamp(min=1)
        if bool((near.amin(1) > rounding).any()):
            return None
        rows = near.argmin(1)
        found, ages = trained_log_probs(terms)[rows], ages_of({self.step: terms}).get(self.step)
        # In bypass mode the current policy has learned, where it is not known that it has not.
        marks = terms.before_update
        learned = terms.bypass and (marks is None or bool((marks[rows] != 1).any()))
        newer = ages is not None and bool((ages[rows] > 0).any())
        return None if learned or newer or not bool(found.isfinite().all()) else found
