"""From a configuration to the engine that samples, in the trainer or in a worker."""

from __future__ import annotations

from importlib.util import find_spec

from torch import nn

from flowcorr.config.schema import Config
from flowcorr.errors import MissingExtraError
from flowcorr.models import ModelFamily
from flowcorr.rollout.base import Merge, RolloutEngine
from flowcorr.rollout.in_process import InProcessEngine
from flowcorr.rollout.vllm_omni import VllmOmniEngine
from flowcorr.rollout.vllm_omni.probe import ActorProbe


def check_installed(config: Config) -> None:
    """Check that the packages that the configuration asks for are installed, before a model is loaded.

    Raises:
        MissingExtraError: vllm-omni, Ray or bitsandbytes is asked for, and missing.
    """
    rollout = config.rollout
    if rollout.name == "vllm_omni" and rollout.placement == "local" and find_spec("vllm_omni") is None:
        raise MissingExtraError("rollout.name=vllm_omni", "vllm-omni", "vllm-omni")
    for section, placement in (("rollout", rollout.placement), ("reward", config.reward.placement)):
        if placement == "ray" and find_spec("ray") is None:
            raise MissingExtraError(f"{section}.placement=ray", "ray", "ray")
    if config.actor.optimizer == "adamw_8bit" and find_spec("bitsandbytes") is None:
        raise MissingExtraError("actor.optimizer=adamw_8bit", "bitsandbytes", "adam8bit")


def build_backend(
    config: Config,
    family: ModelFamily,
    *,
    merge: Merge,
    base: nn.Module,
    probe: ActorProbe | None,
) -> RolloutEngine:
    """The engine that `rollout.name` asks for, in this process.

    Args:
        config: the run's configuration.
        family: the pipeline, whose transformer has the adapter; it needs no text encoders.
        merge: see `Merge`.
        base: the transformer before an adapter was added.
        probe: the actor's velocities, which vllm-omni needs.
    """
    if config.rollout.name == "vllm_omni":
        assert probe is not None, "vllm-omni's engine has to move as the actor does"
        return VllmOmniEngine(family, config, actor_probe=probe, merge=merge)
    return InProcessEngine(
        family, config.rollout, config.sampling, seed=config.trainer.seed, merge=merge, base=base
    )
