"""The interface of rollout engines: they take weights, sample groups of images and return trajectories."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from flowcorr import distributed
from flowcorr.config.engines import resolve_engine
from flowcorr.config.rollout import Dtype
from flowcorr.config.schema import Config

if TYPE_CHECKING:
    from torch import Tensor

    from flowcorr.records import Images, Rollout

Merge: TypeAlias = "Callable[[Mapping[str, Tensor]], Iterator[tuple[str, Tensor]]]"
"""Trained tensors -> the transformer's weights under diffusers' names, adapters merged, see `lora.merged_weights`."""
OnImages: TypeAlias = "Callable[[Images], None]"
"""Called with the images of some samples as soon as they are decoded, in the order of the samples."""
AS_SENT = "as sent"
"""The fact `weights` of an engine that knows by digests that it samples with the weights of the last sync."""


def ignore_images(images: Images) -> None:
    """Leave images to the rollout that they belong to."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weights:
    """A version of the trained weights.

    Attributes:
        version: optimizer updates behind them.
        tensors: the trained parameters by name: the adapter's, or all of the transformer's. None of them for an engine
            that samples with the trained transformer itself.
        probe_velocity: the actor's velocity under them at the probe's point, for an engine in another process than the
            actor; see `flowcorr.rollout.vllm_omni.probe`.
    """

    version: int
    tensors: Mapping[str, Tensor]
    probe_velocity: Tensor | None = None


class SyncedWeights:
    """Base class of engines that keep the weights of recent syncs, and sample with the oldest of them.

    Args:
        staleness: `rollout.staleness`.
    """

    def __init__(self, staleness: int) -> None:
        self._history: deque[Weights] = deque(maxlen=staleness + 1)
        self._loaded: Weights | None = None

    @property
    def version(self) -> int:
        """Optimizer updates behind the weights that sample."""
        return self._loaded.version if self._loaded is not None else 0

    @property
    def history(self) -> list[Weights]:
        """See `RolloutEngine.history`."""
        return list(self._history)

    def sync(self, weights: Weights) -> None:
        """See `RolloutEngine.sync`; raises as `_load` does."""
        self._history.append(weights)
        if self._history[0] is not self._loaded:
            self._load(self._history[0])

    def restore(self, history: Sequence[Weights]) -> None:
        """See `RolloutEngine.restore`."""
        self._history = deque(history, maxlen=self._history.maxlen)
        self._load(self._history[0])

    def _load(self, weights: Weights) -> None:
        """Sample with these weights from now on, and note them in `_loaded`."""
        raise NotImplementedError


class RolloutEngine(Protocol):
    """Samples trajectories; its weights change only by `sync`.

    An engine may also have `describe() -> Mapping[str, str]`, plain facts for a report, such as
    `{"attention": "FLASH_ATTN", "dtype": "bfloat16", "weights": AS_SENT}`, and `in_float32()`, a context in which it
    computes without rounding, for `flowcorr doctor`.
    """

    @property
    def history(self) -> Sequence[Weights]:
        """Versions that a stale engine still has to sample with, oldest first, up to the newest.

        The version that sampled a batch is kept until the next `sync`.
        """

    def restore(self, history: Sequence[Weights]) -> None:
        """Put back the `history` of an interrupted run."""

    def sync(self, weights: Weights) -> None:
        """Give the engine new weights; an engine configured as stale samples with older ones."""

    def sample(
        self,
        conditioning: Mapping[str, Tensor],
        groups: Sequence[int],
        *,
        training_step: int,
        with_means: bool,
        on_images: OnImages = ignore_images,
    ) -> Rollout:
        """Sample `rollout.n` images or videos for each prompt.

        Args:
            conditioning: one row a prompt.
            groups: ids of the prompts' groups, which seed their noise.
            training_step: seeds the noise too.
            with_means: also return the step means and stds.
            on_images: gets every image; an engine that has all of them at once may call it once.
        """

    def close(self) -> None:
        """Release the engine's memory and processes."""


def shards_weights(config: Config, ranks: int | None = None) -> bool:
    """Whether each of the run's `ranks` holds a shard of the transformer; None: this process is one of them."""
    ranks = distributed.world_size() if ranks is None else ranks
    return config.actor.fsdp and ranks > 1


def trains_shards(config: Config, ranks: int | None = None) -> bool:
    """Whether the sharded weights are the trained ones, and not the frozen weights under an adapter."""
    return shards_weights(config, ranks) and not config.model.lora.rank


def actor_dtype(config: Config, ranks: int | None = None) -> Dtype:
    """The dtype of the trained transformer as it computes: trained shards are gathered in that of `actor.autocast`."""
    gathered = trains_shards(config, ranks) and config.actor.autocast
    return "bfloat16" if gathered else config.model.dtype


def needs_base(config: Config, ranks: int | None = None) -> bool:
    """Whether an engine in process keeps the untrained transformer, as it cannot share the one that is trained."""
    rollout, dtype = config.rollout, actor_dtype(config, ranks)
    engine = resolve_engine(rollout.name)
    differs = rollout.max_weight_age > 0 or rollout.emulate != "none" or rollout.dtype != dtype
    return not engine.own_processes and (differs or not engine.shares_weights)


def shares_weights(config: Config, ranks: int | None = None) -> bool:
    """Whether the engine samples with the trained transformer itself."""
    rollout = config.rollout
    local = rollout.placement == "local" and resolve_engine(rollout.name).shares_weights
    return local and not needs_base(config, ranks)


def samples_codes(config: Config) -> bool:
    """Whether the engine computes with a quantized base, as the actor does: in process, with no need of a copy."""
    in_process = not resolve_engine(config.rollout.name).own_processes
    return config.model.quantization != "none" and in_process and not needs_base(config)


def attention_name(transformer: Any) -> str:
    """The classes that compute attention in a transformer of diffusers."""
    processors = getattr(transformer, "attn_processors", {}).values()
    return ", ".join(sorted({type(processor).__name__ for processor in processors})) or "its own"
