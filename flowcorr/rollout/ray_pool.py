"""Sampling in Ray workers: each has an engine of its own, and takes the next share of the prompts when it is idle."""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flowcorr import lora
from flowcorr.config.schema import Config
from flowcorr.errors import BackendError, BatchError, ConfigError, MissingExtraError
from flowcorr.models import DTYPES, load_family
from flowcorr.ray_workers import Answer, OnEvent, WorkerPool, ignore_event
from flowcorr.records import Rollout
from flowcorr.rollout.base import Weights, needs_base
from flowcorr.rollout.build import build_backend

# What a worker cannot be blamed for: another one would fail alike.
OWN_ERRORS = (ConfigError, BatchError, MissingExtraError)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shard:
    """What a worker samples at a time: whole groups of one training step; the arguments of `RolloutEngine.sample`."""

    conditioning: Mapping[str, Tensor]
    groups: tuple[int, ...]
    training_step: int
    with_means: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Synced:
    """Weights as workers get them.

    Attributes:
        weights: on the CPU.
        reference: to their tensors in Ray's object store.
        number: of the sync; two syncs may carry one version.
    """

    weights: Weights
    reference: Any
    number: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Wanted:
    """The weights that a shard is to be sampled with, named and at hand."""

    number: int
    version: int
    reference: Any


class RayPool:
    """A `RolloutEngine` whose sampling is done by workers, at once or ahead of time.

    Noise comes from seed, training step, group and member, and weights are named with every shard: results depend
    neither on the number of workers nor on who did what, and not on workers that died meanwhile. They equal those of
    a local engine whose batches are the same, bit for bit on a CPU: `rollout.batch_size` a multiple of `rollout.n`.

    Args:
        config: the run's configuration.
        on_event: told of workers that are lost and replaced.

    Raises:
        ConfigError: workers cannot be built from `config`, or do not fit the cluster.
        BackendError: a worker does not start.
    """

    def __init__(self, config: Config, *, on_event: OnEvent = ignore_event) -> None:
        self.config = config
        rollout = config.rollout
        self._numbers = itertools.count()
        self._history: deque[Synced] = deque(maxlen=rollout.lag + 1)
        self._groups_a_shard = max(1, (rollout.batch_size or rollout.n) // rollout.n)
        self._workers = WorkerPool(
            "rollout",
            partial(RolloutWorker, config),
            num_workers=rollout.num_workers,
            resources=rollout.worker_resources,
            scheduling=rollout.scheduling,
            timeout=rollout.timeout,
            address=rollout.ray_address,
            num_threads=config.trainer.num_threads,
            own_errors=OWN_ERRORS,
            on_event=on_event,
        )

    # Weights ---------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Optimizer updates behind the weights that sample now."""
        return self._held(0).weights.version if self._history else 0

    @property
    def history(self) -> list[Weights]:
        """The versions that are still sampled with, oldest first."""
        return [synced.weights for synced in self._history]

    def sync(self, weights: Weights) -> None:
        self._history.append(self._put(weights))

    def restore(self, history: Sequence[Weights]) -> None:
        """Put back the `history` of an interrupted run."""
        self._history = deque(map(self._put, history), maxlen=self.config.rollout.lag + 1)

    def _put(self, weights: Weights) -> Synced:
        """Hand weights to the object store, from which workers take them when a shard asks for them."""
        import ray

        self._workers.check()  # or `ray.put` would end this process, or start another cluster
        on_cpu = {name: tensor.cpu() for name, tensor in weights.tensors.items()}
        return Synced(
            weights=Weights(version=weights.version, tensors=on_cpu),
            reference=ray.put(on_cpu),
            number=next(self._numbers),
        )

    def _held(self, ahead: int) -> Synced:
        """The weights for the training step that lies `ahead` of the next one."""
        behind_newest = self.config.rollout.lag - ahead
        return self._history[max(0, len(self._history) - 1 - behind_newest)]

    # Sampling --------------------------------------------------------------------------------------------

    def sample(
        self,
        conditioning: Mapping[str, Tensor],
        groups: Sequence[int],
        *,
        training_step: int,
        with_means: bool,
    ) -> Rollout:
        """See `RolloutEngine.sample`; samples come group by group, in the order of `groups`.

        Raises:
            BackendError: a share failed time and again, or was sampled with other weights.
        """
        return self.submit(conditioning, groups, training_step=training_step, with_means=with_means).result()

    def submit(
        self,
        conditioning: Mapping[str, Tensor],
        groups: Sequence[int],
        *,
        training_step: int,
        with_means: bool,
        ahead: int = 0,
    ) -> Sampling:
        """Let workers sample, and return at once.

        Args:
            conditioning: one row a prompt.
            groups: ids of the prompts' groups.
            training_step: the step that is sampled.
            with_means: also return the step means and stds.
            ahead: how many training steps lie between the next one and this. With `rollout.lag` of them, the newest
                weights sample; a step that is less far ahead was due earlier, and gets those that were newest then.
        """
        held = self._held(ahead)
        wanted = Wanted(number=held.number, version=held.weights.version, reference=held.reference)
        size = self._groups_a_shard
        parts = [slice(begin, begin + size) for begin in range(0, len(groups), size)]
        shards = []
        for part in parts:
            chosen = tuple(int(group) for group in groups[part])
            shard = Shard(
                # A slice alone would travel with all the rows that it was cut from.
                conditioning={name: rows[part].cpu().clone() for name, rows in conditioning.items()},
                groups=chosen,
                training_step=training_step,
                with_means=with_means,
            )
            label = f"sampling of groups {chosen[0]}..{chosen[-1]} of training step {training_step}"
            shards.append(self._workers.submit(label, "sample", shard, wanted, num_returns=2))
        return Sampling(shards=shards, version=held.weights.version, groups_a_shard=size)

    # Lifecycle -------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, str]:
        """What one of the workers computes with."""
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
class Sampling:
    """Sampling that workers do.

    Attributes:
        shards: an answer each: a rollout without images, and its images `[b, H, W, 3]`.
        version: of the weights that were asked for.
        groups_a_shard: groups in each shard; the last may have fewer.
    """

    shards: list[Future[Answer]]
    version: int
    groups_a_shard: int

    def result(self) -> Rollout:
        """Wait for all shards and put them together, in order.

        Raises:
            BackendError: a shard failed time and again, or was sampled with other weights.
        """
        parts = []
        for shard in self.shards:
            rollout, images = shard.result().values
            if not (rollout.policy_versions == self.version).all():
                found = rollout.policy_versions.unique().tolist()
                raise BackendError(
                    f"groups {rollout.group_ids.unique().tolist()} were to be sampled with the weights of version "
                    f"{self.version}, and were with {found}: the rollout engine did not take the weights it was given"
                )
            parts.append(replace(rollout, images=images))
        return Rollout.concatenate(parts)


class RolloutWorker:
    """An engine of its own, built from the run's configuration, without an optimizer.

    It computes on the GPU that Ray gave it. With vllm-omni the engine has that, and the copy of the transformer that
    its syncs are checked against stays in main memory.
    """

    def __init__(self, config: Config) -> None:
        import ray

        model, rollout = config.model, config.rollout
        on_gpu = rollout.name == "in_process" and ray.get_gpu_ids()
        family = load_family(
            model.path,
            family=model.family,
            dtype=DTYPES[model.dtype],
            device="cuda" if on_gpu else "cpu",
            max_sequence_length=model.max_sequence_length,
        )
        self._transformer: Any = family.transformer
        base = copy.deepcopy(self._transformer) if needs_base(config) else self._transformer
        if model.lora.rank:
            lora.add_adapter(self._transformer, family, model.lora, seed=config.trainer.seed)
        else:
            self._transformer.requires_grad_(True)
        trained = {
            name: parameter.detach()
            for name, parameter in self._transformer.named_parameters()
            if parameter.requires_grad
        }
        self._device = next(iter(trained.values())).device
        self._engine = build_backend(
            config,
            family,
            tensors=trained,
            merge=partial(lora.merged_state_dict, self._transformer),
            base=base,
        )
        family.free_text_encoders()
        self._holds: int | None = None

    def sample(self, shard: Shard, wanted: Wanted) -> tuple[Rollout, Tensor]:
        """Sample a shard with the weights that it wants: the rollout without its images, and those."""
        if self._holds != wanted.number:
            self._load(wanted)
        rollout = self._engine.sample(
            shard.conditioning, shard.groups, training_step=shard.training_step, with_means=shard.with_means
        ).to("cpu")
        assert rollout.images is not None, "an engine's rollout has images"
        return replace(rollout, images=None), rollout.images

    def describe(self) -> dict[str, str]:
        """What the engine computes with."""
        return dict(self._engine.describe()) if hasattr(self._engine, "describe") else {}

    def close(self) -> None:
        """Stop the engine's processes."""
        self._engine.close()

    @torch.no_grad()
    def _load(self, wanted: Wanted) -> None:
        import ray

        self._holds = None
        tensors = {name: tensor.to(self._device) for name, tensor in ray.get(wanted.reference).items()}
        unknown = self._transformer.load_state_dict(tensors, strict=False).unexpected_keys
        assert not unknown, f"the trainer and its workers add the same adapter, without {unknown[:1]}"
        self._engine.restore([Weights(version=wanted.version, tensors=tensors)])
        self._holds = wanted.number
