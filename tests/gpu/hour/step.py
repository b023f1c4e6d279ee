"""A training step of a model of real size: memory and time beside `plan`, host reads, folded and stepwise."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from flowcorr.actor import DiffusionActor
from flowcorr.actor.update import PolicyOptimizer
from flowcorr.algorithm import AutoMode, needs_old_means
from flowcorr.instruments.plan.answers import MEMORY_TOLERANCE
from flowcorr.instruments.plan.training import recompute_log_probs
from flowcorr.records import ActorBatch
from tests.gpu.hour import meter
from tests.gpu.hour.families import build_actor, correct, planned_config, sampled_batch, update
from tests.gpu.hour.parts import Hour
from tests.tiny_pipelines import engine_beside

MEMORY = {"unit": "GB", "within": MEMORY_TOLERANCE}
TIME = {"unit": "s", "within": 0.35}
SAME_POLICY = 2e-2
"""Nats an element: what rounding in bfloat16 may do to log-probs at most, in another geometry of the same model."""
ATTENTION = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.MATH,
)


def measure(hour: Hour, family: str) -> None:
    config, architecture, planned = planned_config(hour, family)
    device, micro_batch = hour.device, planned["micro_batch"]
    before = meter.allocated(device)
    actor, conditioning = build_actor(hour, config, architecture)
    vae = [*actor.family.pipeline.vae.parameters(), *actor.family.pipeline.vae.buffers()]
    given = sum(tensor.nbytes for tensor in (*vae, *conditioning.values()))
    weights = meter.allocated(device) - before - given
    average = sum(tensor.nbytes for tensor in (actor.weights.average or {}).values())
    hour.row(
        "weights, adapter and average", weights / 1e9, expected=(planned["weights"] + average) / 1e9, **MEMORY
    )
    hour.row("blocks", planned["blocks"], note=f"micro-batch {micro_batch}, {config.model.dtype}")

    engine = engine_beside(actor)
    batch = sampled_batch(engine, conditioning, config)
    window = config.sampling.sde_window_size
    passes = 2 * micro_batch * config.sampling.num_inference_steps / (micro_batch * window)
    sampling = meter.seconds(device, lambda: sampled_batch(engine, conditioning, config), repeats=1)
    decoding = 2 * micro_batch / planned["decoded"] * planned["decode_seconds"]
    expected = passes * planned["recompute_seconds"] + decoding
    hour.row(f"sampling {2 * micro_batch} images, decoded", sampling, expected=expected, **TIME)
    _decode(hour, actor, batch, planned)
    _recompute(hour, actor, batch.select(slice(0, micro_batch)), planned)

    scores = actor.log_probs(batch.rollout, with_means=needs_old_means(config))
    gap = (scores.log_probs - batch.rollout.log_probs).abs().max().item()
    hour.row("recomputed log-probs beside the rollout's", gap, unit="nats", at_most=SAME_POLICY)
    batch = correct(actor, replace(batch, old_log_probs=scores.log_probs, old_means=scores.means))
    _update(hour, actor, batch, planned)
    _folded_or_not(hour, actor, batch)


def _decode(hour: Hour, actor: DiffusionActor, batch: ActorBatch, planned: dict[str, float]) -> None:
    latents = batch.rollout.window.next_latents[: int(planned["decoded"]), -1]
    peak = meter.peak(hour.device, lambda: actor.family.decode(latents))
    seconds = meter.seconds(hour.device, lambda: actor.family.decode(latents))
    hour.row("decode, peak", peak / 1e9, expected=planned["decode_peak"] / 1e9, **MEMORY)
    hour.row("decode", seconds, expected=planned["decode_seconds"], **TIME)


def _recompute(hour: Hour, actor: DiffusionActor, batch: ActorBatch, planned: dict[str, float]) -> None:
    def recompute() -> None:
        recompute_log_probs(actor, batch.rollout)

    recompute()
    peak = meter.peak(hour.device, recompute)
    hour.row("recompute, peak", peak / 1e9, expected=planned["recompute_peak"] / 1e9, **MEMORY)
    seconds = meter.seconds(hour.device, recompute)
    hour.row("recompute", seconds, expected=planned["recompute_seconds"], **TIME)
    _report_reads(hour, "recompute", meter.host_reads(hour.device, recompute))


def _update(hour: Hour, actor: DiffusionActor, batch: ActorBatch, planned: dict[str, float]) -> None:
    def learn() -> None:
        update(actor, batch)

    before = meter.allocated(hour.device)
    metrics = actor.update(batch, AutoMode.of(actor.config).correction, training_step=1).metrics.compute()
    if not metrics["actor/updates"]:
        hour.row("update", "skipped", failed=True, note="the gradient is not finite, or no term was kept")
        _not_finite(hour, actor, batch)
        return
    hour.row("norm of the gradient", metrics["actor/grad_norm"])
    actor.optimizer.adamw.zero_grad()
    moments = meter.allocated(hour.device) - before
    hour.row("moments", moments / 1e9, expected=planned["moments"] / 1e9, **MEMORY)
    peak = meter.peak(hour.device, learn)
    hour.row("update, peak", peak / 1e9, expected=planned["update_peak"] / 1e9, **MEMORY)
    seconds = meter.seconds(hour.device, learn, repeats=1)
    hour.row("update of two micro-batches", seconds, expected=planned["update_seconds"], **TIME)
    _report_reads(hour, "update", meter.host_reads(hour.device, learn))
    for kernel, share in meter.kernel_shares(hour.device, learn, most=6).items():
        hour.row(f"update: {kernel[:80]}", share, unit="of the time")


def _not_finite(hour: Hour, actor: DiffusionActor, batch: ActorBatch) -> None:
    """Parameters whose gradient of one sample's log-probs is not finite, by kernel of attention."""
    sample = batch.rollout.select(slice(1))
    for kernel in (None, *ATTENTION):
        name = "any kernel" if kernel is None else kernel.name
        actor.optimizer.adamw.zero_grad()
        try:
            with contextlib.nullcontext() if kernel is None else sdpa_kernel([kernel]):
                actor.scorer.score(sample).log_probs.sum().backward()
        except RuntimeError as error:
            hour.row(f"not finite, {name}", "cannot run", note=str(error)[:200])
            continue
        gradients = {
            name: parameter.grad
            for name, parameter in actor.weights.parameters.items()
            if parameter.grad is not None
        }
        bad = [name for name, gradient in gradients.items() if not gradient.isfinite().all()]
        ends = ", ".join([*bad[:2], "...", *bad[-2:]]) if bad else ""
        hour.row(f"not finite, {name}", len(bad), note=f"of {len(gradients)} parameters {ends}".rstrip())


def _report_reads(hour: Hour, what: str, reads: dict[str, int] | None) -> None:
    if reads is None:
        hour.row(f"{what}, host reads", "not on a CPU")
        return
    places = ", ".join(f"{place} x {count}" for place, count in reads.items())
    hour.row(f"{what}, host reads", sum(reads.values()), note=places)


def _folded_or_not(hour: Hour, actor: DiffusionActor, batch: ActorBatch) -> None:
    """The other setting of `actor.fold_steps`, beside the recipe's."""
    config = actor.config
    folded = config.actor.fold_steps
    other = replace(config, actor=replace(config.actor, fold_steps=not folded))
    of_recipe = actor.log_probs(batch.rollout).log_probs
    actor.scorer.config = other
    optimizer = PolicyOptimizer(actor.weights, actor.scorer, other)
    correction = AutoMode.of(config).correction
    of_other = actor.log_probs(batch.rollout).log_probs
    name = "stepwise" if folded else "folded"
    gap = (of_recipe - of_other).abs().max().item()
    hour.row(f"{name}: log-probs beside the recipe's", gap, unit="nats", at_most=SAME_POLICY)
    hour.row(
        f"{name}: recompute of all",
        meter.seconds(hour.device, lambda: actor.log_probs(batch.rollout)),
        unit="s",
    )

    def learn() -> None:
        optimizer.update(batch, correction, training_step=1)

    learn()
    optimizer.adamw.zero_grad()
    actor.optimizer.adamw.zero_grad()
    hour.row(f"{name}: update, peak", meter.peak(hour.device, learn) / 1e9, unit="GB")
    hour.row(f"{name}: update", meter.seconds(hour.device, learn, repeats=1), unit="s")
    actor.scorer.config = config
    assert all(torch.isfinite(parameter).all() for parameter in actor.weights.parameters.values())
