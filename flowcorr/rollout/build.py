"""From a configuration to the engine that samples, in the trainer or in a worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from flowcorr.config.schema import Config
from flowcorr.models import ModelFamily
from flowcorr.rollout.base import RolloutEngine
from flowcorr.rollout.in_process import InProcessEngine


def build_backend(
    config: Config,
    family: ModelFamily,
    *,
    tensors: Mapping[str, Tensor],
    merge: Callable[[Mapping[str, Tensor]], dict[str, Tensor]],
    base: nn.Module,
) -> RolloutEngine:
    """The engine that `rollout.name` asks for, in this process.

    Args:
        config: the run's configuration.
        family: the pipeline, with its text encoders still in place; its transformer has the adapter.
        tensors: the trained tensors as they are now.
        merge: trained tensors -> the transformer's full state dict, see `InProcessEngine`.
        base: the transformer before an adapter was added.
    """
    if config.rollout.name == "vllm_omni":
        from flowcorr.rollout.vllm_omni import VllmOmniEngine

        return VllmOmniEngine(family, config, tensors=tensors, merge=merge)
    return InProcessEngine(
        family, config.rollout, config.sampling, seed=config.trainer.seed, merge=merge, base=base
    )
