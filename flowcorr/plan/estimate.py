"""Makes a plan from a configuration: memory and time of each phase of a run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flowcorr.actor.passes import is_bounded, passes_of
from flowcorr.config import resolve_engine
from flowcorr.config.rules import check
from flowcorr.config.schema import Config
from flowcorr.errors import ConfigError
from flowcorr.plan.answers import MARGIN, Memory, Plan
from flowcorr.plan.devices import Gpu, Utilisation
from flowcorr.plan.engine import engine_memory, engine_speed
from flowcorr.plan.rank import Rank
from flowcorr.plan.timeline import merging, phases
from flowcorr.plan.traces import Traces, trace
from flowcorr.plan.training import one_optimizer_step
from flowcorr.rollout.base import needs_base, shards_weights


def make_plan(
    config: Config,
    *,
    gpu: Gpu,
    ranks: int = 1,
    title: str = "",
    utilisation: Utilisation = Utilisation(),  # noqa: B008
) -> Plan:
    """Plan a run from its configuration. Only configurations and prompts are loaded.

    Args:
        config: the run's configuration.
        gpu: the device of each rank.
        ranks: training ranks that share a step's prompts.
        title: the recipe, with its overrides.
        utilisation: the shares of the device's peak speeds that the run reaches.

    Raises:
        ConfigError: the model's configurations, or the prompts, cannot be read.
    """
    made = plan_of(trace(config, ranks), config, gpu=gpu, ranks=ranks, title=title, utilisation=utilisation)
    bounded = within(config, made)
    if bounded is None:
        return made
    return plan_of(trace(bounded, ranks), bounded, gpu=gpu, ranks=ranks, title=title, utilisation=utilisation)


def within(config: Config, made: Plan) -> Config | None:
    """The config with the passes that a run takes on this GPU by `auto`; None if they are those of the plan.

    Args:
        config: the run's configuration.
        made: its plan, whose passes are those of `auto` without a bound.
    """
    memory, steps = made.memory, config.sampling.sde_window_size
    if not is_bounded(config.actor) or made.fits(memory.update):
        return None
    held = passes_of(one_optimizer_step(config))
    a_row = memory.update_a_sample / (steps if held.folded else 1)
    room = made.gpu.memory / MARGIN - memory.update_without_samples
    passes = passes_of(config, max(1, int(room / a_row)))
    actor = replace(config.actor, micro_batch_size=passes.samples, fold_steps=passes.folded)
    return replace(config, actor=actor)


def plan_of(
    traces: Traces,
    config: Config,
    *,
    gpu: Gpu,
    ranks: int = 1,
    title: str = "",
    utilisation: Utilisation = Utilisation(),  # noqa: B008
) -> Plan:
    """The plan of a run whose work was traced, on a GPU and in a layout.

    Args:
        traces: of `config`, or of one that differs from it in its layout: ranks, workers, staleness, sleeping engines.
        config: the run's configuration.
        gpu, ranks, title, utilisation: see `make_plan`.
    """
    rank = Rank.of(traces, config, ranks)
    memory = _memory(rank)
    return Plan(
        title=title,
        gpu=gpu,
        utilisation=utilisation,
        ranks=ranks,
        images=rank.images,
        phases=tuple(phases(rank, memory, gpu, utilisation)),
        memory=memory,
        micro_batch=rank.micro_batch,
        mini_batch=rank.mini_batch,
        bypass=rank.bypass,
        overlaps=bool(config.rollout.max_staleness),
        engine=engine_speed(config),
        merging=merging(rank, gpu, utilisation),
        attention=config.model.attention,
        ways_to_fit=_ways_to_fit(rank),
        ways_to_share=_ways_to_share(rank, memory),
        other_ways=other_ways(config, ranks),
        engine_ways=_engine_ways(rank),
    )


def _ways_to_fit(rank: Rank) -> dict[str, Memory]:
    """Overrides that save the trainer much memory, with the memory under each."""
    ways = {}
    if not rank.config.model.lora.rank and rank.config.actor.optimizer == "adamw":
        ways["actor.optimizer=adamw_8bit"] = replace(rank, training=rank.training.in_8_bits())
    if not rank.config.model.offload_text_encoders:
        ways["model.offload_text_encoders=true"] = replace(rank, text=rank.traces.offloaded_text)
    return {overrides: _memory(changed) for overrides, changed in ways.items()}


def _engine_ways(rank: Rank) -> dict[str, float]:
    """Overrides that save an engine in its own processes memory, with its peak under each."""
    config = rank.config
    options = config.rollout.engine
    merges = options.get("weight_sync") == "merged" or not config.model.lora.rank
    asked = options.get("quantization") or options.get("quantization_config")
    own_processes = resolve_engine(config.rollout.name).own_processes
    if not own_processes or not rank.traces.quantizable or merges or asked:
        return {}
    fp8 = replace(config, rollout=replace(config.rollout, engine={**options, "quantization": "fp8"}))
    return {"rollout.engine.quantization=fp8": _memory(replace(rank, config=fp8)).engine}


def other_ways(config: Config, ranks: int) -> tuple[str, ...]:
    """Words for what else saves memory, in a run on so many ranks."""
    if config.model.lora.rank:
        shards = "more ranks" if shards_weights(config, ranks) else "actor.fsdp=true on several ranks"
        quantized = config.model.quantization != "none"
        return (
            *(() if quantized else (shards,)),
            *(("model.quantization=nf4",) if not quantized and _may_quantize(config) else ()),
            "a smaller model.lora.rank",
        )
    if shards_weights(config, ranks):
        ways = ["more ranks"]
    elif resolve_engine(config.rollout.name).shares_weights and config.rollout.placement == "local":
        ways = ["actor.fsdp=true on several ranks"]
    else:
        ways = ["actor.fsdp=true on several ranks (with rollout.name=in_process rollout.placement=local)"]
    if config.actor.optimizer == "adamw":
        ways.append("actor.optimizer=adamw_8bit")
    return tuple(ways)


def _may_quantize(config: Config) -> bool:
    """Whether the run may have its frozen weights in NF4."""
    try:
        check(replace(config, model=replace(config.model, quantization="nf4")))
    except ConfigError:
        return False
    return True


def _ways_to_share(rank: Rank, memory: Memory) -> dict[str, float]:
    """Overrides that save memory on a GPU shared by trainer and engine, with the peak under each."""
    if not memory.may_share:
        return {}
    config = rank.config
    changes: list[dict[str, Any]] = [{"enable_sleep_mode": True}]
    if rank.traces.quantizable:
        changes.append({"enable_sleep_mode": True, "quantization": "fp8"})
    ways = {}
    for change in changes:
        engine = {**config.rollout.engine, **change}
        changed = replace(config, rollout=replace(config.rollout, engine=engine))
        overrides = " ".join(f"rollout.engine.{key}={str(value).lower()}" for key, value in change.items())
        ways[overrides] = _memory(replace(rank, config=changed)).shared
    return ways


def _memory(rank: Rank) -> Memory:
    config, training = rank.config, rank.training
    decoder = rank.traces.decoder
    rewards = (*rank.traces.rewards, *rank.traces.gold)
    weights = training.weights + decoder.weights + sum(reward.weights for reward in rewards)
    with_text = weights + rank.text.weights
    encode = with_text if rank.traces.text_fits else max(with_text, rank.resident + rank.text.weights)
    resident = rank.resident
    collected = rank.collected
    update = resident + collected + rank.mini_batch * training.sample
    without_samples = training.gradients + training.gathered + training.backward.copied
    engine = 0.0
    if rank.own_engine:
        spread = config.rollout.engine.get("tensor_parallel_size", 1)
        held = rank.engine_weights / spread + rank.engine_adapter
        if needs_base(config):  # a Ray worker merges adapters into a copy of its model
            held += training.transformer
        engine = engine_memory(held, rank.sampling, decoder)
    return Memory(
        load=with_text,
        encode=encode + rank.text.work.peak,
        idle=resident + collected,
        sample=resident + collected + rank.sampling.peak,
        decode=resident + collected + decoder.work.peak,
        reward=resident + collected + max((reward.work.peak for reward in rewards), default=0.0),
        recompute=resident + collected + training.recompute.peak,
        update=update + max(training.backward.peak, training.step.peak),
        update_without_samples=update + without_samples,
        update_a_sample=(training.backward.peak - without_samples) / rank.micro_batch,
        sync=resident + collected + training.gradients + _merged(rank),
        engine=engine,
        engine_sleeps=bool(config.rollout.engine.get("enable_sleep_mode")),
        may_share=rank.own_engine and config.rollout.placement == "local",
    )


def _merged(rank: Rank) -> float:
    """Bytes of merging the largest weight in float32, for an engine that gets whole weights; otherwise 0."""
    config = rank.config
    asked = config.rollout.engine.get("weight_sync")
    if not rank.own_engine or (config.model.lora.rank and asked != "merged"):
        return 0.0
    return 3 * 4 * rank.training.largest
