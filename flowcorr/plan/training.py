"""Runs flowcorr's actor on the fake device and measures its training."""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from flowcorr.actor import DiffusionActor
from flowcorr.actor.adamw import BLOCK, SMALLEST
from flowcorr.actor.passes import passes_of
from flowcorr.algorithm import (
    AutoMode,
    apply_bypass_mode_to_diffusion_batch,
    apply_rollout_correction_to_diffusion_batch,
    needs_old_means,
    needs_rollout_means,
)
from flowcorr.config.schema import Config
from flowcorr.models import DTYPES, ModelFamily, check_attention
from flowcorr.models.base import repeated_blocks
from flowcorr.models.quantized import weight_sizes
from flowcorr.plan.adapters import with_wrapped_adapter, without_adapter
from flowcorr.plan.attention import operator_of
from flowcorr.plan.devices import Gpu, Utilisation
from flowcorr.plan.fake_backend import DEVICE
from flowcorr.plan.fake_device import FakeDevice, Section
from flowcorr.plan.operations import Operation, Operations, busy_seconds
from flowcorr.plan.pipelines import Architecture, build_family
from flowcorr.plan.text_inputs import text_inputs
from flowcorr.records import ActorBatch, Rollout, Window

SHALLOW, DEEP = 2, 3
"""Numbers of blocks of a kind in the two measured transformers."""
FEW = 4
"""A transformer with at most so many blocks of a kind is measured with all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Memory, FLOPs and time of one part of a step.

    Attributes:
        peaks: peak bytes above those at its beginning, by the kind of block that was computing, forwards or again in a
            backward pass.
        copies: bytes of autocast's copies of weights at each of these peaks.
        flops: floating point operations of matrix products, convolutions and attention.
        moved: bytes read and written.
        operations: how often each operation runs, on the rows of one forward pass.
        kernels: operations launched.
        fixed: bytes of each of these peaks that do not grow with the rows of a pass.
        sent: bytes that each rank sends to the others meanwhile.
        copying: seconds of copies to and from the host that the device waits for.
    """

    peaks: Mapping[str, float]
    flops: float
    moved: float
    operations: Operations
    kernels: float
    copies: Mapping[str, float] = field(default_factory=dict)
    fixed: float = 0.0
    sent: float = 0.0
    copying: float = 0.0

    @classmethod
    def of(cls, section: Section, before: float | None = None) -> Work:
        """The counts of a section, with peaks relative to `before`, by default its beginning."""
        before = section.before if before is None else before
        return cls(
            peaks={stage: peak - before for stage, peak in section.peaks.items()},
            flops=section.flops,
            moved=section.moved,
            operations=section.operations,
            kernels=section.kernels,
            copies=section.copies,
        )

    @property
    def peak(self) -> float:
        return max(self.peaks.values(), default=0.0)

    @property
    def copied(self) -> float:
        """Bytes of autocast's copies of weights at the highest peak."""
        return self.copies.get(max(self.peaks, key=lambda stage: self.peaks[stage], default=""), 0.0)

    def seconds(self, gpu: Gpu, utilisation: Utilisation, link: float = math.inf) -> float:
        """The time on a GPU.

        Args:
            gpu: the device.
            utilisation: the shares of its peak speeds that are reached.
            link: bytes a second to the other ranks, which all receive at the same time.
        """
        busy = busy_seconds(self.operations, gpu, utilisation)
        return max(busy, self.kernels * utilisation.launch, self.sent / link) + self.copying

    def times(self, count: float) -> Work:
        """This work `count` times in turn; the peak stays the same."""
        return replace(_plus(self, self, count - 1), peaks=self.peaks, copies=self.copies, fixed=self.fixed)

    def then(self, other: Work) -> Work:
        """This work, then `other`; the peak is the higher one."""
        return replace(_plus(self, other, 1), peaks={"": max(self.peak, other.peak)}, copies={}, fixed=0.0)


NOTHING = Work(peaks={}, flops=0, moved=0, operations={}, kernels=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Bytes and work of training one transformer.

    Attributes:
        transformer: bytes of the weights and buffers, without the adapter; of codes and scales, where it is quantized.
        numbers: how many weights these are, or stand for.
        largest: how many numbers the largest weight has.
        part: bytes of the weights that FSDP gathers together: the largest block, or all that are in no block.
        gathered: bytes that exist only while FSDP gathers such parts and reduces their gradients; 0 without it.
        adapter: bytes of the adapter; 0 without one.
        gradients: bytes of the gradients.
        moments: bytes of the optimizer's state.
        sample: bytes of one sample in the batch of an update.
        recompute: recomputing the old log-probs of one micro-batch.
        unadapted: the same without the adapter, as an engine with merged weights computes.
        wrapped: the same in an engine that computes the adapter beside the weights.
        backward: forward and backward pass of one micro-batch; its peak includes gradients, not weights and moments.
        step: the optimizer's step; its peak includes the same.
        moments_8bit, step_8bit: `moments` and `step` with `actor.optimizer: adamw_8bit`. They are computed, not
            measured: the kernels of bitsandbytes do not run on the fake device.
    """

    transformer: float
    numbers: float
    largest: float
    part: float
    gathered: float = 0.0
    adapter: float
    gradients: float
    moments: float
    sample: float
    recompute: Work
    unadapted: Work
    wrapped: Work
    backward: Work
    step: Work
    moments_8bit: float
    step_8bit: Work

    @property
    def weights(self) -> float:
        return self.transformer + self.adapter

    def in_8_bits(self) -> Training:
        """The same training with `actor.optimizer: adamw_8bit`."""
        return replace(self, moments=self.moments_8bit, step=self.step_8bit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """Forward passes of one micro-batch, and the bytes of the weights, with the adapter."""

    weights: float
    work: Work


Numbers = TypeVar("Numbers", Work, Training, Scoring)


def measure_training(config: Config, architecture: Architecture) -> Training:
    """Measure the training of transformers with few blocks, and extrapolate it to the real depth.

    Args:
        config: the run's configuration, of one rank.
        architecture: the pipeline's configurations.
    """
    return _extrapolated(measure_blocks, config, architecture)


def measure_scoring(config: Config, architecture: Architecture, *, wrapped: bool = False) -> Scoring:
    """Measure recomputing the old log-probs of one micro-batch; `wrapped`: with adapters as an engine has them."""
    return _extrapolated(functools.partial(_score_blocks, wrapped=wrapped), config, architecture)


def _extrapolated(
    measure: Callable[[Config, Architecture], Numbers], config: Config, architecture: Architecture
) -> Numbers:
    """The numbers that `measure` gives for few blocks, extrapolated linearly to the real depth.

    Everything is linear in the depth, except that the highest peak may move to another kind of block, or between the
    forward and the backward pass. So each kind has its own peak in both.
    """
    full = architecture.depths
    shallow = {kind: SHALLOW if depth > FEW else depth for kind, depth in full.items()}

    def at(depths: Mapping[str, int]) -> Numbers:
        return measure(config, architecture.with_depths(depths))

    result = base = at(shallow)
    for kind, depth in full.items():
        if depth > shallow[kind]:
            deeper = at({**shallow, kind: DEEP})
            blocks = (depth - SHALLOW) / (DEEP - SHALLOW)
            result = _plus(_plus(result, deeper, blocks), base, -blocks)
    return result


def _score_blocks(config: Config, architecture: Architecture, *, wrapped: bool) -> Scoring:
    config = one_optimizer_step(config)
    with FakeDevice() as device:
        family, actor = load_actor(config, architecture, device)
        batch = actor_batch(config, architecture, family, passes_of(config).samples)
        layers = with_wrapped_adapter(family.transformer) if wrapped else contextlib.nullcontext()
        with layers, device.section() as section:
            recompute_log_probs(actor, batch)
    tensors = [*family.transformer.parameters(), *family.transformer.buffers()]
    return Scoring(weights=sum(tensor.nbytes for tensor in tensors), work=Work.of(section))


def measure_blocks(config: Config, architecture: Architecture) -> Training:
    """Measure a transformer as it is, with all its blocks."""
    config = one_optimizer_step(config)
    micro_batch = passes_of(config).samples
    with FakeDevice() as device:
        family, actor = load_actor(config, architecture, device)
        batch = actor_batch(config, architecture, family, 2 * micro_batch)
        with device.section() as recompute:
            recompute_log_probs(actor, batch.select(slice(0, micro_batch)))
        unadapted = wrapped = recompute
        if config.model.lora.rank:
            with without_adapter(family.transformer), device.section() as unadapted:
                recompute_log_probs(actor, batch.select(slice(0, micro_batch)))
            with with_wrapped_adapter(family.transformer), device.section() as wrapped:
                recompute_log_probs(actor, batch.select(slice(0, micro_batch)))
        before = device.allocated
        with _split_at_optimizer(device) as (backward, step):
            update(actor, batch)
        trained = list(actor.weights.parameters.values())
        gradients = sum(parameter.grad.nbytes for parameter in trained if parameter.grad is not None)
        moments = device.allocated - before - gradients
    prompt = sum(rows.nbytes for rows in batch.rollout.conditioning.values())
    tensors = [*family.transformer.parameters(), *family.transformer.buffers()]
    sizes = weight_sizes(family.transformer)
    adapter = sum(parameter.nbytes for parameter in trained) if config.model.lora.rank else 0
    return Training(
        transformer=sum(tensor.nbytes for tensor in tensors) - adapter,
        numbers=sum(sizes) - sum(parameter.numel() for parameter in trained if adapter),
        largest=max(sizes),
        part=_largest_part(family.transformer),
        adapter=adapter,
        gradients=gradients,
        moments=moments,
        sample=_bytes(batch) / batch.rollout.num_samples + prompt / config.rollout.n,
        recompute=Work.of(recompute),
        unadapted=Work.of(unadapted),
        wrapped=Work.of(wrapped),
        backward=Work.of(backward, before).times(1 / 2),
        step=Work.of(step, before + moments),
        moments_8bit=sum(map(_moments_8bit, trained)),
        step_8bit=_step_8bit(trained, gradients),
    )


# The actor's entry points ----------------------------------------------------------------------------------


def load_actor(
    config: Config, architecture: Architecture, device: FakeDevice
) -> tuple[ModelFamily, DiffusionActor]:
    """The model family and its actor, whose blocks report their kind to `device`."""
    adapted = config.model.lora.rank > 0
    dtype = DTYPES[config.model.dtype]
    family = build_family(architecture, config.model, device, dtype=dtype, adapted=adapted)
    check_attention(family.transformer, config.model.attention)
    device.attention = operator_of(config.model.attention)
    for block in repeated_blocks(family.transformer):
        kind = f"{type(block).__name__} of {sum(parameter.numel() for parameter in block.parameters())}"
        block.register_forward_pre_hook(lambda *_, kind=kind: device.enter_stage(_pass() + kind))
    return family, DiffusionActor(family, config)


def _pass() -> str:
    """The pass that computes now; activation checkpointing computes a block again in the backward pass."""
    return "backward of " if torch._C._current_graph_task_id() >= 0 else "forward of "


def recompute_log_probs(actor: DiffusionActor, batch: ActorBatch) -> None:
    """Recompute the old log-probs, as decoupled mode does."""
    actor.log_probs(batch.rollout, with_means=needs_old_means(actor.config))


def correct(actor: DiffusionActor, batch: ActorBatch) -> ActorBatch:
    """The batch after rollout correction in the configured mode."""
    correction, config = AutoMode.of(actor.config).correction, actor.config
    if correction.mode == "bypass":
        return apply_bypass_mode_to_diffusion_batch(batch)
    corrected, _ = apply_rollout_correction_to_diffusion_batch(
        batch, correction, actor_config=config.actor, num_steps=config.sampling.num_inference_steps
    )
    return corrected


def update(actor: DiffusionActor, batch: ActorBatch) -> None:
    """One optimizer step on the whole batch."""
    actor.update(batch, AutoMode.of(actor.config).correction, training_step=1)


def rollout(config: Config, architecture: Architecture, family: ModelFamily, samples: int) -> Rollout:
    """A rollout on the fake device, with the shapes of the configured engine's."""
    sampling = config.sampling
    shape = family.latent_shape(sampling.height, sampling.width)
    steps = sampling.sde_window_size
    inputs = text_inputs(architecture, type(family), config)

    def numbers(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.ones(samples, *size, dtype=dtype, device=DEVICE)

    window = Window(
        latents=numbers(steps, *shape),
        next_latents=numbers(steps, *shape),
        step_indices=numbers(steps, dtype=torch.long),
        timesteps=numbers(steps),
        sigmas=numbers(steps),
        sigmas_next=numbers(steps),
        means=numbers(steps, *shape) if needs_rollout_means(config) else None,
        stds=numbers(steps),
    )
    return Rollout(
        window=window,
        log_probs=numbers(steps),
        conditioning=inputs.make(1, family.dtype),
        conditioning_rows=torch.zeros(samples, dtype=torch.long, device=DEVICE),
        group_ids=numbers(dtype=torch.long),
        policy_versions=numbers(dtype=torch.long),
    )


def actor_batch(config: Config, architecture: Architecture, family: ModelFamily, samples: int) -> ActorBatch:
    """A batch for the actor, with old log-probs."""
    sampled = rollout(config, architecture, family, samples)
    needs_means = needs_old_means(config)
    return ActorBatch(
        rollout=sampled,
        advantages=torch.ones(samples, dtype=torch.float64, device=DEVICE),
        old_log_probs=torch.ones_like(sampled.log_probs),
        old_means=torch.ones_like(sampled.window.latents) if needs_means else None,
    )


def one_optimizer_step(config: Config) -> Config:
    """The config with an update of one optimizer step and explicit passes; those of `auto` without a bound."""
    passes = passes_of(config)
    return replace(
        config,
        actor=replace(
            config.actor,
            mini_batches=1,
            epochs=1,
            micro_batch_size=min(passes.samples, config.mini_batch_size),
            fold_steps=passes.folded,
            compile=False,
            fsdp=False,
            optimizer="adamw",
        ),
        # An engine that shares the actor's weights, so that the actor keeps no copy for it.
        rollout=replace(
            config.rollout,
            name="in_process",
            placement="local",
            dtype=config.model.dtype,
            emulate="none",
            staleness=0,
            max_staleness=0,
            prompts_per_step=1,
        ),
    )


@contextlib.contextmanager
def _split_at_optimizer(device: FakeDevice) -> Iterator[tuple[Section, Section]]:
    """Two sections: up to `optimizer.step()`, and that step."""
    backward, stepping = Section(), Section()

    def split(*_: object) -> None:
        device.end(backward)
        device.begin(stepping)

    handles = (
        register_optimizer_step_pre_hook(split),
        register_optimizer_step_post_hook(lambda *_: device.end(stepping)),
    )
    device.begin(backward)
    try:
        yield backward, stepping
    finally:
        for handle in handles:
            handle.remove()


def _moments_8bit(weight: torch.Tensor) -> float:
    """Bytes of a weight's two moments: in 8 bits with a float32 scale a block, or in float32 for a small weight."""
    numbers = weight.numel()
    return 2 * (4 * numbers if numbers < SMALLEST else numbers + 4 * math.ceil(numbers / BLOCK))


def _step_8bit(trained: Sequence[torch.Tensor], gradients: float) -> Work:
    """A step with 8-bit moments: a kernel for each weight reads its gradient, and replaces weight and moments."""
    moved = [3.0 * weight.nbytes + 2 * _moments_8bit(weight) for weight in trained]
    operations = Counter(Operation(kind="memory", half=False, flops=0.0, moved=size) for size in moved)
    return Work(peaks={"": gradients}, flops=0, moved=sum(moved), operations=operations, kernels=len(trained))


def _largest_part(transformer: Any) -> int:
    blocks = [sum(weight.nbytes for weight in block.parameters()) for block in repeated_blocks(transformer)]
    return max(*blocks, sum(weight.nbytes for weight in transformer.parameters()) - sum(blocks))


def _bytes(batch: ActorBatch) -> int:
    """Bytes of a batch's tensors, including those of its rollout, without the conditioning."""
    records = (batch, batch.rollout, batch.rollout.window)
    values = [getattr(record, entry.name) for record in records for entry in fields(record)]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return sum(tensor.nbytes for tensor in tensors)


def _plus(one: Numbers, other: Numbers, times: float) -> Numbers:
    """`one + times * other`, field by field."""
    total: dict[str, Any] = {}
    for entry in fields(one):
        left, right = getattr(one, entry.name), getattr(other, entry.name)
        if isinstance(left, Work):
            total[entry.name] = _plus(left, right, times)
        elif entry.name == "operations":
            total[entry.name] = {
                key: left.get(key, 0.0) + times * right.get(key, 0.0) for key in {**left, **right}
            }
        elif isinstance(left, Mapping):
            total[entry.name] = {key: left[key] + times * right[key] for key in left.keys() & right.keys()}
        else:
            total[entry.name] = left + times * right
    return replace(one, **total)
