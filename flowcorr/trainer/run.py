"""The parts of a training run: actor, engine, prompts, reward, and samples in flight for this and later steps."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from flowcorr.actor import DiffusionActor
from flowcorr.algorithm import AutoMode
from flowcorr.config.schema import Config
from flowcorr.data import PromptStream
from flowcorr.health.gate import Gate
from flowcorr.health.metric import Metric
from flowcorr.health.table import rows_of
from flowcorr.models.prompt_cache import PromptCache
from flowcorr.questions.question import Question, own_questions
from flowcorr.questions.residual_terms import Residuals
from flowcorr.rewards import Reward, ThreadReward
from flowcorr.rollout import RolloutEngine
from flowcorr.rollout.precision import usual_gap
from flowcorr.trainer.served import ServedBase
from flowcorr.workers.pool import OnEvent, ignore_event
from flowcorr.workers.reward import RayReward
from flowcorr.workers.rollout import PendingRollout


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PendingStep:
    """Samples that Ray workers are generating, and the reward call that may already be scoring them."""

    rollout: PendingRollout
    reward: Reward


@dataclass(slots=True, kw_only=True)
class TrainingRun:
    """The parts that every training step uses.

    Attributes:
        config: the run's configuration.
        actor: the training stack.
        engine: the rollout stack.
        cache: embeddings of all prompts.
        prompts: the training prompts in the order in which steps take them.
        prompts_digest: `data.prompts_digest` of the training prompts and the held-out ones.
        reward: scores the images.
        gold: scores the images of evaluations by rewards that training steps leave out, if there are any.
        on_event: called with each event of workers and samples.
        served: the unquantized base, once `trainer.eval_on` has needed it.
        in_flight: samples that Ray workers generate ahead of time, by training step.
        residuals: of all training steps so far.
        mode: the rollout correction in force; with `bypass_mode: auto` it changes between steps.
        gate: stops the run at a fault.
        rows: of all metrics, those of `trainer.metrics` among them.
        questions: those of `trainer.checks`.
        usual_gap: the largest relative error of a velocity that the precision of both stacks explains.
    """

    config: Config
    actor: DiffusionActor
    engine: RolloutEngine
    cache: PromptCache
    prompts: PromptStream
    reward: Reward
    prompts_digest: str = ""
    gold: Reward | None = None
    on_event: OnEvent = ignore_event
    served: ServedBase | None = None
    in_flight: dict[int, PendingStep] = field(default_factory=dict)
    residuals: Residuals = field(default_factory=Residuals)
    mode: AutoMode = field(init=False)
    gate: Gate = field(init=False)
    rows: tuple[Metric, ...] = field(init=False)
    questions: tuple[Question, ...] = field(init=False)
    usual_gap: float = field(init=False)

    def __post_init__(self) -> None:
        config, actor = self.config, self.actor
        self.rows, self.questions = rows_of(config), own_questions(config)
        self.mode, self.gate = AutoMode.of(config), Gate(config, self.rows)
        self.usual_gap = usual_gap(config, actor.family.amplification(actor.guidance))

    def close(self) -> None:
        """End the processes of the engine, and the processes or the thread of the reward."""
        with contextlib.ExitStack() as closing:  # the reward too, if the engine's `close` fails
            if isinstance(self.reward, RayReward | ThreadReward):
                closing.callback(self.reward.close)
            closing.callback(self.engine.close)
