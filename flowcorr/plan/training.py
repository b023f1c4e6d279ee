"""flowcorr's own actor on the fake device: everything of the plan that touches it is here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from flowcorr.actor import DiffusionActor
from flowcorr.algorithm import (
    AutoMode,
    apply_bypass_mode_to_diffusion_batch,
    apply_rollout_correction_to_diffusion_batch,
    needs_old_means,
    needs_rollout_means,
)
from flowcorr.config.schema import Config
from flowcorr.models import DTYPES, ModelFamily
from flowcorr.models.base import repeated_blocks
from flowcorr.plan.fake_backend import DEVICE
from flowcorr.plan.fake_device import FakeDevice, Section
from flowcorr.plan.pipelines import Architecture, build_family
from flowcorr.plan.text_inputs import text_inputs
from flowcorr.records import ActorBatch, Rollout

SHALLOW, DEEP = 2, 3
"""Blocks of a kind that are measured."""
FEW = 4
"""So many are not worth an extrapolation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Memory, FLOPs and time of one part of a step.

    Attributes:
        peaks: most bytes above what was there when it began, by the kind of block that was computed then.
        flops: floating point operations of matrix products, convolutions and attention.
        moved: bytes read and written.
        busy: seconds of the device.
        kernels: operations launched.
    """

    peaks: Mapping[str, float]
    flops: float
    moved: float
    busy: float
    kernels: float

    @classmethod
    def of(cls, section: Section, before: float | None = None) -> Work:
        """What was counted in a section, with peaks above `before`."""
        before = section.before if before is None else before
        return cls(
            peaks={stage: peak - before for stage, peak in section.peaks.items()},
            flops=section.flops,
            moved=section.moved,
            busy=section.busy,
            kernels=section.kernels,
        )

    @property
    def peak(self) -> float:
        return max(self.peaks.values(), default=0.0)

    def times(self, count: float) -> Work:
        """The same, so many times in turn: the peak stays."""
        return replace(_plus(self, self, count - 1), peaks=self.peaks)

    def then(self, other: Work) -> Work:
        """One after the other: the higher peak."""
        return replace(_plus(self, other, 1), peaks={"": max(self.peak, other.peak)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What training one transformer needs, in bytes and work.

    Attributes:
        transformer: weights without an adapter, and buffers.
        largest: the largest of those weights.
        adapter: weights of the adapter; 0 without one.
        gradients: of the trained weights.
        moments: the optimizer's state.
        sample: one sample of the batch that the update gets.
        recompute: old log-probs of one micro-batch.
        backward: a micro-batch forwards and backwards; its peak lies above weights and moments, and holds gradients.
        step: the optimizer's step; its peak lies above weights and moments too, and holds gradients.
    """

    transformer: float
    largest: float
    adapter: float
    gradients: float
    moments: float
    sample: float
    recompute: Work
    backward: Work
    step: Work

    @property
    def weights(self) -> float:
        return self.transformer + self.adapter


def measure_training(
    config: Config, architecture: Architecture, new_device: Callable[[], FakeDevice]
) -> Training:
    """Measure transformers of a few blocks and extrapolate to the real depth, in which all numbers are linear.

    A peak is linear only as long as it stays in one kind of block, so each kind has its own.

    Args:
        config: the run's configuration, of one rank.
        architecture: the pipeline.
        new_device: makes a fake device.
    """
    full = architecture.depths
    shallow = {kind: SHALLOW if depth > FEW else depth for kind, depth in full.items()}

    def at(depths: Mapping[str, int]) -> Training:
        return measure_blocks(config, architecture.with_depths(depths), new_device())

    result = base = at(shallow)
    for kind, depth in full.items():
        if depth > shallow[kind]:
            deeper = at({**shallow, kind: DEEP})
            blocks = (depth - SHALLOW) / (DEEP - SHALLOW)
            result = _plus(_plus(result, deeper, blocks), base, -blocks)
    return result


def measure_blocks(config: Config, architecture: Architecture, device: FakeDevice) -> Training:
    """Measure all blocks of the transformer."""
    config = one_optimizer_step(config)
    micro_batch = config.actor.micro_batch_size
    assert micro_batch is not None, "`one_optimizer_step` has set it"
    with device:
        family, actor = load_actor(config, architecture, device)
        batch = actor_batch(config, architecture, family, 2 * micro_batch)
        with device.section() as recompute:
            recompute_log_probs(actor, batch.select(slice(0, micro_batch)))
        before = device.allocated
        with _split_at_optimizer(device) as (backward, step):
            update(actor, batch)
        trained = actor.weights.parameters.values()
        gradients = sum(parameter.grad.nbytes for parameter in trained if parameter.grad is not None)
        moments = device.allocated - before - gradients
    tensors = [*family.transformer.parameters(), *family.transformer.buffers()]
    adapter = sum(parameter.nbytes for parameter in trained) if config.model.lora.rank else 0
    return Training(
        transformer=sum(tensor.nbytes for tensor in tensors) - adapter,
        largest=max(tensor.nbytes for tensor in tensors),
        adapter=adapter,
        gradients=gradients,
        moments=moments,
        sample=_bytes(batch) / batch.rollout.num_samples,
        recompute=Work.of(recompute),
        backward=Work.of(backward, before).times(1 / 2),
        step=Work.of(step, before + moments),
    )


# The actor's entry points ----------------------------------------------------------------------------------


def load_actor(
    config: Config, architecture: Architecture, device: FakeDevice
) -> tuple[ModelFamily, DiffusionActor]:
    """The family and its actor."""
    adapted = config.model.lora.rank > 0
    dtype = DTYPES[config.model.dtype]
    family = build_family(architecture, config.model, device, dtype=dtype, adapted=adapted)
    for block in repeated_blocks(family.transformer):
        kind = f"{type(block).__name__} of {sum(parameter.numel() for parameter in block.parameters())}"
        block.register_forward_pre_hook(lambda *_, kind=kind: device.enter_stage(kind))
    return family, DiffusionActor(family, config)


def recompute_log_probs(actor: DiffusionActor, batch: ActorBatch) -> None:
    """Old log-probs, as decoupled mode recomputes them."""
    actor.log_probs(batch.rollout, with_means=needs_old_means(actor.config))


def correct(actor: DiffusionActor, batch: ActorBatch) -> ActorBatch:
    """The batch with old log-probs and weights, by the mode of its correction."""
    correction, config = AutoMode.of(actor.config).correction, actor.config
    if correction is None:
        return batch
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
    """A rollout on the fake device, in the shapes that the config's engine returns."""
    sampling = config.sampling
    shape = family.latent_shape(sampling.height, sampling.width)
    steps = sampling.sde_window_size
    inputs = text_inputs(architecture, type(family), config)

    def numbers(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.ones(samples, *size, dtype=dtype, device=DEVICE)

    means = needs_rollout_means(config)
    return Rollout(
        latents=numbers(steps, *shape),
        next_latents=numbers(steps, *shape),
        step_indices=numbers(steps, dtype=torch.long),
        timesteps=numbers(steps),
        sigmas=numbers(steps),
        sigmas_next=numbers(steps),
        log_probs=numbers(steps),
        means=numbers(steps, *shape) if means else None,
        stds=numbers(steps),
        conditioning=inputs.make(samples, family.dtype),
        group_ids=numbers(dtype=torch.long),
        policy_versions=numbers(dtype=torch.long),
    )


def actor_batch(config: Config, architecture: Architecture, family: ModelFamily, samples: int) -> ActorBatch:
    """A batch whose old log-probs are known."""
    sampled = rollout(config, architecture, family, samples)
    needs_means = needs_old_means(config)
    return ActorBatch(
        rollout=sampled,
        advantages=torch.ones(samples, dtype=torch.float64, device=DEVICE),
        old_log_probs=torch.ones_like(sampled.log_probs),
        old_means=torch.ones_like(sampled.latents) if needs_means else None,
    )


def one_optimizer_step(config: Config) -> Config:
    """A config whose update is one optimizer step on all samples, of as many in a forward pass as it says."""
    groups = -(-config.rollout.prompts_per_step // config.actor.mini_batches)
    micro_batch = min(config.actor.micro_batch_size or groups * config.rollout.n, groups * config.rollout.n)
    return replace(
        config,
        actor=replace(
            config.actor, mini_batches=1, epochs=1, micro_batch_size=micro_batch, compile=False, fsdp=False
        ),
        # An engine here with the actor's own weights: the actor then keeps no copy for it.
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
    """Sections up to `optimizer.step()`, and within it."""
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


def _bytes(batch: ActorBatch) -> int:
    """Bytes of the tensors of a batch, including its rollout."""
    records = (batch, batch.rollout)
    values = [getattr(record, entry.name) for record in records for entry in fields(record)]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return sum(tensor.nbytes for tensor in (*tensors, *batch.rollout.conditioning.values()))


Numbers = TypeVar("Numbers", Work, Training)


def _plus(one: Numbers, other: Numbers, times: float) -> Numbers:
    """`one + times * other`, field by field."""
    total: dict[str, Any] = {}
    for entry in fields(one):
        left, right = getattr(one, entry.name), getattr(other, entry.name)
        if isinstance(left, Work):
            total[entry.name] = _plus(left, right, times)
        elif isinstance(left, Mapping):
            total[entry.name] = {key: left[key] + times * right[key] for key in left.keys() & right.keys()}
        else:
            total[entry.name] = left + times * right
    return replace(one, **total)
