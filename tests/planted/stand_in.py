"""Plants known faults in an engine in process, and says which check names each, and down to which size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from flowcorr.actor import DiffusionActor
from flowcorr.config.schema import Config
from flowcorr.correction.describe import drift_metrics
from flowcorr.data import PromptStream
from flowcorr.errors import BackendError, BatchError, ConfigError
from flowcorr.health.rules import NUM_ELEMENTS, units_of
from flowcorr.instruments.doctor.examination import examine, first_prompts
from flowcorr.instruments.outcome import Report
from flowcorr.metrics import Metrics
from flowcorr.models.prompt_cache import PromptCache
from flowcorr.questions.noise import FirstScores
from flowcorr.records import Prompt
from flowcorr.rewards import RewardOutput
from flowcorr.rollout import InProcessEngine
from flowcorr.rollout.precision import ROUNDINGS, coarse_weights, trainer_quantization
from flowcorr.trainer.collect import collect, score
from flowcorr.trainer.measurements import measure_replay
from flowcorr.trainer.run import TrainingRun
from flowcorr.trainer.setup import load_model
from tests.judging import examine_step
from tests.planted.fault import Fault, smallest_named
from tests.planted.plants import Plant, own_engine
from tests.planted.table import FAULTS

MAX_IMAGES = 2  # a prompt
_EMULATED = {"nf4": "int4"}  # what `rollout.emulate` lacks, and the next coarser format
NUM_SIZES = 4
TRAINING_STEP = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Drilled:
    """What the checks say of one planted fault.

    Attributes:
        fault: the fault.
        named_by: the check of the doctor that fails, the one that warns, or the rule that speaks at the first training
            step; empty if nothing does.
        smallest: the smallest size that was tried and named; None for a fault without a size, or one that is not named.
        unseen: the largest smaller size that was tried and not named; None if all were named.
    """

    fault: Fault
    named_by: str
    smallest: float | None = None
    unseen: float | None = None


class Bench:
    """An actor beside which engines with planted faults are examined.

    The engine is one in process with weights of its own, in the precision of the run's; that of another engine is taken
    over as well as one in process can have it. Where only the trainer's weights are quantized, only the engine's are
    here.

    Args:
        config: the run's configuration.
        num_prompts: how many prompts, at least 2.
        float32: see `examine`.

    Raises:
        ConfigError: `num_prompts` is too small, the training prompts have one text, or something in `config` cannot
            work.
    """

    def __init__(self, config: Config, *, num_prompts: int, float32: bool | None) -> None:
        rollout = config.rollout
        coarse = [_EMULATED.get(name, name) for name in coarse_weights(config)]
        emulate = max(coarse, key=lambda name: ROUNDINGS[name].plain, default="none")
        if trainer_quantization(config) != "none":  # an engine that emulates it gives the same gap
            config = replace(config, model=replace(config.model, quantization="none"))
        self.config = replace(
            config,
            rollout=replace(
                rollout,
                name="in_process",
                placement="local",
                emulate=emulate,  # type: ignore[arg-type]
                engine={},
                n=min(rollout.n, MAX_IMAGES),
                prompts_per_step=num_prompts,
            ),
        )
        self._prompts = first_prompts(config, num_prompts)
        if len(self._prompts) < 2:
            raise ConfigError(
                f"data.path={config.data.path!r} has one training prompt, and planted faults mix prompts up; give at "
                "least 2 different ones"
            )
        self._float32 = float32
        self.actor = DiffusionActor(load_model(self.config), self.config)
        self._cache = PromptCache(self.actor.family, self.actor.guidance, self._prompts)

    def report(self, plant: Plant | None = None) -> Report:
        """The doctor's report on an engine with a fault, or on a clean one.

        Raises:
            BackendError: the engine fails.
            BatchError: likewise.
        """
        return examine(
            self.actor,
            self._engine(plant),
            self._cache(self._prompts),
            prompts=self._prompts,
            float32=self._float32,
        )

    def rules(self, plant: Plant | None = None) -> list[str]:
        """The rules that speak at the first training step, without waiting for more steps.

        Raises:
            BackendError: the step would stop the run.
            BatchError: likewise.
        """
        config, actor = self.config, self.actor
        run = TrainingRun(
            config=config,
            actor=actor,
            engine=self._engine(plant),
            cache=self._cache,
            prompts=PromptStream(tuple(self._prompts), seed=config.trainer.seed),
            reward=_equal_scores,
        )
        samples = collect(run, self._prompts, range(len(self._prompts)), TRAINING_STEP)
        scored = score(run, samples)
        rollout = samples.rollout
        noise = FirstScores(rollout, actor, TRAINING_STEP)
        old = actor.log_probs(rollout, observe=noise)
        replay, window = measure_replay(run, samples, scored, TRAINING_STEP)
        metrics = Metrics(
            samples.metrics,
            drift_metrics(
                old.log_probs,
                rollout.log_probs,
                mask=(old.log_probs + rollout.log_probs).isfinite(),
                step_kl=None,
                prefix="rollout_corr/",
            ),
            noise.metrics(),
            replay,
            window.metrics(),
        )
        units = units_of(config, {NUM_ELEMENTS: rollout.num_elements})
        found = examine_step(metrics.compute(), units)
        return [finding.cause for finding in found if finding.level != "note"]

    def _engine(self, plant: Plant | None) -> InProcessEngine:
        engine = own_engine(self.actor, self.config)
        if plant is not None:
            plant(engine)
        engine.sync(self.actor.weights.snapshot())
        return engine


def drill(bench: Bench, faults: Sequence[Fault] = FAULTS) -> Iterator[Drilled]:
    """Plant each fault that the run can have in turn, at its own size and then at smaller ones while it is named.

    Raises:
        BackendError: the doctor fails without any fault.
    """
    clean = bench.report()
    if clean.causes():
        raise BackendError(
            f"without a planted fault the doctor fails on {', '.join(clean.causes())}; repair that first, as flowcorr "
            "doctor says"
        )
    usual = {*clean.causes("warning"), *bench.rules()}
    for fault in faults:
        if fault.applies(bench.config):
            yield _drilled(bench, fault, usual)


def _drilled(bench: Bench, fault: Fault, usual: set[str]) -> Drilled:
    named_by = _named_by(bench, fault.plant(fault.size or 0.0), usual)
    if fault.size is None or not named_by:
        return Drilled(fault=fault, named_by=named_by, unseen=None if named_by else fault.size)
    smallest, unseen = smallest_named(
        lambda size: bool(_named_by(bench, fault.plant(size), usual)), fault.size, NUM_SIZES
    )
    return Drilled(fault=fault, named_by=named_by, smallest=smallest, unseen=unseen)


def _named_by(bench: Bench, plant: Plant, usual: set[str]) -> str:
    """The first that names the fault: a check that fails, then one that warns, then a rule of the training step.

    Args:
        bench: examines it.
        plant: plants it.
        usual: checks that warn and rules that speak without a fault.
    """
    try:
        report = bench.report(plant)
        if report.causes():
            return report.causes()[0]
        warned = [check for check in report.causes("warning") if check not in usual]
        if warned:
            return f"{warned[0]} (warns)"
        broken = [rule for rule in bench.rules(plant) if rule not in usual]
    except (BackendError, BatchError) as error:
        return f"stops: {error}"
    return f"training: {broken[0]}" if broken else ""


def _equal_scores(images: np.ndarray, prompts: list[Prompt]) -> RewardOutput:
    """A reward that takes no time."""
    return RewardOutput(scores=np.zeros(len(prompts)))
