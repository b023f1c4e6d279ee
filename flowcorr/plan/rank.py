"""One rank's share of a run: the bytes that it holds, and the work that it does, in a layout."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from flowcorr.actor.passes import passes_of
from flowcorr.algorithm import AutoMode
from flowcorr.config import resolve_engine
from flowcorr.config.schema import Config
from flowcorr.models import DTYPES
from flowcorr.plan.components import Component
from flowcorr.plan.engine import wraps_adapters
from flowcorr.plan.sharding import sharded
from flowcorr.plan.traces import Traces
from flowcorr.plan.training import Training, Work
from flowcorr.rollout.base import needs_base, samples_codes, shards_weights, shares_weights

QUANTIZED_BYTES = {"fp8": 1.0, "int8": 1.0, "int4": 0.5}
"""Bytes per weight, by vllm-omni's quantization."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One rank's share of a run: what it holds, and what it computes.

    Attributes:
        config: the configuration, with the prompts of one rank.
        ranks: training ranks of the run.
        groups: prompts of a step, of all ranks.
        traces: the measurements that do not depend on the layout.
        training: the transformer's training on one rank.
        adapted_pass: see `Traces`.
        text: the text encoders, where they are kept.
    """

    config: Config
    ranks: int
    groups: int
    traces: Traces
    training: Training
    adapted_pass: Work
    text: Component

    @classmethod
    def of(cls, traces: Traces, config: Config, ranks: int) -> Rank:
        """One of so many ranks, under a config that differs from the traced one in its layout."""
        groups = math.ceil(config.rollout.prompts_per_step / ranks)
        training, adapted_pass = traces.training, traces.adapted_pass
        if shards_weights(config, ranks):
            training = sharded(training, config, ranks)
            if adapted_pass is traces.training.recompute:
                adapted_pass = training.recompute
        return cls(
            config=replace(config, rollout=replace(config.rollout, prompts_per_step=groups)),
            ranks=ranks,
            groups=config.rollout.prompts_per_step,
            traces=traces,
            training=training.in_8_bits() if config.actor.optimizer == "adamw_8bit" else training,
            adapted_pass=adapted_pass,
            text=traces.offloaded_text if config.model.offload_text_encoders else traces.text,
        )

    @property
    def images(self) -> int:
        return self.config.rollout.prompts_per_step * self.config.rollout.n

    @property
    def mini_batches(self) -> int:
        return min(self.config.actor.mini_batches, self.config.rollout.prompts_per_step)

    @property
    def mini_batch(self) -> int:
        """Images of one optimizer step."""
        groups = math.ceil(self.config.rollout.prompts_per_step / self.mini_batches)
        return groups * self.config.rollout.n

    @property
    def sampled_share(self) -> float:
        """Images that one engine samples, over those of one rank. Ray's workers serve all ranks by whole groups."""
        rollout = self.config.rollout
        if rollout.placement != "ray":
            return 1.0
        groups = self.groups / rollout.num_workers
        # A worker that samples ahead goes on with the next step's groups.
        return (groups if rollout.max_staleness else math.ceil(groups)) / rollout.prompts_per_step

    @property
    def micro_batch(self) -> int:
        return self.traces.micro_batch

    @property
    def bypass(self) -> bool:
        return AutoMode.of(self.config).correction.mode == "bypass"

    @property
    def own_engine(self) -> bool:
        """Whether the rollout engine runs in its own process."""
        rollout = self.config.rollout
        return resolve_engine(rollout.name).own_processes or rollout.placement == "ray"

    @property
    def collected(self) -> float:
        """Bytes of a step's samples."""
        return self.images * self.training.sample

    @property
    def resident(self) -> float:
        """Bytes that the trainer holds at all times after its first optimizer step."""
        config, training = self.config, self.training
        adapted = config.model.lora.rank > 0
        trained = training.gradients
        copied = not self.own_engine and needs_base(config, self.ranks)
        versions = 0 if shares_weights(config, self.ranks) else config.rollout.staleness + 1
        return (
            training.weights
            + training.moments
            + self.traces.decoder.weights
            + sum(reward.weights for reward in (*self.traces.rewards, *self.traces.gold))
            + (0 if config.actor.ema is None else trained)
            + trained * versions  # the engine's history
            + (training.transformer if config.actor.kl_coef and not adapted else 0)
            + (self.engine_weights if copied else 0)
        )

    @property
    def engine_weights(self) -> float:
        """Bytes of the engine's transformer: as the trainer's, if it is the same model in process, else unquantized."""
        rollout = self.config.rollout
        if samples_codes(self.config):
            return self.training.transformer
        options = rollout.engine
        quantized = options.get("quantization") or options.get("quantization_config")
        size = DTYPES[rollout.dtype].itemsize
        each = QUANTIZED_BYTES.get(str(quantized), size) if quantized else size
        shards = self.ranks if shards_weights(self.config, self.ranks) else 1
        return shards * self.training.numbers * each

    @property
    def engine_adapter(self) -> float:
        """Bytes of the engine's adapter."""
        config = self.config
        numbers = self.training.adapter / DTYPES[config.model.lora.dtype].itemsize
        return numbers * DTYPES[config.rollout.dtype].itemsize

    @property
    def sampling(self) -> Work:
        """All denoising steps of all images, as the engine computes them."""
        if not resolve_engine(self.config.rollout.name).compiles:
            return self._denoising(self.adapted_pass)
        if not wraps_adapters(self.config):
            return self.merged_sampling
        return self._denoising(self.traces.wrapped_pass)

    @property
    def merged_sampling(self) -> Work:
        """The same in an engine that merges the adapter into its weights."""
        return self._denoising(self.traces.plain_pass)

    def _denoising(self, measured_pass: Work) -> Work:
        config = self.config
        steps = config.sampling.sde_window_size
        rollout = config.rollout
        rows = rollout.batch_size or (rollout.n if rollout.placement == "ray" else self.images)
        limit = config.rollout.engine.get("max_num_seqs")
        rows = min(rows, self.images, limit if isinstance(limit, int) else rows)
        measured = self.micro_batch * steps
        together = measured if passes_of(config).folded else self.micro_batch
        passes = math.ceil(self.images / rows) * config.sampling.num_inference_steps
        work = measured_pass.times(self.images * config.sampling.num_inference_steps / measured)
        of_passes = together / measured * passes  # which gather weights and launch kernels
        fixed = measured_pass.fixed
        return replace(
            work,
            peaks={"": fixed + (measured_pass.peak - fixed) * rows / together},
            kernels=measured_pass.kernels * of_passes,
            sent=measured_pass.sent * of_passes,
        )

    @property
    def recomputing(self) -> Work:
        return self.training.recompute.times(self.images / self.micro_batch)

    @property
    def updating(self) -> Work:
        passes = self.images / self.micro_batch * self.config.actor.epochs
        steps = self.mini_batches * self.config.actor.epochs
        return self.training.backward.times(passes).then(self.training.step.times(steps))
