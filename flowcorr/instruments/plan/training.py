"""Traces flowcorr's actor: its forward passes, its update, and the bytes of the trained weights."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from flowcorr.actor import DiffusionActor
from flowcorr.actor.adamw import BLOCK, SMALLEST
from flowcorr.actor.passes import passes_of
from flowcorr.algorithm import AutoMode, needs_old_means, needs_rollout_means
from flowcorr.algorithm.apply import sees_windows
from flowcorr.config.schema import Config
from flowcorr.instruments.plan.architecture import Architecture, Kind
from flowcorr.instruments.plan.pipelines import build_family, nbytes, on_meta
from flowcorr.instruments.plan.text_inputs import text_inputs
from flowcorr.instruments.plan.tracing import Work, tracing
from flowcorr.lora import ADAPTER
from flowcorr.models import DTYPES, ModelFamily, check_attention
from flowcorr.models.base import repeated_blocks
from flowcorr.models.packed import PackedFamily
from flowcorr.models.quantized import weight_sizes
from flowcorr.records import ActorBatch, Rollout, Window

Layers = Literal["own", "beside", "merged"]
"""How a forward pass computes an adapter: as the trainer, as vllm-omni's layers beside the weights, or not at all."""


LOSS = Work(peak=160e3, kernels=400)
"""The loss of a micro-batch and its statistics, which are not traced: hundreds of operations on a few numbers each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Forward passes on all SDE steps of one micro-batch, and the bytes of the weights, with an adapter."""

    weights: float
    work: Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Bytes and work of training one transformer.

    Attributes:
        transformer: bytes of the weights and buffers, without the adapter; of codes and scales, where it is quantized.
        numbers: how many weights these are, or stand for.
        largest: how many numbers the largest weight has.
        part: bytes of the weights that FSDP gathers together: the largest block, or all that are in no block.
        adapter: bytes of the adapter; 0 without one.
        gradients: bytes of the gradients.
        moments, moments_8bit: bytes of the optimizer's state, of either `actor.optimizer`.
        sample: bytes of one sample in the batch of an update.
        recompute: recomputing the old log-probs of one micro-batch.
        sampling: the same as the rollout engine computes it.
        backward: forward and backward pass of one micro-batch, beside gradients, weights and moments.
        step: the optimizer's step, beside the same.
        gathered, gathered_forward: bytes of weights in `backward` and in `recompute` that exist only there: parts that
            FSDP gathers and gradients that it reduces, or autocast's copies.
        sent, sent_forward: bytes that each rank sends to the others, in `backward` and in `recompute`.
    """

    transformer: float
    numbers: float
    largest: float
    part: float
    adapter: float
    gradients: float
    moments: float
    moments_8bit: float
    sample: float
    recompute: Work
    sampling: Work
    backward: Work
    step: Work
    gathered: float = 0.0
    gathered_forward: float = 0.0
    sent: float = 0.0
    sent_forward: float = 0.0

    @property
    def weights(self) -> float:
        return self.transformer + self.adapter


def trace_training(config: Config, architecture: Architecture, layers: Layers = "own") -> Training:
    """Trace one update of one micro-batch; `layers` names the engine's layers, if its dtype is the trainer's."""
    config = one_optimizer_step(config)
    actor, batch = build_actor(config, architecture)
    transformer = actor.weights.transformer
    adapted = config.model.lora.rank > 0
    rollout, passes = _one_pass(batch, config)
    whole_windows = sees_windows(config.actor, AutoMode.of(config).correction)
    unit, units = (batch.rollout, 1) if whole_windows else (rollout, passes)
    with tracing(_kinds(actor, architecture)) as tracer:
        with tracer.section() as recompute:
            recompute_log_probs(actor, rollout)
        sampling = recompute
        if adapted and layers != "own":
            with computing(transformer, layers), tracer.section() as sampling:
                recompute_log_probs(actor, rollout)
        with tracer.section() as backward:
            actor.scorer.reference_means(unit)
            tracer.backward(actor.score(unit).log_probs.sum())

    def whole(measure: Callable[[nn.Module], float]) -> float:
        return architecture.whole(transformer, measure)

    gradients = whole(_trained_bytes)
    adapter = gradients if adapted else 0.0
    prompt = sum(rows.nbytes for rows in batch.rollout.conditioning.values())
    return Training(
        transformer=whole(nbytes) - adapter,
        numbers=whole(lambda module: sum(weight_sizes(module))) - (whole(_trained_numbers) if adapted else 0),
        largest=max(weight_sizes(transformer)),
        part=_largest_part(architecture, transformer),
        adapter=adapter,
        gradients=gradients,
        moments=2 * gradients,
        moments_8bit=whole(_moments_8bit),
        sample=_batch_bytes(batch) / batch.rollout.num_samples + prompt / config.rollout.n,
        recompute=recompute.work.times(passes),
        sampling=sampling.work.times(passes),
        backward=replace(backward.work.times(units).then(LOSS), peak=backward.work.peak + LOSS.peak),
        step=_step(gradients),
    )


def trace_pass(config: Config, architecture: Architecture, layers: Layers = "own") -> Pass:
    """Trace recomputing the old log-probs of one micro-batch."""
    config = one_optimizer_step(config)
    actor, batch = build_actor(config, architecture)
    rollout, passes = _one_pass(batch, config)
    transformer = actor.weights.transformer
    kinds = _kinds(actor, architecture)
    with tracing(kinds) as tracer, computing(transformer, layers), tracer.section() as section:
        recompute_log_probs(actor, rollout)
    return Pass(weights=architecture.whole(transformer, nbytes), work=section.work.times(passes))


def build_actor(config: Config, architecture: Architecture) -> tuple[DiffusionActor, ActorBatch]:
    """The actor without values, of few blocks, and a micro-batch."""
    family = build_family(architecture.shallow, config.model, dtype=DTYPES[config.model.dtype])
    check_attention(family.transformer, config.model.attention)
    with on_meta():
        actor = DiffusionActor(family, config)
        batch = actor_batch(config, architecture, family, passes_of(config).samples)
    # Of gradients, which are all there from the second micro-batch on, the trace has none.
    for parameter in actor.weights.parameters.values():
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    return actor, batch


def _kinds(actor: DiffusionActor, architecture: Architecture) -> list[Kind]:
    """The blocks of the trained transformer and of its reference."""
    transformers = dict.fromkeys((actor.weights.transformer, actor.weights.reference))
    return [kind for transformer in transformers for kind in architecture.kinds(transformer)]


def _one_pass(batch: ActorBatch, config: Config) -> tuple[Rollout, int]:
    """The rollout of one forward pass of a micro-batch, and the number of these passes, which are alike."""
    if passes_of(config).folded:
        return batch.rollout, 1
    return batch.rollout.step(0), config.sampling.sde_window_size


def _step(gradients: float) -> Work:
    """A step of torch's AdamW on lists of tensors, as it does on a GPU, with so many bytes of gradients.

    Its ten operations read weights, gradients and moments 14 times. The root of the second moments is beside them.
    """
    return Work(peak=gradients, moved=14 * gradients, kernels=10)


@contextlib.contextmanager
def computing(transformer: Any, layers: Layers) -> Iterator[None]:
    """Let the transformer compute its adapter as the layers of an engine do."""

    def beside(layer: Any, inputs: Tensor) -> Tensor:  # as vllm-omni: the scale is in `lora_B`
        down, up = (factors[ADAPTER].weight.to(inputs.dtype) for factors in (layer.lora_A, layer.lora_B))
        return layer.base_layer(inputs) + functional.linear(functional.linear(inputs, down), up)

    adapted = [module for module in transformer.modules() if hasattr(module, "lora_A")]
    if layers == "merged" and adapted:
        transformer.disable_adapters()
    if layers == "beside":
        for layer in adapted:
            layer.forward = functools.partial(beside, layer)
    try:
        yield
    finally:
        if layers == "merged" and adapted:
            transformer.enable_adapters()
        if layers == "beside":
            for layer in adapted:
                del layer.forward


def recompute_log_probs(actor: DiffusionActor, rollout: Rollout) -> None:
    """Recompute the old log-probs, as decoupled mode does."""
    actor.log_probs(rollout, with_means=needs_old_means(actor.config))


def actor_batch(config: Config, architecture: Architecture, family: ModelFamily, samples: int) -> ActorBatch:
    """A batch without values, with the shapes of the configured engine's and old log-probs."""
    sampling = config.sampling
    shape = family.sample_shape(sampling.height, sampling.width, sampling.num_frames)
    steps = sampling.sde_window_size
    inputs = text_inputs(architecture, type(family), config)
    count = architecture.num_references
    references = family.reference_shapes(shape, count) if isinstance(family, PackedFamily) else {}

    def numbers(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.ones(samples, *size, dtype=dtype)

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
    rollout = Rollout(
        window=window,
        log_probs=numbers(steps),
        conditioning={
            **inputs.make(1, family.dtype),
            **{name: torch.ones(1, *size, dtype=family.dtype) for name, size in references.items()},
        },
        conditioning_rows=torch.zeros(samples, dtype=torch.long),
        group_ids=numbers(dtype=torch.long),
        policy_versions=numbers(dtype=torch.long),
    )
    return ActorBatch(
        rollout=rollout,
        advantages=numbers(dtype=torch.float64),
        old_log_probs=numbers(steps),
        old_means=numbers(steps, *shape) if needs_old_means(config) else None,
    )


def one_optimizer_step(config: Config) -> Config:
    """The config with an update of one optimizer step and explicit passes; `auto` becomes passes without a bound.

    Each image at each step is a row of a pass: which of them are equal, latents without values do not tell.
    """
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
            same_initial_noise=False,
        ),
    )


def _trained_bytes(module: nn.Module) -> float:
    return sum(weight.nbytes for weight in module.parameters() if weight.requires_grad)


def _trained_numbers(module: nn.Module) -> float:
    return sum(weight.numel() for weight in module.parameters() if weight.requires_grad)


def _moments_8bit(module: nn.Module) -> float:
    """Bytes of two moments a weight: in 8 bits with a float32 scale a block, or in float32 for a small weight."""
    sizes = [weight.numel() for weight in module.parameters() if weight.requires_grad]
    return sum(2 * (4 * size if size < SMALLEST else size + 4 * math.ceil(size / BLOCK)) for size in sizes)


def _largest_part(architecture: Architecture, transformer: Any) -> float:
    def of_blocks(module: nn.Module) -> float:
        return sum(weight.nbytes for weight in module.parameters())

    blocks = [of_blocks(block) for block in repeated_blocks(transformer)]
    return max(*blocks, of_blocks(transformer) - sum(blocks))


def _batch_bytes(batch: ActorBatch) -> int:
    """Bytes of a batch's tensors, including its rollout, without the conditioning."""
    records = (batch, batch.rollout, batch.rollout.window)
    values: Sequence[Any] = [getattr(record, entry.name) for record in records for entry in fields(record)]
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))
