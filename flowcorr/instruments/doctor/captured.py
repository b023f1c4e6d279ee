"""The input of checks on another trainer's run: the captured samples of one training step, and their replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

from flowcorr.config.schema import Config
from flowcorr.dumps.replay import ReplaySamples
from flowcorr.instruments.doctor.hypotheses import examine_inputs
from flowcorr.instruments.doctor.legs import Legs
from flowcorr.instruments.doctor.stack import Stack
from flowcorr.instruments.finding import Finding


class Captured:
    """The input of the checks of captured samples.

    Args:
        stack: the model with the samples.
        step: their training step.
        earlier: captured samples of earlier training steps.
        pool: all prompts that were captured, those of the nearest training steps first.
        config: the recipe that replays them, which brings its reward; None for a plain pipeline.
        terms: the files of dumped terms by training step.
    """

    is_captured = True

    def __init__(
        self,
        stack: Stack,
        step: int,
        *,
        earlier: Mapping[int, ReplaySamples],
        pool: Sequence[str],
        config: Config | None = None,
        terms: Mapping[int, Path],
    ) -> None:
        self.stack, self.step, self.earlier, self.pool = stack, step, earlier, pool
        self.config, self.terms = config, terms

    @cached_property
    def legs(self) -> Legs:
        """The legs that can be replayed."""
        return Legs(self.stack)

    @cached_property
    def replayed(self) -> Mapping[str, Finding]:
        """The findings of the replay, by check."""
        return examine_inputs(self.stack, self.legs, self.pool)
