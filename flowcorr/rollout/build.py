"""From a configuration to the engine that samples, in the trainer or in a worker."""

from __future__ import annotations

from importlib.util import find_spec

from torch import nn

from flowcorr.config import resolve_engine
from flowcorr.config.schema import Config
from flowcorr.errors import MissingExtraError
from flowcorr.imports import import_target
from flowcorr.models import ModelFamily
from flowcorr.rollout.base import Merge, RolloutEngine
from flowcorr.rollout.vllm_omni.probe import ActorProbe


def check_installed(config: Config) -> None:
    """Check that the packages that the configuration asks for are installed, before a model is loaded.

    Raises:
        MissingExtraError: the engine's package, Ray or bitsandbytes is asked for, and missing.
    """
    rollout = config.rollout
    extra = resolve_engine(rollout.name).extra
    if extra is not None and rollout.placement == "local" and find_spec(extra.replace("-", "_")) is None:
        raise MissingExtraError(f"rollout.name={rollout.name}", extra, extra)
    for section, placement in (("rollout", rollout.placement), ("reward", config.reward.placement)):
        if placement == "ray" and find_spec("ray") is None:
            raise MissingExtraError(f"{section}.placement=ray", "ray", "ray")
    asks_for = {
        "actor.optimizer=adamw_8bit": ("adam8bit", config.actor.optimizer == "adamw_8bit"),
        "model.quantization=nf4": ("quantized", config.model.quantization == "nf4"),
    }
    for feature, (extra, asked) in asks_for.items():
        if asked and find_spec("bitsandbytes") is None:
            raise MissingExtraError(feature, "bitsandbytes", extra)


def build_backend(
    config: Config,
    family: ModelFamily,
    *,
    merge: Merge,
    base: nn.Module,
    probe: ActorProbe | None,
) -> RolloutEngine:
    """The engine that `rollout.name` asks for, built by the function that its row names, with these arguments.

    Args:
        config: the run's configuration.
        family: the pipeline, whose transformer has the adapter; it needs no text encoders.
        merge: see `Merge`.
        base: the transformer before an adapter was added.
        probe: the actor's velocities, for an engine whose row `takes_probe`; else None.

    Raises:
        ConfigError: the function cannot be imported, or the engine cannot work with `config`.
    """
    build = import_target(
        "rollout.name", resolve_engine(config.rollout.name).build, "a function that builds an engine"
    )
    engine: RolloutEngine = build(config, family, merge=merge, base=base, probe=probe)
    return engine
