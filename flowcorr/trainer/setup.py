"""From a configuration to the two stacks, and to everything else that a training step works with."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from flowcorr import distributed
from flowcorr.actor import DiffusionActor
from flowcorr.config import resolve_engine
from flowcorr.config.families import check_sampling
from flowcorr.config.run import SERVED
from flowcorr.config.schema import Config
from flowcorr.config.task import RewardTerm
from flowcorr.data import PromptSet, PromptStream, load_prompts, prompts_digest
from flowcorr.errors import ConfigError, unknown_choice
from flowcorr.models import CannotCompare, Guidance, ModelFamily, compare_as_sampled, load_family
from flowcorr.models.negatives import check_negative_prompts
from flowcorr.models.prompt_cache import PromptCache
from flowcorr.records import Prompt
from flowcorr.rewards import (
    ThreadReward,
    WeightedSum,
    build_reward,
    check_prompts,
    frame_rules,
    known_scores,
)
from flowcorr.rewards.combine import computes_on_gpu
from flowcorr.rollout import RolloutEngine
from flowcorr.rollout.base import shards_weights
from flowcorr.rollout.build import build_backend, check_installed
from flowcorr.rollout.vllm_omni.options import num_gpus
from flowcorr.rollout.vllm_omni.probe import ActorProbe, actor_probe
from flowcorr.trainer import out_of_memory
from flowcorr.trainer.run import TrainingRun
from flowcorr.workers.pool import OnEvent, ignore_event
from flowcorr.workers.reward import RayReward
from flowcorr.workers.rollout import RayRollout

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stacks:
    """The training stack and the rollout stack of one configuration, and embeddings of prompts for both."""

    actor: DiffusionActor
    engine: RolloutEngine
    cache: PromptCache


def load_model(config: Config) -> ModelFamily:
    """Load the model on this rank's device; torch gets `trainer.num_threads` first.

    Raises:
        ConfigError: the device, the pipeline or its family cannot be used, or several frames are asked of a
            family that makes images.
        BackendError: the device has no memory left.

    Warns:
        UserWarning: guidance is set by a key that the family does not read.
    """
    if config.trainer.num_threads is not None:
        torch.set_num_threads(config.trainer.num_threads)
    device = distributed.local_device(config.trainer.device)
    with out_of_memory.explained(config, lambda: out_of_memory.LOADING):
        family = load_family(
            config.model,
            device,
            reference_size=(config.sampling.height, config.sampling.width),
            transformer_on_host=shards_weights(config),
        )
    check_sampling(
        config.sampling, family.name, guidance_key=family.guidance_key, makes_videos=family.makes_videos
    )
    return family


def build_stacks(
    config: Config, family: ModelFamily, prompts: Sequence[Prompt], *, on_event: OnEvent = ignore_event
) -> Stacks:
    """Build the actor, embed prompts, and build the rollout engine, which has no weights before its first `sync`.

    The text encoders are gone before an engine starts that may share their GPU.

    Args:
        config: the configuration of both.
        family: the model as `load_model` returned it.
        prompts: the prompts.
        on_event: gets a record of each event that concerns Ray workers.

    Raises:
        ConfigError: something in `config` cannot work.
        BackendError: the engine does not start, or the device has no memory left.

    Warns:
        UserWarning: prompts have negative prompts, and guidance reads none.
    """
    family.check_references(prompts)
    check_negative_prompts(family, prompts, Guidance.of(config.sampling))
    with out_of_memory.explained(config, lambda: out_of_memory.LOADING):
        actor = DiffusionActor(family, config)
    with distributed.fail_together("starting the rollout engine"):
        probe = None
        if resolve_engine(config.rollout.name).takes_probe:
            with out_of_memory.explained(config, lambda: out_of_memory.PROBING):
                references = prompts[0].images
                probe = actor_probe(family, config, actor.weights.snapshot().tensors, references)
        with out_of_memory.explained(config, lambda: out_of_memory.ENCODING):
            cache = PromptCache(family, actor.guidance, prompts)
        engine = _build_engine(config, actor, probe, on_event)
    return Stacks(actor=actor, engine=engine, cache=cache)


def build_run(config: Config, *, on_event: OnEvent = ignore_event) -> tuple[TrainingRun, PromptSet]:
    """Build all parts of a training step, beginning with parts that can fail quickly.

    Args:
        config: the run's configuration.
        on_event: gets a record of each event that concerns workers and samples.

    Warns:
        UserWarning: a family of the user's own does not draw as its pipeline does.

    Raises:
        ConfigError: something in `config` cannot work.
        MissingExtraError: an extra that the engine or a reward needs is not installed.
        BackendError: the engine or a worker does not start, or the device has no memory left.
    """
    with contextlib.ExitStack() as on_failure:
        with distributed.fail_together("loading the model"):
            check_installed(config)
            _check_worker_gpus(config)
            _check_best_metric(config)
            if config.trainer.device.startswith("cuda:"):  # rewards put their models on the current GPU
                torch.cuda.set_device(distributed.local_device(config.trainer.device))
            prompts = load_prompts(config.data)
            check_prompts(config.reward, prompts.train, prompts.heldout)
            of_evaluations = config.reward.evaluation_gold
            gold = build_reward((), of_evaluations, timeout=config.reward.timeout) if of_evaluations else None
            reward = _build_reward(config, on_event)
            if isinstance(reward, RayReward | ThreadReward):
                on_failure.callback(reward.close)
            _say_cuts(reward, (*prompts.train, *prompts.heldout))
            if gold is not None:
                _say_cuts(gold, prompts.heldout)
            family = load_model(config)
        if ":" in config.model.family and not shards_weights(config):
            _check_adapter(config, family, prompts.train)
        _log_frames(config, family, on_event)
        family.cuts.add((*prompts.train, *prompts.heldout))
        stacks = build_stacks(config, family, (*prompts.train, *prompts.heldout), on_event=on_event)
        on_failure.pop_all()
    run = TrainingRun(
        config=config,
        actor=stacks.actor,
        engine=stacks.engine,
        cache=stacks.cache,
        prompts=PromptStream(prompts.train, seed=config.trainer.seed),
        prompts_digest=prompts_digest(prompts),
        reward=reward,
        gold=gold,
        on_event=on_event,
    )
    return run, prompts


def _check_adapter(config: Config, family: ModelFamily, prompts: Sequence[Prompt]) -> None:
    """Compare a family of the user's own with its pipeline.

    Warns:
        UserWarning: it differs.
    """
    try:
        result = compare_as_sampled(family, prompts[:2], config.sampling)
    except CannotCompare as error:
        logger.info("model.family=%s was not compared with its pipeline: %s", family.place(), error)
        return
    for difference in result.differences:
        warnings.warn(
            f"model.family={family.place()} differs from its pipeline's own call in {difference.sentence}; mend it, or "
            "train what others will not see when they load the model",
            UserWarning,
            stacklevel=3,
        )


def _check_worker_gpus(config: Config) -> None:
    """Check that Ray workers get the GPU that they compute on; without `num_gpus` they see none.

    Raises:
        ConfigError: an engine with GPUs of its own would find none, and fail after minutes.

    Warns:
        UserWarning: a reward's model would run on a CPU thread.
    """
    if not torch.cuda.is_available():
        return
    rollout, reward = config.rollout, config.reward
    if (
        rollout.placement == "ray"
        and resolve_engine(rollout.name).own_processes
        and not rollout.worker_resources.get("num_gpus")
    ):
        raise ConfigError(
            f"rollout.worker_resources={dict(rollout.worker_resources)} gives workers of {rollout.name} no GPU; set "
            f"rollout.worker_resources={{num_gpus: {num_gpus(rollout.engine)}}}"
        )
    if reward.placement == "ray" and not reward.worker_resources.get("num_gpus"):
        for term in reward.step_terms:
            if computes_on_gpu(term):
                warnings.warn(
                    f"reward.worker_resources={dict(reward.worker_resources)} leaves {term.name} on a CPU; set "
                    "reward.worker_resources={num_gpus: 0.25}, or reward.placement=thread to use the trainer's GPU",
                    UserWarning,
                    stacklevel=3,
                )


def _check_best_metric(config: Config) -> None:
    """Check that an evaluation will yield `trainer.best_metric`, if the names of all scores are known.

    A Ray worker may be the only one that can import a reward of the user's own, so there it is not imported.
    """
    terms = (*config.reward.terms, *config.reward.gold)
    scores = known_scores(config.reward.terms, config.reward.gold, own=config.reward.placement != "ray")
    name = config.trainer.best_metric
    if scores is None or name.startswith(("eval/image/", f"{SERVED}image/")):
        return
    bases = ("eval/", SERVED) if config.trainer.eval_on == "both" else ("eval/",)
    choices = [base + score for base in bases for score in ("reward", "reward_std", *sorted(scores))]
    if name not in choices:
        own = next((term.name.rpartition(":")[2] for term in terms if ":" in term.name), None)
        hint = "" if own is None else f"; if {own} returns it, say so by {own}.extras = (NAME,)"
        raise ConfigError(unknown_choice("trainer.best_metric", name, choices) + hint)


def _log_frames(config: Config, family: ModelFamily, on_event: OnEvent) -> None:
    """Log by which rule each reward of images gets the frames of videos.

    Warns:
        UserWarning: a rule is set, and the model makes images.
    """
    terms = (*config.reward.terms, *config.reward.gold)
    if family.makes_videos:
        on_event("frames", rules=frame_rules(terms, own=config.reward.placement != "ray"))
        return
    for term in terms:
        if term.frames != RewardTerm(name=term.name).frames:
            warnings.warn(
                f"reward.terms[{term.name}].frames={term.frames} has no effect: a model of the family {family.name} "
                "makes images",
                UserWarning,
                stacklevel=3,
            )


def _build_reward(config: Config, on_event: OnEvent) -> WeightedSum | ThreadReward | RayReward:
    settings = config.reward
    if settings.placement == "ray":
        return RayReward(
            replace(settings, gold=settings.step_gold),
            address=config.rollout.ray_address,
            num_threads=config.trainer.num_threads,
            on_event=on_event,
        )
    reward = build_reward(settings.terms, settings.step_gold, timeout=settings.timeout)
    in_thread = settings.placement == "thread" or (settings.placement == "auto" and reward.overlaps)
    return ThreadReward(reward) if in_thread else reward


def _say_cuts(reward: WeightedSum | ThreadReward | RayReward, prompts: Sequence[Prompt]) -> None:
    """Log which rewards do not read their prompts to the end."""
    for sentence in reward.describe_cuts(prompts):
        logger.warning(sentence)


def _build_engine(
    config: Config, actor: DiffusionActor, probe: ActorProbe | None, on_event: OnEvent
) -> RolloutEngine:
    """The rollout engine that `rollout` asks for."""
    if config.rollout.placement == "ray":
        return RayRollout(config, probe=probe, on_event=on_event)
    weights = actor.weights
    engine = build_backend(config, actor.family, merge=weights.merged, base=weights.untrained, probe=probe)
    weights.untrained = None  # the engine has a copy of its own
    return engine
