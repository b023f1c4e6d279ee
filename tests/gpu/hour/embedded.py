"""The embedded model on the device beside the CPU: trajectories, log-probs and gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowcorr import config as configs
from flowcorr.actor import DiffusionActor
from flowcorr.config.schema import Config
from flowcorr.correction import OFF
from flowcorr.models import Conditioning, load_family
from flowcorr.records import ActorBatch, Rollout
from flowcorr.rollout import InProcessEngine
from tests.gpu.hour import meter
from tests.gpu.hour.parts import Hour
from tests.prompts import prompts_of
from tests.tiny_pipelines import engine_beside, stir

OVERRIDES = ("rollout.prompts_per_step=2", "rollout.n=8", "actor.mini_batches=1", "actor.grad_clip=1e9")
PROMPTS = ("cat", "dog")
FLOAT32, LOW = 1e-5, 2e-2
"""Nats an element, and shares of a norm: what float32, and TF32 or bfloat16, may differ by at most."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Stack:
    actor: DiffusionActor
    engine: InProcessEngine
    conditioning: Conditioning

    def sample(self) -> Rollout:
        return self.engine.sample(self.conditioning, (0, 1), training_step=1, with_means=True)

    def gradient(self, batch: ActorBatch) -> Tensor:
        """All gradients of an update, on the CPU."""
        with self.actor.weights.swapped(self.actor.weights.snapshot().tensors):
            self.actor.update(batch, OFF, training_step=1)
        gradients = [parameter.grad for parameter in self.actor.weights.parameters.values()]
        return torch.cat([grad.flatten().double().cpu() for grad in gradients if grad is not None])


def measure(hour: Hour) -> None:
    config = configs.load("tiny_jpeg_lora", OVERRIDES)
    on_cpu = _stack(config, torch.device("cpu"))
    rollout = replace(on_cpu.sample(), images=None)
    scores = on_cpu.actor.log_probs(rollout, with_means=True)
    batch = ActorBatch(
        rollout=rollout,
        advantages=torch.linspace(-1.5, 1.2, rollout.num_samples, dtype=torch.float64),
        old_log_probs=scores.log_probs,
        old_means=scores.means,
    )
    gradient = on_cpu.gradient(batch)
    for tf32 in (False, True):
        with meter.tf32(tf32):
            name, most = ("float32 with TF32", LOW) if tf32 else ("float32", FLOAT32)
            _compare(hour, name, most, _stack(config, hour.device), batch, gradient)
    low = replace(config, actor=replace(config.actor, autocast=True))
    _compare(hour, "autocast", LOW, _stack(low, hour.device), batch, gradient)
    low = replace(
        low, model=replace(config.model, dtype="bfloat16"), rollout=replace(config.rollout, dtype="bfloat16")
    )
    _compare(hour, "bfloat16", LOW, _stack(low, hour.device), batch, gradient)


def _compare(hour: Hour, name: str, most: float, stack: _Stack, batch: ActorBatch, gradient: Tensor) -> None:
    """What a stack on the device makes of a batch of the CPU, and of one that it samples itself."""
    tensors = {
        name: getattr(batch, name).to(hour.device) for name in ("advantages", "old_log_probs", "old_means")
    }
    there = replace(batch, rollout=batch.rollout.to(hour.device), **tensors)
    found = stack.actor.log_probs(there.rollout).log_probs.cpu()
    assert batch.old_log_probs is not None
    gap = (found - batch.old_log_probs).abs().max().item()
    hour.row(f"{name}: log-probs beside the CPU's", gap, unit="nats", at_most=most)
    error = (stack.gradient(there) - gradient).norm() / gradient.norm()
    hour.row(f"{name}: gradient beside the CPU's", error.item(), unit="of its norm", at_most=100 * most)
    own = stack.sample()
    error = (
        own.window.next_latents.cpu() - batch.rollout.window.next_latents
    ).norm() / batch.rollout.window.next_latents.norm()
    hour.row(f"{name}: trajectories beside the CPU's", error.item(), unit="of their norm", at_most=100 * most)
    gap = (stack.actor.log_probs(own).log_probs - own.log_probs).abs().max().item()
    hour.row(f"{name}: recomputed log-probs beside the rollout's", gap, unit="nats", at_most=most)


def _stack(config: Config, device: torch.device) -> _Stack:
    family = load_family(config.model, device)
    actor = DiffusionActor(family, config)
    stir(actor, 0.02)
    conditioning = family.encode(prompts_of(PROMPTS), actor.guidance)
    return _Stack(actor=actor, engine=engine_beside(actor), conditioning=conditioning)
