"""From a configuration to the connected parts of a training step."""

from __future__ import annotations

import torch

from flowcorr.actor import DiffusionActor
from flowcorr.config.schema import Config
from flowcorr.data import PromptSet, PromptStream, load_prompts
from flowcorr.errors import ConfigError
from flowcorr.models import DTYPES, load_family
from flowcorr.models.prompt_cache import PromptCache
from flowcorr.rewards import build_reward
from flowcorr.rollout import InProcessEngine, RolloutEngine
from flowcorr.trainer.step import Parts


def build_parts(config: Config) -> tuple[Parts, PromptSet]:
    """Load and connect everything that a training step works with; what is quick to fail comes first."""
    if config.trainer.num_threads is not None:
        torch.set_num_threads(config.trainer.num_threads)
    device = choose_device(config.trainer.device)
    data = load_prompts(
        config.data.path,
        heldout_fraction=config.data.heldout_fraction,
        num_train=config.data.num_train,
        num_heldout=config.data.num_heldout,
        seed=0,
    )
    reward = build_reward(config.reward.terms, config.reward.gold)
    family = load_family(
        config.model.path,
        family=config.model.family,
        dtype=DTYPES[config.model.dtype],
        device=device,
        max_sequence_length=config.model.max_sequence_length,
    )
    actor = DiffusionActor(family, config)
    engine = build_engine(config, actor)
    cache = PromptCache(family, actor.guidance, [prompt.text for prompt in (*data.train, *data.heldout)])
    stream = PromptStream(data.train, seed=config.trainer.seed)
    return Parts(config=config, actor=actor, engine=engine, cache=cache, prompts=stream, reward=reward), data


def build_engine(config: Config, actor: DiffusionActor) -> RolloutEngine:
    """The rollout engine that `rollout.name` asks for; the family's text encoders must still be in place."""
    if config.rollout.name == "vllm_omni":
        from flowcorr.rollout.vllm_omni import VllmOmniEngine

        return VllmOmniEngine(
            actor.family, config, tensors=actor.snapshot().tensors, merge=actor.merged_weights
        )
    return InProcessEngine(
        actor.family,
        config.rollout,
        config.sampling,
        seed=config.trainer.seed,
        merge=actor.merged_weights,
        base=actor.base,
    )


def choose_device(name: str) -> torch.device:
    """The device that `trainer.device` names.

    Raises:
        ConfigError: torch knows no such device, or this machine lacks it.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"trainer.device={name!r} cannot be used here ({reason}); use auto, cpu or cuda"
        ) from error
    return device
