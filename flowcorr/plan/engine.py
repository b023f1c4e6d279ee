"""How fast a rollout engine samples. It compiles its model, so the trainer's utilisation says little of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowcorr.config import resolve_engine
from flowcorr.config.schema import Config
from flowcorr.plan.devices import Gpu

if TYPE_CHECKING:
    from flowcorr.plan.components import Component
    from flowcorr.plan.training import Work

HALF = ("bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpeed:
    """The speed that an engine reaches in denoising, as a band.

    Attributes:
        name: the kind of engine.
        share: of the GPU's peak, over all arithmetic of a forward pass with many rows.
        slowest, fastest: the ends of the band of `share`.
        why: the reason for these numbers.
        launch: seconds of the host for each operation of the model's eager pass. A pass with few rows takes no less:
            sampling one request at a time is limited by it.
    """

    name: str
    share: float
    slowest: float
    fastest: float
    why: str
    launch: float = 11.5e-6

    def seconds(self, work: Work, peak: float, share: float | None = None) -> float:
        """Seconds of `work` on a GPU with this peak, in FLOP per second; `share` is one of the three shares."""
        return max(work.flops / (peak * (share or self.share)), work.kernels * self.launch)


COMPILED = EngineSpeed(
    name="compiled, without adapters",
    share=0.57,
    slowest=0.5,
    fastest=0.63,
    why="compiled models without adapters are published at 0.5 to 0.63 of the peak",
)
ADAPTED = EngineSpeed(
    name="compiled, with adapters",
    share=0.41,
    slowest=COMPILED.share / 2.4,
    fastest=COMPILED.share / 1.2,
    why="vllm-omni's wrappers of adapters are published to cost 1.2 to 2.4 times the time of merged weights",
)


def engine_speed(config: Config) -> EngineSpeed | None:
    """The speed of the run's rollout engine; None where it computes eagerly, as the trainer does."""
    rollout = config.rollout
    if not resolve_engine(rollout.name).compiles or rollout.engine.get("enforce_eager"):
        return None
    return ADAPTED if wraps_adapters(config) else COMPILED


def wraps_adapters(config: Config) -> bool:
    """Whether the engine computes the adapter beside the weights, instead of merging it into them."""
    return bool(config.model.lora.rank) and config.rollout.engine.get("weight_sync") != "merged"


def engine_peak(config: Config, gpu: Gpu) -> float:
    """FLOP per second that the GPU computes at most in the engine's dtype."""
    return gpu.half if config.rollout.dtype in HALF else gpu.float32


def engine_memory(weights: float, sampling: Work, decoder: Component) -> float:
    """Peak bytes of an engine on a GPU, which holds the transformer's weights and the VAE's."""
    return weights + decoder.weights + max(sampling.peak, decoder.work.peak)
