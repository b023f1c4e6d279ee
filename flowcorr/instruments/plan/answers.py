"""The numbers of a plan: memory and time by phase, and changes that need less memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from flowcorr.instruments.plan.devices import Gpu, Speed

MEMORY_TOLERANCE, FRAGMENTATION = 0.05, 0.08
MARGIN = 1 + MEMORY_TOLERANCE + FRAGMENTATION
"""A peak times this must fit the GPU. It covers the prediction's error, fragmentation and CUDA's own memory."""

SHARED = "shared_memory"
"""The cause of the finding on a GPU that trainer and engine share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Peak bytes on a GPU.

    Attributes:
        phases: of the trainer, by phase.
        engine: of a rollout engine in its own process; 0 without one.
        shared: of a GPU that both share; None where they cannot.
        update_fixed, update_a_sample: those of the update without samples, and for each sample of a micro-batch.
    """

    phases: Mapping[str, float]
    engine: float
    shared: float | None
    update_fixed: float
    update_a_sample: float

    @property
    def trainer(self) -> float:
        return max(self.phases.values())

    @property
    def with_one_sample(self) -> float:
        """Peak bytes of the trainer with a micro-batch of one sample."""
        return max({**self.phases, "update": self.update_fixed + self.update_a_sample}.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One phase of a step.

    Attributes:
        name: its name.
        where: the process whose GPU computes it, or the host: its CPU, or a reward's Ray worker.
        flops: floating point operations.
        seconds: the predicted time; None if it cannot be predicted.
    """

    name: str
    where: Literal["trainer", "engine", "host"]
    flops: float = 0.0
    seconds: float | None = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Memory and time that a run needs on a GPU.

    Attributes:
        title: the recipe, with its overrides.
        gpu: the GPU of each rank.
        ranks: training ranks.
        images: images of one rank in one step.
        micro_batch: samples in one forward pass of the update.
        largest_micro_batch: the most samples that fit; 0 if one does not.
        memory: peaks of both processes.
        phases: of a step, in their order.
        overlaps: whether the engine samples the next step while the trainer trains.
        speeds: the share of the peak that trainer and engine are taken to reach.
        changes: overrides with which the trainer needs less, with the memory under each.
        shared_changes: overrides with which a shared GPU needs less.
        engine_changes: overrides with which an engine of its own needs less, with its peak.
        other_changes: what else saves memory, in words.
    """

    title: str
    gpu: Gpu
    ranks: int
    images: int
    micro_batch: int
    largest_micro_batch: int
    memory: Memory
    phases: tuple[Phase, ...]
    overlaps: bool
    speeds: Mapping[str, Speed]
    changes: Mapping[str, Memory]
    shared_changes: Mapping[str, float]
    engine_changes: Mapping[str, float]
    other_changes: tuple[str, ...]

    def seconds(self, *names: str) -> float:
        """Predicted seconds in one step of the phases with these names, or of the whole step without names."""
        if names:
            return sum(phase.seconds or 0.0 for phase in self.phases if phase.name in names)
        sides = {"trainer": 0.0, "engine": 0.0}
        for phase in self.phases:
            sides["engine" if phase.where == "engine" else "trainer"] += phase.seconds or 0.0
        return max(sides.values()) if self.overlaps else sum(sides.values())

    def fits(self, peak: float | None) -> bool:
        """Whether `peak` bytes fit the GPU with the margin."""
        return peak is not None and peak * MARGIN <= self.gpu.memory

    @property
    def fitting(self) -> bool:
        """Whether the run fits as configured, if the engine has its own GPU."""
        return self.fits(self.memory.trainer) and self.fits(self.memory.engine)


def gigabytes(size: float) -> str:
    """`size` bytes as text; 1 GB is 1e9 bytes."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def duration(seconds: float) -> str:
    """`seconds` as text."""
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"
