"""A plan, and the sentences that sum it up: whether it fits, and what would."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from flowcorr.plan.attention import SAYS, operator_of
from flowcorr.plan.devices import GPUS, Gpu, Utilisation
from flowcorr.plan.engine import EngineSpeed

MEMORY_TOLERANCE, FRAGMENTATION, TIME_TOLERANCE = 0.05, 0.08, 0.25
MARGIN = 1 + MEMORY_TOLERANCE + FRAGMENTATION
"""A peak times this must fit the GPU. It covers the prediction's error, fragmentation and CUDA's own memory."""
BEFORE_TRAINING = ("load", "encode prompts")
_BEFORE_ENGINE = ("load", "encode")


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One phase of a run, on one rank.

    Attributes:
        name: its name in the table.
        where: the process whose GPU computes it, or the host: its CPU, or a reward's Ray worker.
        peak: peak bytes of that process on its GPU; None on the host.
        flops, moved: floating point operations, and bytes of memory traffic.
        seconds: the predicted time; None if it cannot be predicted.
        fastest, slowest: the ends of its band.
    """

    name: str
    where: Literal["trainer", "engine", "host"]
    peak: float | None
    flops: float = 0.0
    moved: float = 0.0
    seconds: float | None = 0.0
    fastest: float = 0.0
    slowest: float = 0.0

    @classmethod
    def within_tolerance(cls, *, seconds: float | None, **fields: Any) -> Phase:
        """A phase whose time lies within `TIME_TOLERANCE`."""
        low, high = (1 - TIME_TOLERANCE) * (seconds or 0.0), (1 + TIME_TOLERANCE) * (seconds or 0.0)
        return cls(seconds=seconds, fastest=low, slowest=high, **fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class Merging:
    """Seconds of a step that an engine saves in sampling if it merges the adapter, and that its sync takes more."""

    sampling: float
    sync: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Peak bytes on a GPU, by phase.

    Attributes:
        load, encode: the trainer before the first step, with text encoders.
        idle: the trainer between two phases.
        sample, decode: a trainer that samples by itself.
        reward, recompute, update, sync: the trainer.
        update_without_samples: the update without its forward and backward passes.
        update_a_sample: these passes, for each sample of a micro-batch.
        engine: a rollout engine in its own process; 0 without one.
        engine_sleeps: whether the engine frees its memory while the trainer computes.
        may_share: whether trainer and engine run on one machine, and so may share a GPU.
    """

    load: float
    encode: float
    idle: float
    sample: float
    decode: float
    reward: float
    recompute: float
    update: float
    update_without_samples: float
    update_a_sample: float
    sync: float
    engine: float
    engine_sleeps: bool
    may_share: bool

    @property
    def by_phase(self) -> dict[str, float]:
        """Peak bytes of the trainer by phase."""
        names = ["load", "encode", "reward", "recompute", "update", "sync"]
        if not self.engine:
            names += ["sample", "decode"]
        return {name: getattr(self, name) for name in names}

    @property
    def trainer(self) -> float:
        return max(self.by_phase.values())

    @property
    def with_one_sample(self) -> float:
        """Peak bytes of the trainer with a micro-batch of one sample."""
        update = self.update_without_samples + self.update_a_sample
        return max(update, *(peak for name, peak in self.by_phase.items() if name != "update"))

    @property
    def shared(self) -> float:
        """Peak bytes of a GPU that trainer and engine share."""
        if self.engine_sleeps:
            return max(self.trainer, self.idle + self.engine)
        beside = max(peak for name, peak in self.by_phase.items() if name not in _BEFORE_ENGINE)
        return max(self.load, self.encode, beside + self.engine)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Memory and time that a run needs on a device.

    Attributes:
        title: the recipe, with its overrides.
        gpu: the device of each rank.
        utilisation: the shares of the device's peak speeds that a run reaches.
        ranks: training ranks.
        images: images of one rank in one step.
        phases: in the order of a run.
        memory: peaks of both processes.
        micro_batch: samples in one forward pass of the update.
        mini_batch: samples of one optimizer step.
        bypass: whether the run is in bypass mode.
        overlaps: whether the engine samples the next step while the trainer trains.
        engine: the speed of the engine; None if it computes as the trainer does.
        merging: what merging the adapter into the engine's weights would change; None if it does not apply.
        attention: the backend of diffusers that `model.attention` names, or None.
        ways_to_fit: overrides that save the trainer much memory, with the memory under each.
        ways_to_share: overrides that save memory on a shared GPU, with the peak under each.
        other_ways: changes that save memory of the update, in words, for a run that fits by none of these overrides.
        engine_ways: overrides that save an engine of its own memory, with its peak under each.
    """

    title: str
    gpu: Gpu
    utilisation: Utilisation
    ranks: int
    images: int
    phases: tuple[Phase, ...]
    memory: Memory
    micro_batch: int
    mini_batch: int
    bypass: bool
    overlaps: bool = False
    engine: EngineSpeed | None = None
    merging: Merging | None = None
    attention: str | None = None
    ways_to_fit: Mapping[str, Memory] = field(default_factory=dict)
    ways_to_share: Mapping[str, float] = field(default_factory=dict)
    other_ways: tuple[str, ...] = ()
    engine_ways: Mapping[str, float] = field(default_factory=dict)

    def seconds(self, *names: str) -> float:
        """Predicted seconds in one step of the phases with these names, or of the whole step without names."""
        if names:
            return sum(phase.seconds or 0.0 for phase in self.phases if phase.name in names)
        return self._step(lambda phase: phase.seconds or 0.0)

    @property
    def band(self) -> tuple[float, float]:
        """The fastest and the slowest step that is predicted."""
        return self._step(lambda phase: phase.fastest), self._step(lambda phase: phase.slowest)

    def _step(self, time: Callable[[Phase], float]) -> float:
        """Seconds of a step whose phases take `time`; where sampling overlaps with training, of the longer side."""
        times = {"trainer": 0.0, "engine": 0.0}
        for phase in self.phases:
            if phase.name not in BEFORE_TRAINING:
                times["engine" if phase.where == "engine" else "trainer"] += time(phase)
        return max(times.values()) if self.overlaps else sum(times.values())

    def fits(self, peak: float) -> bool:
        """Whether `peak` bytes fit the GPU with the margin."""
        return peak * MARGIN <= self.gpu.memory

    def largest_micro_batch(self, beside: float = 0.0, memory: Memory | None = None) -> int:
        """The largest `actor.micro_batch_size` that fits beside `beside` other bytes; 0 if none does.

        Args:
            beside: bytes of others.
            memory: peaks under other keys; None takes those of the run.
        """
        memory = memory or self.memory
        room = self.gpu.memory / MARGIN - beside - memory.update_without_samples
        return max(0, min(int(room / memory.update_a_sample), self.mini_batch))

    def largest_shared_micro_batch(self) -> int:
        """The largest `actor.micro_batch_size` with which trainer and engine fit one GPU; 0 if none does."""
        memory = self.memory
        beside = 0.0 if memory.engine_sleeps else memory.engine
        others = max(
            peak for name, peak in memory.by_phase.items() if name not in (*_BEFORE_ENGINE, "update")
        )
        fits = self.fits(max(others, memory.idle + memory.engine - beside) + beside)
        return self.largest_micro_batch(beside) if fits else 0

    @property
    def fitting(self) -> bool:
        """Whether the run fits as configured, if the engine has its own GPU."""
        return self.fits(self.memory.trainer) and self.fits(self.memory.engine)

    def answers(self) -> tuple[str, ...]:
        """Sentences: whether it fits, which micro-batch fits, whether a GPU can be shared, what bypass mode saves."""
        return (
            self._fit(),
            self._micro_batch(),
            *self._sharing(),
            self._smallest_cards(),
            self._attention(),
            *self._engine(),
            self._bypass(),
        )

    def _attention(self) -> str:
        named, operator = self.attention or "null", operator_of(self.attention)
        return f"The trainer's attention (model.attention={named}): {SAYS[operator]}."

    def _engine(self) -> tuple[str, ...]:
        answers = []
        if self.engine:
            share = (
                f"{self.engine.share:.0%} of the peak, {self.engine.slowest:.0%} to {self.engine.fastest:.0%}"
            )
            answers.append(f"The engine ({self.engine.name}) samples at {share}: {self.engine.why}.")
        if self.overlaps:
            answers.append("Sampling overlaps with training: a step takes as long as the longer of the two.")
        if self.merging:
            sampling, sync = self.merging.sampling, self.merging.sync
            answers.append(
                f"rollout.engine.weight_sync=merged would save {duration(sampling)} of sampling and add "
                f"{duration(sync)} to the sync. It rounds weights and adapter together to the engine's dtype, in which "
                "an early adapter may vanish; `flowcorr audit` measures that gap."
            )
        return tuple(answers)

    def to_mapping(self) -> dict[str, Any]:
        """The plan for JSON."""
        return {
            **asdict(self),
            "tolerance": {"memory": MEMORY_TOLERANCE, "fragmentation": FRAGMENTATION, "time": TIME_TOLERANCE},
            "trainer_peak": self.memory.trainer,
            "shared_peak": self.memory.shared if self.memory.may_share else None,
            "fits": self.fitting,
            "shared_fits": self.fits(self.memory.shared) if self.memory.may_share else None,
            "largest_micro_batch": self.largest_micro_batch(),
            "step_seconds": self.seconds(),
            "step_band": self.band,
            "answers": self.answers(),
        }

    def _fit(self) -> str:
        by_phase = self.memory.by_phase
        highest = max(by_phase, key=lambda name: by_phase[name])
        peak, card = by_phase[highest], f"{self.gpu.name} ({gigabytes(self.gpu.memory)})"
        needed = gigabytes(peak * MARGIN)
        size = f"the trainer needs {gigabytes(peak)} at its peak, in {highest}; with the margin {needed}"
        if self.fits(peak):
            return f"Fits {card}: {size}."
        verdict = "May not fit" if peak <= self.gpu.memory else "Does not fit"
        for overrides, memory in self.ways_to_fit.items():
            if self.fits(memory.trainer):
                return f"{verdict} {card}: {size}. With {overrides} it needs {gigabytes(memory.trainer)} and fits."
        return f"{verdict} {card}: {size}."

    def _micro_batch(self) -> str:
        largest = self.largest_micro_batch()
        now = f"actor.micro_batch_size={self.micro_batch}"
        if largest >= self.micro_batch:
            return f"{now} fits; the largest that does is {largest}."
        if largest:
            return f"{now} does not fit; use actor.micro_batch_size={largest}."
        needed = (self.memory.update_without_samples + self.memory.update_a_sample) * MARGIN
        start = f"No actor.micro_batch_size fits: one sample takes {gigabytes(needed)} with the margin"
        for overrides, memory in self.ways_to_fit.items():
            if size := self.largest_micro_batch(memory=memory):
                return f"{start}; use {overrides}, with which the largest that fits is {size}."
        ways = ", ".join(("a GPU with more memory", *self.other_ways))
        return f"{start}; use {ways}, or fewer images a step."

    def _sharing(self) -> tuple[str, ...]:
        memory = self.memory
        if not memory.engine:
            return ("The trainer samples by itself, so no engine needs memory.",)
        engine = f"the engine {gigabytes(memory.engine)}"
        if not memory.may_share:
            return (f"The engine has GPUs of its own, and needs {gigabytes(memory.engine)} on each.",)
        if self.fits(memory.shared):
            return (f"Trainer and engine can share a GPU: together {gigabytes(memory.shared)}, {engine}.",)
        needed = f"{gigabytes(memory.shared)}, with the margin {gigabytes(memory.shared * MARGIN)}"
        start = f"Trainer and engine cannot share a GPU: together {needed}, {engine}"
        if room := self.largest_shared_micro_batch():
            return (f"{start}; with actor.micro_batch_size={room} they can.",)
        another = "if the run sees another GPU, the engine takes that one"
        for overrides, peak in self.ways_to_share.items():
            if self.fits(peak):
                return (f"{start}; {another}, and with {overrides} they need {gigabytes(peak)} and can.",)
        return (f"{start}; {another}.",)

    def smallest_for_trainer(self) -> tuple[Gpu, str] | None:
        """The known GPU of least memory that the trainer fits, and the overrides with which it does; None if none."""
        ways = {"": self.memory, **self.ways_to_fit}
        peaks = {overrides: memory.trainer for overrides, memory in ways.items()}
        for overrides, memory in ways.items():
            keys = " ".join(filter(None, (overrides, "actor.micro_batch_size=1")))
            peaks.setdefault(keys, memory.with_one_sample)
        return _smallest(peaks)

    def smallest_for_engine(self) -> tuple[Gpu, str] | None:
        """The same of an engine in its own process, which samples as many images at once as it is asked for."""
        return _smallest({"": self.memory.engine, **self.engine_ways})

    def _smallest_cards(self) -> str:
        def named(found: tuple[Gpu, str] | None) -> str:
            if found is None:
                return "none of those known"
            gpu, overrides = found
            return f"{gpu.name} with {overrides}" if overrides else gpu.name

        start = f"The smallest card for the trainer: {named(self.smallest_for_trainer())}"
        return (
            f"{start}; for the engine: {named(self.smallest_for_engine())}."
            if self.memory.engine
            else f"{start}."
        )

    def _bypass(self) -> str:
        step, recompute = self.seconds(), self.seconds("recompute")
        whole = f"a step of {duration(step)}"
        if self.bypass:
            return f"Bypass mode has no recompute pass: {whole}."
        return (
            f"Bypass mode (algorithm.rollout_correction.preset=bypass_ppo_clip) would save the recompute pass: "
            f"{duration(recompute)} of {whole}."
        )


def _smallest(peaks: Mapping[str, float]) -> tuple[Gpu, str] | None:
    """The GPU of least memory that one of the peaks fits with the margin, and the first of their names that does."""
    for gpu in sorted(GPUS.values(), key=lambda gpu: gpu.memory):
        for overrides, peak in peaks.items():
            if peak * MARGIN <= gpu.memory:
                return gpu, overrides
    return None


def summary(plan: Plan) -> str:
    """The planned recipe in one line."""
    ranks = "1 rank" if plan.ranks == 1 else f"{plan.ranks} ranks"
    card = plan.gpu
    return (
        f"{plan.title} on {card.name}: {gigabytes(card.memory)}, {card.bandwidth / 1e12:.2f} TB/s, "
        f"{card.bf16 / 1e12:.0f} TFLOP/s in bf16; {ranks}, {plan.images} images a step each"
    )


def gigabytes(size: float) -> str:
    """`size` bytes as text; 1 GB is 1e9 bytes."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def duration(seconds: float) -> str:
    """`seconds` as text."""
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"
