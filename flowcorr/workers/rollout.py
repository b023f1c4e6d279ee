"""Rollouts in Ray workers: each worker has its own engine and takes the next shard of prompts when it is idle."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flowcorr import distributed
from flowcorr.actor.weights import TrainedWeights
from flowcorr.config import resolve_engine
from flowcorr.config.schema import Config
from flowcorr.errors import BackendError, BatchError, ConfigError, MissingExtraError
from flowcorr.models import load_family
from flowcorr.models.quantized import whole_copy
from flowcorr.records import Rollout
from flowcorr.rollout.base import OnImages, Weights, ignore_images, needs_base, shards_weights
from flowcorr.rollout.build import as_rollout, build_backend
from flowcorr.rollout.vllm_omni.probe import ActorProbe
from flowcorr.workers.dispatcher import WorkerOptions
from flowcorr.workers.pool import Answer, OnEvent, WorkerPool, ignore_event

# Errors of the task, not of the worker: the task would fail in any other worker too.
OWN_ERRORS = (ConfigError, BatchError, MissingExtraError)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shard:
    """Whole groups of one training step, as one worker samples them: the arguments of `RolloutEngine.sample`.

    Attributes:
        weights: a reference to the `Weights` to sample with; a worker that has loaded them does not get them again.
    """

    conditioning: Mapping[str, Tensor]
    groups: tuple[int, ...]
    training_step: int
    with_means: bool
    weights: Any


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedWeights:
    """Weights of one sync: on the CPU of this process, and a reference to them in Ray's object store."""

    weights: Weights
    reference: Any


def shipped_velocity(probe: ActorProbe | None, weights: Weights, config: Config) -> Tensor | None:
    """The actor's velocity under `weights`, for the workers to compare with; None on a rank that sends them nothing.

    Every rank has to call: a forward pass of sharded weights gathers them from all ranks.
    """
    if probe is None or not (distributed.is_main() or shards_weights(config)):
        return None
    return probe.velocity(weights)


class RayRollout:
    """A `RolloutEngine` that samples in Ray workers, on demand or ahead of time.

    Noise is seeded by seed, training step, group and member, and every shard names its weights. Results therefore do
    not depend on the number of workers, on which worker samples a shard, or on workers that die. Workers on CPUs of one
    kind return the bits of a local engine if the batches are the same: `rollout.batch_size` is a multiple of
    `rollout.n`.

    Args:
        config: the run's configuration.
        probe: computes the actor's velocity once a sync; vllm-omni's engines are compared with it.
        on_event: gets a record of each worker that is lost or replaced.

    Raises:
        ConfigError: workers cannot be built from `config`, or do not fit the cluster.
        BackendError: a worker does not start.
    """

    def __init__(
        self, config: Config, *, probe: ActorProbe | None = None, on_event: OnEvent = ignore_event
    ) -> None:
        self.config = config
        self._probe = probe
        rollout = config.rollout
        self._history: deque[SharedWeights] = deque(maxlen=rollout.max_weight_age + 1)
        self._groups_per_shard = max(1, (rollout.batch_size or rollout.n) // rollout.n)
        self._workers = WorkerPool(
            partial(RolloutWorker, config, None if probe is None else probe.shipped()),
            WorkerOptions(
                section="rollout",
                num_workers=rollout.num_workers,
                resources=rollout.worker_resources,
                scheduling=rollout.scheduling,
                timeout=rollout.timeout,
                num_threads=config.trainer.num_threads,
                own_errors=OWN_ERRORS,
            ),
            address=rollout.ray_address,
            on_event=on_event,
        )

    # Weights ---------------------------------------------------------------------------------------------

    @property
    def history(self) -> list[Weights]:
        """The versions that shards may still be sampled with, oldest first."""
        return [synced.weights for synced in self._history]

    def sync(self, weights: Weights) -> None:
        self._history.append(self._put(weights))

    def restore(self, history: Sequence[Weights]) -> None:
        """Put back the `history` of an interrupted run."""
        self._history = deque(map(self._put, history), maxlen=self.config.rollout.max_weight_age + 1)

    def _put(self, weights: Weights) -> SharedWeights:
        """Put weights into the object store; a worker loads them when a shard names them."""
        on_cpu = replace(
            weights,
            tensors={name: tensor.cpu() for name, tensor in weights.tensors.items()},
            probe_velocity=shipped_velocity(self._probe, weights, self.config),
        )
        return SharedWeights(weights=on_cpu, reference=self._workers.share(on_cpu))

    def weights_for(self, ahead: int) -> SharedWeights:
        """The weights for the training step that lies `ahead` steps after the next one."""
        behind_newest = self.config.rollout.max_weight_age - ahead
        return self._history[max(0, len(self._history) - 1 - behind_newest)]

    # Sampling --------------------------------------------------------------------------------------------

    def sample(
        self,
        conditioning: Mapping[str, Tensor],
        groups: Sequence[int],
        *,
        training_step: int,
        with_means: bool,
        on_images: OnImages = ignore_images,
    ) -> Rollout:
        """See `RolloutEngine.sample`; samples come group by group, in the order of `groups`.

        Raises:
            BackendError: a shard failed repeatedly, or was sampled with other weights.
        """
        rollout = self.submit(
            conditioning, groups, training_step=training_step, with_means=with_means
        ).result()
        on_images(rollout.decoded)
        return rollout

    def submit(
        self,
        conditioning: Mapping[str, Tensor],
        groups: Sequence[int],
        *,
        training_step: int,
        with_means: bool,
        ahead: int = 0,
    ) -> PendingRollout:
        """Start sampling in the workers and return at once.

        Args:
            conditioning: one row a prompt.
            groups: ids of the prompts' groups.
            training_step: the training step that the samples are for.
            with_means: also return the step means and stds.
            ahead: number of steps between the next training step and this one. With `rollout.max_weight_age` of them,
                the newest weights are used. With fewer, the step was due earlier, and gets the weights of that time.
        """
        synced = self.weights_for(ahead)
        size = self._groups_per_shard
        parts = [slice(begin, begin + size) for begin in range(0, len(groups), size)]
        shards = []
        for part in parts:
            chosen = tuple(int(group) for group in groups[part])
            shard = Shard(
                # Without the clone, pickle would send all rows that the slice is a view of.
                conditioning={name: rows[part].cpu().clone() for name, rows in conditioning.items()},
                groups=chosen,
                training_step=training_step,
                with_means=with_means,
                weights=synced.reference,
            )
            label = f"sampling of groups {chosen[0]}..{chosen[-1]} of training step {training_step}"
            shards.append(self._workers.submit(label, "sample", shard, num_returns=2))
        return PendingRollout(shards=shards, version=synced.weights.version, groups_per_shard=size)

    def retire(self, reasons: Mapping[int, str]) -> bool:
        """Take faulty workers out; see `FlowcorrDispatcher.retire`. What they have sampled stays in its answers."""
        return self._workers.retire(reasons)

    # Lifecycle -------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, str]:
        """Plain facts about one worker's engine."""
        (facts,) = self._workers.submit("a description", "describe").result().values
        return facts

    @property
    def places(self) -> list[Mapping[str, Any]]:
        """Node and process of each worker."""
        return self._workers.places

    def close(self) -> None:
        """Stop the workers, and the cluster if it was started here."""
        self._workers.close()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PendingRollout:
    """A rollout that workers are sampling.

    Attributes:
        shards: the answer to each shard: a rollout without images, and its images.
        version: version of the weights that the shards name.
        groups_per_shard: groups in each shard; the last may have fewer.
    """

    shards: list[Future[Answer]]
    version: int
    groups_per_shard: int

    def result(self) -> Rollout:
        """Wait for all shards and concatenate them in order.

        Raises:
            BackendError: a shard failed repeatedly, or was sampled with other weights.
        """
        parts = []
        for shard in self.shards:
            answer = shard.result()
            rollout, images = answer.values
            if not (rollout.policy_versions == self.version).all():
                versions = rollout.policy_versions.unique().tolist()
                raise BackendError(
                    f"groups {rollout.group_ids.unique().tolist()} were sampled with weights of version {versions} "
                    f"instead of {self.version}: the rollout engine did not load the weights that it was given"
                )
            workers = torch.full_like(rollout.group_ids, answer.worker)
            parts.append(replace(rollout, images=images, worker_ids=workers))
        return Rollout.concatenate(parts)


class RolloutWorker:
    """The worker's side: a rollout engine without an optimizer, built from the run's configuration.

    It computes on the GPU that Ray assigned. With vllm-omni the engine uses that GPU, and the transformer of the
    worker's own process stays in main memory: it never runs, but adapters are merged into its weights.

    Args:
        config: the run's configuration.
        probe: the trainer's part of the check whether a sync took effect, for vllm-omni.
    """

    def __init__(self, config: Config, probe: ActorProbe | None) -> None:
        import ray

        on_gpu = not resolve_engine(config.rollout.name).own_processes and ray.get_gpu_ids()
        family = load_family(config.model, "cuda" if on_gpu else "cpu", text_encoders=False)
        base = whole_copy(family.transformer) if needs_base(config) else family.transformer
        # A worker does not train: it needs neither averaged weights nor the KL loss's copy of the untrained ones.
        self._weights = TrainedWeights(
            family, replace(config, actor=replace(config.actor, ema=None, kl_coef=0.0))
        )
        self._engine = build_backend(
            config,
            family,
            merge=self._weights.merged,
            base=base,
            probe=probe,
        )
        self._loaded: str | None = None  # the reference's id

    def sample(self, shard: Shard) -> tuple[Rollout, Tensor]:
        """Sample a shard with its weights; returns the rollout without images, and the images."""
        self._load(shard.weights)
        answer = self._engine.sample(
            shard.conditioning, shard.groups, training_step=shard.training_step, with_means=shard.with_means
        )
        rollout = as_rollout(answer).to("cpu")
        return replace(rollout, images=None), rollout.decoded

    def describe(self) -> dict[str, str]:
        """Plain facts about the engine."""
        return dict(self._engine.describe()) if hasattr(self._engine, "describe") else {}

    def close(self) -> None:
        """Stop the engine's processes."""
        self._engine.close()

    def _load(self, reference: Any) -> None:
        """Load weights, unless they are the last that were loaded."""
        if self._loaded == reference.hex():
            return
        import ray

        self._loaded = None
        weights: Weights = ray.get(reference)
        self._weights.load(weights.tensors)
        self._engine.restore([replace(weights, tensors=self._weights.like_parameters(weights.tensors))])
        self._loaded = reference.hex()
