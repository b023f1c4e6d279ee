"""The phases of a step in their order, with the time that each takes."""

from __future__ import annotations

from dataclasses import replace

from flowcorr.config import resolve_engine
from flowcorr.plan.answers import Memory, Merging, Phase
from flowcorr.plan.devices import Gpu, Utilisation
from flowcorr.plan.engine import COMPILED, EngineSpeed, engine_peak, engine_speed, wraps_adapters
from flowcorr.plan.rank import Rank
from flowcorr.plan.training import NOTHING, Work
from flowcorr.rewards.combine import computes_on_gpu, states
from flowcorr.rollout.base import trains_shards

HOST_BANDWIDTH = 25e9
"""Bytes per second between a GPU and the host, over PCIe."""
OCR_SECONDS = 0.55
"""CPU seconds per image of OCR with text detection."""


def phases(rank: Rank, memory: Memory, gpu: Gpu, utilisation: Utilisation) -> list[Phase]:
    """The phases of a run on a GPU, of one rank, and of one engine where the engines are others' processes."""
    config, training, ranks = rank.config, rank.training, rank.ranks
    link = gpu.link_among(ranks) * utilisation.link

    def phase(
        name: str, peak: float | None, work: Work, extra: float = 0.0, *, of_engine: bool = False
    ) -> Phase:
        return Phase.within_tolerance(
            name=name,
            where="engine" if of_engine else "trainer",
            peak=peak,
            flops=work.flops,
            moved=work.moved,
            seconds=work.seconds(gpu, utilisation, link) + extra,
        )

    own = rank.own_engine
    share = rank.sampled_share
    updates = rank.mini_batches * config.actor.epochs
    reduces = ranks > 1 and not trains_shards(config, ranks)
    reduced = updates * 2 * training.gradients / link if reduces else 0.0
    sample = phase(
        "sample", memory.engine if own else memory.sample, rank.sampling.times(share), of_engine=own
    )
    if speed := engine_speed(config):
        sample = _at_speed(sample, speed, rank.sampling.times(share), engine_peak(config, gpu))
    found = [
        phase("load", memory.load, NOTHING, memory.load / HOST_BANDWIDTH),
        phase("encode prompts", memory.encode, rank.text.scaled(rank.traces.prompts)),
        sample,
        phase(
            "decode",
            memory.engine if own else memory.decode,
            rank.traces.decoder.scaled(rank.images * share),
            of_engine=own,
        ),
    ]
    for reward in rank.traces.rewards:
        found.append(phase("reward model", memory.reward, reward.scaled(rank.images)))
    sampled = sum(phase.seconds or 0.0 for phase in found if phase.name in ("sample", "decode"))
    recomputed = 0.0 if rank.bypass else phase("", None, rank.recomputing).seconds or 0.0
    updating = phase("update", memory.update, rank.updating, reduced)
    beside = recomputed + sampled
    if config.rollout.max_staleness:  # Ray workers score the next step's images beside training
        follows = config.reward.placement == "ray"
        beside = recomputed + (updating.seconds or 0.0 if follows else 0.0)
    found += _host_rewards(rank, beside=beside)
    if not rank.bypass:
        found.append(phase("recompute", memory.recompute, rank.recomputing))
    found += [
        updating,
        phase("sync", memory.sync, NOTHING, _synced(rank) / HOST_BANDWIDTH),
    ]
    if own:
        held = 0.0 if memory.engine_sleeps else memory.engine
        found.append(Phase(name="engine beside it", where="engine", peak=held))
    return found


def _at_speed(phase: Phase, speed: EngineSpeed, work: Work, peak: float) -> Phase:
    """The phase of an engine with a speed of its own."""
    return replace(
        phase,
        seconds=speed.seconds(work, peak),
        fastest=speed.seconds(work, peak, speed.fastest),
        slowest=speed.seconds(work, peak, speed.slowest),
    )


def _synced(rank: Rank) -> float:
    """Bytes that pass between GPUs and the host in a step, for the engine's weights."""
    if not rank.own_engine:
        return 0.0
    adapted = wraps_adapters(rank.config)
    sent = 2 * (rank.training.gradients if adapted else rank.engine_weights)
    # A sleeping engine's weights move to the host and back, twice in a step.
    asleep = bool(rank.config.rollout.engine.get("enable_sleep_mode"))
    return sent + (4 * rank.engine_weights if asleep else 0.0)


def merging(rank: Rank, gpu: Gpu, utilisation: Utilisation) -> Merging | None:
    """The effect of `weight_sync=merged`; None for an engine that cannot merge, or already does."""
    config = rank.config
    speed = engine_speed(config)
    quantized = config.rollout.engine.get("quantization") or config.rollout.engine.get("quantization_config")
    if not resolve_engine(config.rollout.name).compiles or not wraps_adapters(config) or quantized:
        return None
    share = rank.sampled_share
    adapted, merged = rank.sampling.times(share), rank.merged_sampling.times(share)
    if speed is None:
        saved = adapted.seconds(gpu, utilisation) - merged.seconds(gpu, utilisation)
    else:
        peak = engine_peak(config, gpu)
        saved = speed.seconds(adapted, peak) - COMPILED.seconds(merged, peak)
    more = 2 * (rank.engine_weights - rank.training.gradients) / HOST_BANDWIDTH
    return Merging(sampling=saved, sync=more)


def _host_rewards(rank: Rank, *, beside: float) -> list[Phase]:
    """Phases of the rewards beside the trainer's GPU; `beside` are the seconds of other work that they overlap with."""
    config = rank.config.reward
    overlaps = all(states(term, "overlaps") for term in config.step_terms)
    follows = config.placement == "ray" == rank.config.rollout.placement
    if not (follows or config.placement == "thread" or (config.placement == "auto" and overlaps)):
        beside = 0.0
    share = rank.ranks / config.num_workers if config.placement == "ray" else 1
    found = []
    for term in config.step_terms:
        if computes_on_gpu(term) and config.placement != "ray":
            continue
        known = term.name == "ocr" and bool(term.options.get("detect"))
        seconds = max(0.0, rank.images * OCR_SECONDS * share - beside) if known else None
        found.append(
            Phase.within_tolerance(name=f"reward {term.name}", where="host", peak=None, seconds=seconds)
        )
    return found
