"""The arguments of `vllm_omni.AsyncOmni`, made from a recipe's `rollout.engine`."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, fields
from typing import Any, Literal, cast, get_args

from flowcorr import distributed
from flowcorr.config.engines import SEVERAL_GPUS
from flowcorr.config.families import FAMILIES
from flowcorr.config.schema import Config
from flowcorr.errors import ConfigError, unknown_choice
from flowcorr.models import ModelFamily, resolve_family
from flowcorr.models.base import InVllmOmni
from flowcorr.rollout.vllm_omni.client import import_vllm_omni
from flowcorr.rollout.vllm_omni.plugin import PIPELINE
from flowcorr.rollout.vllm_omni.request import FAMILY

logger = logging.getLogger(__name__)

WeightSync = Literal["lora_tensors", "lora_path", "merged"]

SET_BY_FLOWCORR = {
    "model": "set model.path",
    "dtype": "set rollout.dtype",
    "model_class_name": "flowcorr registers its own pipeline",
    "worker_extension_cls": "flowcorr syncs weights through its own worker extension",
    "custom_pipeline_args": "they name the model's family",
    "step_execution": "flowcorr's pipeline samples whole trajectories",
    "cfg_parallel_size": "guidance is computed in one batch",
    "cache_backend": "it would leave parts of stochastic steps out, whose log-probs then belong to no policy",
}
"""Arguments that flowcorr sets, with the reason or the key to use instead."""

NEWER = {
    "0.32.0rc1": (
        *(
            "enable_cuda_graph_decode",
            "hsdp_weight_load_strategy",
            "linear_backend",
            "model_stage",
            "ray_worker_env",
        ),
        *(
            "stage_input_optional_payload_keys",
            "stage_role",
            "vae_encode_fast_path",
            "weight_transfer_config",
        ),
    ),
}
"""By version of vllm-omni after 0.30.0, the arguments that it is the first to have."""

BATCH_WAIT_MS = 200.0  # long enough to batch the requests of a step, short beside the time of a sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """The properties of a version of vllm-omni that flowcorr depends on.

    Attributes:
        options: names of the arguments that a recipe may set.
        backend: the `distributed_executor_backend` that loses no answers, see `executor`.
    """

    options: Set[str]
    backend: str


def num_gpus(options: Mapping[str, Any]) -> int:
    """The number of GPUs of an engine with these `options` of `rollout.engine`."""
    degrees = {key: options.get(key) or 1 for key in SEVERAL_GPUS}
    sequence = max(
        degrees["sequence_parallel_size"],
        degrees["ulysses_degree"] * degrees["ring_degree"],
        degrees["allgather_degree"],
    )
    others = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    return int(max(degrees["num_gpus"], sequence * math.prod(degrees[key] for key in others)))


def engine_options(
    config: Config, family: ModelFamily, installed: Installed | None = None
) -> tuple[dict[str, Any], WeightSync]:
    """The engine's arguments, and how it gets new weights.

    Args:
        config: the run's configuration.
        family: the model's family.
        installed: the version of vllm-omni; None is the installed one.

    Raises:
        ConfigError: an option is unknown, is set by flowcorr, or contradicts another section.
        MissingExtraError: vllm-omni is not installed.
    """
    if family.vllm_omni is None:
        known = ", ".join(name for name in FAMILIES if resolve_family(name).vllm_omni is not None)
        raise ConfigError(
            f"rollout.name=vllm_omni cannot sample with the model family {family.name}, only with {known}; use "
            f"rollout.name=in_process, or state {type(family).__name__}.vllm_omni: examples/new_model.py shows how"
        )
    asked = dict(config.rollout.engine)
    weight_sync = _weight_sync(config, family, family.vllm_omni, asked.pop("weight_sync", None))
    installed = installed or _installed()
    for key in asked:
        if key in SET_BY_FLOWCORR:
            raise ConfigError(f"rollout.engine.{key} cannot be set: {SET_BY_FLOWCORR[key]}")
        if key not in installed.options:
            first = [version for version, names in NEWER.items() if key in names]
            raise ConfigError(
                f"rollout.engine.{key} is an option of vllm-omni {first[0]}, and not of the installed version"
                if first
                else unknown_choice("rollout.engine", key, ["weight_sync", *sorted(installed.options)])
            )
    _check_gpus(asked)
    if not family.vllm_omni.quantizes and _quantization(config):
        raise ConfigError(
            f"rollout.engine.quantization={_quantization(config)!r} would have no effect: vllm-omni does not quantize "
            f"{family.name}"
        )
    if asked.get("distributed_executor_backend", installed.backend) == "mp" != installed.backend:
        logger.warning(
            "rollout.engine.distributed_executor_backend='mp' loses answers in this version of vllm-omni, and a run "
            "then ends after rollout.timeout; leave the key out, and flowcorr takes %s",
            installed.backend,
        )
    rollout = config.rollout
    options = {
        "max_num_seqs": rollout.batch_size or rollout.prompts_per_step * rollout.n,
        "request_batch_max_wait_ms": BATCH_WAIT_MS,
        "distributed_executor_backend": installed.backend,
        **asked,
        "model_class_name": PIPELINE,
        "custom_pipeline_args": {FAMILY: f"{type(family).__module__}:{type(family).__qualname__}"},
        "worker_extension_cls": "flowcorr.rollout.vllm_omni.worker.RolloutWorker",
        "dtype": rollout.dtype,
    }
    return options, weight_sync


def _weight_sync(config: Config, family: ModelFamily, engine: InVllmOmni, asked: str | None) -> WeightSync:
    rank = config.model.lora.rank
    if asked not in (None, *get_args(WeightSync)):
        raise ConfigError(unknown_choice("rollout.engine.weight_sync", asked, get_args(WeightSync)))
    weight_sync = cast(WeightSync, asked or ("lora_tensors" if rank else "merged"))
    if rank == 0 and weight_sync != "merged":
        raise ConfigError(
            f"rollout.engine.weight_sync={weight_sync!r} needs an adapter, and model.lora.rank=0 trains all "
            "weights: use merged"
        )
    targets = config.model.lora.targets or family.lora_targets
    refused = [target for target in targets if not engine.adapts(target)]
    if rank and refused and weight_sync != "merged":
        raise ConfigError(
            f"rollout.engine.weight_sync={weight_sync!r} sends an adapter, and vllm-omni puts none on the layers "
            f"{', '.join(refused)} of {family.name}; set rollout.engine.weight_sync=merged, or leave these layers out "
            "of model.lora.targets"
        )
    quantization = _quantization(config)
    if weight_sync == "merged" and quantization:
        raise ConfigError(
            f"rollout.engine.weight_sync='merged' cannot load into weights with quantization={quantization!r}; "
            "train an adapter and use lora_tensors"
        )
    if config.rollout.emulate != "none" and weight_sync != "merged":
        raise ConfigError(
            f"rollout.emulate={config.rollout.emulate!r} rounds whole weights; with rollout.name=vllm_omni set "
            "rollout.engine.weight_sync=merged, or let the engine quantize with rollout.engine.quantization"
        )
    return weight_sync


def _check_gpus(asked: Mapping[str, Any]) -> None:
    ranks = distributed.world_size()
    for key in SEVERAL_GPUS:
        if ranks > 1 and isinstance(asked.get(key), int) and asked[key] > 1:
            raise ConfigError(
                f"rollout.engine.{key}={asked[key]} needs several GPUs, but each of {ranks} ranks starts an engine on "
                f"its own GPU: give each engine {asked[key]} GPUs with rollout.placement=ray "
                f"rollout.worker_resources.num_gpus={asked[key]}, or leave the key out"
            )


def _quantization(config: Config) -> Any:
    engine = config.rollout.engine
    return engine.get("quantization") or engine.get("quantization_config")


def _installed() -> Installed:
    """The installed vllm-omni."""
    import_vllm_omni()
    from flowcorr.rollout.vllm_omni.executor import default_backend

    return Installed(options=_known_options(), backend=default_backend())


def _known_options() -> set[str]:
    """The options of the engine and its parallel layout. The engine would silently ignore any other."""
    from vllm_omni.diffusion.data import DiffusionParallelConfig, OmniDiffusionConfig

    named = {entry.name for kind in (DiffusionParallelConfig, OmniDiffusionConfig) for entry in fields(kind)}
    return (named - SET_BY_FLOWCORR.keys()) | {
        "diffusion_attention_backend",
        "quantization",
        "gpu_memory_utilization",
        "init_timeout",
        "stage_init_timeout",
        "log_stats",
    }
