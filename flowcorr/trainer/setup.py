"""From a configuration to the connected parts of a training step."""

from __future__ import annotations

import contextlib

import torch

from flowcorr import distributed
from flowcorr.actor import DiffusionActor
from flowcorr.config.rules import check_guidance
from flowcorr.config.schema import Config
from flowcorr.data import PromptSet, PromptStream, load_prompts
from flowcorr.devices import named_device
from flowcorr.errors import ConfigError
from flowcorr.models import DTYPES, load_family
from flowcorr.models.prompt_cache import PromptCache
from flowcorr.ray_workers import OnEvent, ignore_event
from flowcorr.rewards import Reward, build_reward
from flowcorr.rewards.ray_pool import RayReward
from flowcorr.rollout import RolloutEngine
from flowcorr.rollout.build import build_backend, check_installed
from flowcorr.rollout.ray_pool import RayPool
from flowcorr.trainer.step import Parts


def build_parts(config: Config, *, on_event: OnEvent = ignore_event) -> tuple[Parts, PromptSet]:
    """Load and connect everything that a training step works with; what is quick to fail comes first.

    Args:
        config: the run's configuration.
        on_event: told of what happens to workers and samples.
    """
    with contextlib.ExitStack() as started:
        built = _build_parts(config, on_event, started)
        started.pop_all()
    return built


def _build_parts(config: Config, on_event: OnEvent, started: contextlib.ExitStack) -> tuple[Parts, PromptSet]:
    if config.trainer.num_threads is not None:
        torch.set_num_threads(config.trainer.num_threads)
    device = choose_device(config.trainer.device)
    with distributed.together("loading the model"):
        check_installed(config)
        data = load_prompts(
            config.data.path,
            heldout_fraction=config.data.heldout_fraction,
            num_train=config.data.num_train,
            num_heldout=config.data.num_heldout,
            seed=0,
        )
        reward = _build_reward(config, on_event)
        if isinstance(reward, RayReward):
            started.callback(reward.close)
        family = load_family(
            config.model.path,
            family=config.model.family,
            dtype=DTYPES[config.model.dtype],
            device=device,
            max_sequence_length=config.model.max_sequence_length,
        )
        check_guidance(config, family.name, family.guidance_key)
    actor = DiffusionActor(family, config)
    with distributed.together("starting the rollout engine"):
        engine = build_engine(config, actor, on_event=on_event)
        started.callback(engine.close)
        cache = PromptCache(family, actor.guidance, [prompt.text for prompt in (*data.train, *data.heldout)])
    stream = PromptStream(data.train, seed=config.trainer.seed)
    parts = Parts(
        config=config,
        actor=actor,
        engine=engine,
        cache=cache,
        prompts=stream,
        reward=reward,
        on_event=on_event,
    )
    return parts, data


def _build_reward(config: Config, on_event: OnEvent) -> Reward:
    if config.reward.placement == "local":
        return build_reward(config.reward.terms, config.reward.gold)
    return RayReward(
        config.reward,
        address=config.rollout.ray_address,
        num_threads=config.trainer.num_threads,
        on_event=on_event,
    )


def build_engine(config: Config, actor: DiffusionActor, *, on_event: OnEvent = ignore_event) -> RolloutEngine:
    """The rollout engine that `rollout` asks for; the family's text encoders must still be in place."""
    if config.rollout.placement == "ray":
        return RayPool(config, on_event=on_event)
    return build_backend(
        config,
        actor.family,
        tensors=actor.snapshot().tensors,
        merge=actor.merged_weights,
        base=actor.base,
    )


def choose_device(name: str) -> torch.device:
    """The device that `trainer.device` names; with several ranks, the GPU of this one.

    Raises:
        ConfigError: torch knows no such device, this machine lacks it, or it is one for several ranks.
    """
    device = named_device("trainer.device", name)
    if device.type == "cuda" and distributed.world_size() > 1:
        if device.index is not None:
            raise ConfigError(
                f"trainer.device={name!r} is one GPU for {distributed.world_size()} ranks; use cuda, or auto"
            )
        device = torch.device("cuda", torch.cuda.current_device())  # set when the ranks met
    return device
