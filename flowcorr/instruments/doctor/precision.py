"""Runs both stacks in float32, so that no rounding hides a fault."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from flowcorr.actor import DiffusionActor
from flowcorr.config.schema import Config
from flowcorr.devices import empty_cache, free_memory
from flowcorr.health.finding import Finding
from flowcorr.instruments.doctor.exam import largest_gap
from flowcorr.instruments.doctor.findings import of_check, passed, skipped, warned
from flowcorr.instruments.outcome import Report
from flowcorr.models import Conditioning, Guidance, ModelFamily
from flowcorr.models.quantized import weight_sizes
from flowcorr.rollout.precision import trainer_quantization, usual_gap

MEMORY = 0.8  # share of the free memory that float32 may take
# Of vllm-omni; without an explicit attention backend it takes one that computes in float32.
ROUNDING_OPTIONS = (
    *("quantization", "quantization_config"),
    *("diffusion_attention_backend", "diffusion_attention_config"),
)


@runtime_checkable
class ComputesInFloat32(Protocol):
    """An engine that can compute in float32 for a while."""

    def in_float32(self) -> contextlib.AbstractContextManager[None]:
        """A context without rounding: no lower precision, emulation or quantization."""


def float32_config(config: Config) -> Config:
    """The run with both stacks in float32, quantized only if both are; equals `config` if that changes nothing."""
    model, rollout = config.model, config.rollout
    options = {key: value for key, value in rollout.engine.items() if key not in ROUNDING_OPTIONS}
    quantization = "none" if trainer_quantization(config) != "none" else model.quantization
    return replace(
        config,
        model=replace(
            model, dtype="float32", quantization=quantization, lora=replace(model.lora, dtype="float32")
        ),
        rollout=replace(rollout, dtype="float32", emulate="none", engine=options),
        actor=replace(config.actor, autocast=False),
    )


@contextlib.contextmanager
def actor_in_float32(actor: DiffusionActor) -> Iterator[None]:
    """Run the actor in float32, then restore its weights and configuration."""
    config = actor.config
    family = actor.family
    with _upcast([family.transformer, family.pipeline.vae]):
        actor.config = actor.scorer.config = float32_config(config)
        try:
            yield
        finally:
            actor.config = actor.scorer.config = config


def in_float32(conditioning: Mapping[str, torch.Tensor]) -> Conditioning:
    """Embeddings in float32; masks as they are."""
    return {name: rows.float() if rows.is_floating_point() else rows for name, rows in conditioning.items()}


def fits(family: ModelFamily, *, copies: int) -> bool:
    """Whether the device has room for `copies` more of all models of a pipeline, in float32."""
    models = [part for part in family.pipeline.components.values() if isinstance(part, nn.Module)]
    size = 4 * sum(sum(weight_sizes(model)) for model in models)
    device = next(family.transformer.parameters()).device
    return copies * size <= MEMORY * free_memory(device)


def release(device: torch.device) -> None:
    """Free the memory of models that nothing refers to any more."""
    gc.collect()
    empty_cache(device)


def not_examined(config: Config, family: ModelFamily, reason: str) -> Finding:
    """The finding of a doctor that examined no float32 stacks: it names the gap that rounding may hide."""
    gap = largest_gap(usual_gap(config, family.amplification(Guidance.of(config.sampling))))
    return of_check(
        "float32",
        skipped(
            f"not examined in float32: {reason}. A fault that changes velocities by less than {100 * gap:.2g} % passes "
            "or warns, unless a check names it",
            limit=gap,
        ),
    )


def agreement(report: Report) -> Finding:
    """The finding on an exam in float32 in which nothing failed."""
    remarks = [finding for finding in report.findings if finding.level == "warning"]
    if not remarks:
        return of_check("float32", passed("both stacks agree in float32"))
    told = "; ".join(f"{finding.cause}: {finding.sentence}" for finding in remarks)
    checks = [finding.cause for finding in remarks]
    return of_check("float32", warned(f"in float32: {told}", remarks[0].remedy, checks=checks))


def marked(finding: Finding) -> Finding:
    """A finding of an exam in float32 that is the whole report."""
    if finding.level != "serious":
        return finding
    return replace(
        finding,
        sentence=f"in float32: {finding.sentence}",
        numbers={**finding.numbers, "dtype": "float32"},
    )


@contextlib.contextmanager
def pipeline_in_float32(family: ModelFamily) -> Iterator[None]:
    """Run all models of a pipeline in float32, then restore the original values."""
    with _upcast([part for part in family.pipeline.components.values() if isinstance(part, nn.Module)]):
        yield


@contextlib.contextmanager
def _upcast(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Run models in float32, then restore the original values."""
    tensors: list[Any] = [
        tensor
        for module in modules
        for tensor in itertools.chain(module.parameters(), module.buffers())
        if tensor.is_floating_point()
    ]
    dtypes = [tensor.dtype for tensor in tensors]
    for tensor in tensors:
        tensor.data = tensor.data.float()
    try:
        yield
    finally:
        for tensor, dtype in zip(tensors, dtypes, strict=True):
            tensor.data = tensor.data.to(dtype)
