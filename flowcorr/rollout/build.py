"""From a configuration to the engine that samples, in the trainer or in a worker."""

from __future__ import annotations

from importlib.util import find_spec

from torch import nn

from flowcorr.config import resolve_engine
from flowcorr.config.schema import Config
from flowcorr.errors import BackendError, ConfigError, MissingExtraError
from flowcorr.imports import import_target
from flowcorr.models import ModelFamily
from flowcorr.records import Rollout
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
    """Build the engine of `rollout.name`, by the function that its row names, with these arguments.

    Args:
        config: the run's configuration.
        family: the pipeline, with the adapter in its transformer; it needs no text encoders.
        merge: see `Merge`.
        base: the transformer before an adapter was added.
        probe: the actor's velocities, for an engine whose row `takes_probe`; else None.

    Raises:
        ConfigError: the function cannot be imported, its result lacks methods of `RolloutEngine`, or the engine cannot
            work with `config`.
    """
    path = resolve_engine(config.rollout.name).build
    build = import_target("rollout.name", path, "a function that builds an engine")
    engine: RolloutEngine = build(config, family, merge=merge, base=base, probe=probe)
    stated = [name for name in vars(RolloutEngine) if not name.startswith("_")]
    if missing := [name for name in stated if not hasattr(type(engine), name)]:
        raise ConfigError(
            f"rollout.name={config.rollout.name}: {path} built a {type(engine).__name__} without {', '.join(missing)}; "
            f"an engine has {', '.join(stated)}, see `flowcorr explain RolloutEngine`"
        )
    return engine


def as_rollout(answer: object) -> Rollout:
    """Check the answer of an engine's `sample`.

    Raises:
        BackendError: it is no `Rollout`.
    """
    if not isinstance(answer, Rollout):
        raise BackendError(
            f"the rollout engine's sample returned a {type(answer).__name__}; it must return a flowcorr.records.Rollout"
        )
    return answer
