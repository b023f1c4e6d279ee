"""Rollout engines by name: the facts that configuration, plan and trainer need before an engine is built."""

from __future__ import annotations

from dataclasses import dataclass

from flowcorr.config.schema import Config
from flowcorr.errors import ConfigError, unknown_choice
from flowcorr.imports import import_target


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A rollout engine, one row of `ENGINES`; one of your own is given as `package.module:name` of such a row.

    Attributes:
        build: `package.module:name` of the function that builds it, see `flowcorr.rollout.build.build_backend`.
        shares_weights: whether it can sample with the trained transformer itself; else it keeps weights of its own.
        own_processes: whether it samples in processes of its own, which have GPUs of their own.
        takes_probe: whether it is built with the actor's velocity at one point, to compare its own after each sync.
        takes_options: whether it reads `rollout.engine`.
        compiles: whether its transformer is compiled, and computes adapters apart from the weights unless
            `rollout.engine.weight_sync` is `merged`.
        sleeps: whether `rollout.engine.enable_sleep_mode` takes it off its GPU while the actor trains.
        extra: the extra of flowcorr that it needs, and the package of that name.
    """

    build: str
    shares_weights: bool = False
    own_processes: bool = False
    takes_probe: bool = False
    takes_options: bool = True
    compiles: bool = False
    sleeps: bool = False
    extra: str | None = None


ENGINES = {
    "in_process": Engine(
        build="flowcorr.rollout.in_process:build",
        shares_weights=True,
        takes_options=False,
    ),
    "vllm_omni": Engine(
        build="flowcorr.rollout.vllm_omni.engine:build",
        own_processes=True,
        takes_probe=True,
        compiles=True,
        sleeps=True,
        extra="vllm-omni",
    ),
}

SEVERAL_GPUS = (
    *("num_gpus", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
    *("sequence_parallel_size", "ulysses_degree", "ring_degree", "allgather_degree"),
)
"""Arguments of vllm-omni whose value is a number of GPUs for one engine."""


def trains_coarser(config: Config, engine: Engine | None) -> bool:
    """Whether the trained base is quantized while the engine samples with the unquantized one.

    Args:
        config: the run's.
        engine: the row of `rollout.name`; None if unknown, which counts as an engine with a model of its own.
    """
    own_model = engine is None or engine.own_processes
    merges = config.rollout.engine.get("weight_sync") == "merged"  # it then gets the dequantized weights
    return config.model.quantization != "none" and own_model and not merges


def resolve_engine(name: str) -> Engine:
    """The engine of `rollout.name`: a row of `ENGINES`, or the `Engine` at `package.module:name`.

    Raises:
        ConfigError: the name is unknown, or no `Engine` can be imported from there.
    """
    if name in ENGINES:
        return ENGINES[name]
    if ":" not in name:
        message = unknown_choice("rollout.name", name, ENGINES)
        raise ConfigError(f"{message}; an engine of your own is given as 'package.module:name'")
    engine = import_target("rollout.name", name, "a flowcorr.config.Engine")
    if not isinstance(engine, Engine):
        raise ConfigError(
            f"rollout.name={name!r} is of type {type(engine).__name__}; name a flowcorr.config.Engine "
            "(examples/new_engine.py shows how)"
        )
    return engine
