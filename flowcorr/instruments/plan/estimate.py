"""Makes a plan of a configuration: peak memory and time of each phase, and changes that make it fit."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

from flowcorr.actor.passes import is_bounded, passes_of
from flowcorr.algorithm import AutoMode
from flowcorr.config import resolve_engine
from flowcorr.config.rules import check
from flowcorr.config.schema import Config
from flowcorr.errors import ConfigError
from flowcorr.instruments.plan.answers import MARGIN, Memory, Phase, Plan
from flowcorr.instruments.plan.devices import ADAPTED, COMPILED, DECODING, EAGER, LINK, Gpu, Speed
from flowcorr.instruments.plan.sharding import of_rank
from flowcorr.instruments.plan.traces import Traces, engine_layers, sampled_together, trace, wraps_adapters
from flowcorr.instruments.plan.tracing import Work
from flowcorr.instruments.plan.training import Training, one_optimizer_step
from flowcorr.models import DTYPES
from flowcorr.rewards.combine import computes_on_gpu, states
from flowcorr.rollout.base import needs_base, samples_codes, shards_weights, shares_weights, trains_shards

HOST_BANDWIDTH = 25e9
"""Bytes per second between a GPU and the host, over PCIe."""
OCR_SECONDS = 0.55
"""CPU seconds per image of OCR with text detection."""
QUANTIZED_BYTES = {"fp8": 1.0, "int8": 1.0, "int4": 0.5}
"""Bytes per weight, by vllm-omni's quantization."""
HALF = ("bfloat16", "float16")
OFFLOAD, SLEEP = "model.offload_text_encoders=true", "rollout.engine.enable_sleep_mode=true"
FP8, IN_8_BITS = "rollout.engine.quantization=fp8", "actor.optimizer=adamw_8bit"
ON_TRAINED = "trainer.eval_on=trained"


def make_plan(config: Config, *, gpu: Gpu, ranks: int = 1, title: str = "") -> Plan:
    """Plan a run from its configuration. Only configurations and prompts are loaded.

    Args:
        config: the run's configuration.
        gpu: the GPU of each rank.
        ranks: training ranks that share a step's prompts.
        title: the recipe, with its overrides.

    Raises:
        ConfigError: the model's configurations, or the prompts, cannot be read.
    """
    made = plan_of(trace(config, ranks), config, gpu=gpu, ranks=ranks, title=title)
    if not is_bounded(config.actor) or made.fits(made.memory.phases["update"]):
        return made
    # `auto` takes the passes that fit.
    held = passes_of(one_optimizer_step(config))
    a_row = made.memory.update_a_sample / (config.sampling.sde_window_size if held.folded else 1)
    rows = int((gpu.memory / MARGIN - made.memory.update_fixed) / a_row)
    passes = passes_of(config, max(1, rows))
    actor = replace(config.actor, micro_batch_size=passes.samples, fold_steps=passes.folded)
    bounded = replace(config, actor=actor)
    return plan_of(trace(bounded, ranks), bounded, gpu=gpu, ranks=ranks, title=title)


def plan_of(traces: Traces, config: Config, *, gpu: Gpu, ranks: int = 1, title: str = "") -> Plan:
    """The plan of a run that was traced; see `make_plan`."""
    rank = _Rank(traces, config, ranks)
    memory = rank.memory()
    engine = rank.engine_speed
    return Plan(
        title=title,
        gpu=gpu,
        ranks=ranks,
        images=rank.images,
        micro_batch=traces.micro_batch,
        largest_micro_batch=_largest_micro_batch(memory, gpu, rank.mini_batch),
        memory=memory,
        phases=tuple(rank.phases(gpu)),
        overlaps=bool(config.rollout.max_staleness),
        speeds={"trainer": EAGER, "engine": engine},
        changes={keys: changed.memory() for keys, changed in rank.changes().items()},
        shared_changes={
            keys: changed.memory().shared or 0.0
            for keys, changed in rank.engine_changes(SLEEP, f"{SLEEP} {FP8}").items()
            if memory.shared is not None
        },
        engine_changes={keys: changed.memory().engine for keys, changed in rank.engine_changes(FP8).items()},
        other_changes=other_changes(config, ranks),
    )


class _Rank:
    """One rank's share of a run: the bytes that it holds, and the work that it does."""

    def __init__(self, traces: Traces, config: Config, ranks: int) -> None:
        self.traces, self.config, self.ranks = traces, config, ranks
        self.training: Training = of_rank(traces.training, config, ranks)
        self.prompts = math.ceil(config.rollout.prompts_per_step / ranks)
        self.images = self.prompts * config.rollout.n
        self.learned = self.prompts * config.rollout.learned_per_prompt
        self.mini_batches = min(config.actor.mini_batches, self.prompts)
        self.mini_batch = math.ceil(self.prompts / self.mini_batches) * config.rollout.learned_per_prompt
        self.in_8_bits = config.actor.optimizer == "adamw_8bit"
        engine = resolve_engine(config.rollout.name)
        self.in_workers = config.rollout.placement == "ray"
        self.own_engine = engine.own_processes or self.in_workers
        self.options = config.rollout.engine
        self.quantized = self.options.get("quantization") or self.options.get("quantization_config")
        self.sleeps = bool(self.options.get("enable_sleep_mode"))
        self.sends_adapter = wraps_adapters(config)
        self.bypass = AutoMode.of(config).correction.mode == "bypass"

    # Memory ------------------------------------------------------------------------------------------------

    def memory(self) -> Memory:
        """Peak bytes by phase."""
        config, training, traces = self.config, self.training, self.traces
        text = traces.text[config.model.offload_text_encoders]
        rewards = (*traces.rewards, *traces.gold)
        moments = training.moments_8bit if self.in_8_bits else training.moments
        resident = self._resident(moments)
        load = (
            training.weights
            + traces.decoder.weights
            + sum(reward.weights for reward in rewards)
            + text.weights
        )
        copied = self.learned if self.learned < self.images else 0
        idle = resident + (self.images + copied) * training.sample
        fixed = idle + self.mini_batch * training.sample + training.gradients
        in_pass = fixed + training.gathered
        a_sample = training.backward.peak / traces.micro_batch
        step = 0.0 if self.in_8_bits else training.step.peak
        merged = 3 * 4 * training.largest if self.own_engine and not self.sends_adapter else 0.0
        phases = {
            "load": load,
            "encode": (load if traces.text_fits else max(load, resident + text.weights)) + text.work.peak,
            "reward": idle + max((reward.work.peak for reward in rewards), default=0.0),
            "recompute": idle + training.gathered_forward + training.recompute.peak,
            "update": max(in_pass + a_sample * traces.micro_batch, fixed + step),
            "sync": idle + training.gradients + merged + (training.gradients if self.in_workers else 0),
            "evaluate": resident + self._evaluation_peak(),
        }
        sampling = self._sampling_peak()
        if not self.own_engine:
            phases |= {"sample": idle + sampling, "decode": idle + traces.decoder.work.peak}
        engine = self._engine(sampling) if self.own_engine else 0.0
        shared = None
        if self.own_engine and config.rollout.placement == "local":
            if self.sleeps:
                shared = max(*phases.values(), idle + engine)
            else:
                before = ("load", "encode")  # the engine starts
                beside = max(peak for name, peak in phases.items() if name not in before)
                shared = max(load, phases["encode"], beside + engine)
        return Memory(
            phases=phases, engine=engine, shared=shared, update_fixed=in_pass, update_a_sample=a_sample
        )

    def _resident(self, moments: float) -> float:
        """Bytes that the trainer holds at all times after its first optimizer step."""
        config, training, traces = self.config, self.training, self.traces
        trained = training.gradients
        copied = not self.own_engine and needs_base(config, self.ranks)
        # Ray's workers hold old versions of the weights in main memory.
        local = not self.in_workers and not shares_weights(config, self.ranks)
        versions = config.rollout.staleness + 1 if local else 0
        return (
            training.weights
            + moments
            + traces.decoder.weights
            + sum(reward.weights for reward in (*traces.rewards, *traces.gold))
            + (0 if config.actor.ema is None else self._averaged)
            + trained * versions  # the engine's history
            + (training.transformer if config.actor.kl_coef and not config.model.lora.rank else 0)
            + (self._engine_weights if copied else 0)
        )

    def _evaluation_peak(self) -> float:
        """Bytes of an evaluation in the trainer's process, on top of its permanent memory."""
        config, training, traces = self.config, self.training, self.traces
        rows = min(config.rollout.evaluation_batch_size, math.ceil(traces.num_heldout / self.ranks))
        sampling = training.gathered_forward + traces.evaluation.peak * rows / self._rows_traced
        # The average takes the place of the trained weights, which are kept meanwhile.
        kept = 0.0 if config.actor.ema is None else training.gradients
        if config.trainer.eval_on == "both":
            kept += training.numbers * DTYPES[config.model.dtype].itemsize + training.adapter
        return kept + max(sampling, traces.evaluation_decoder.work.peak)

    @property
    def _averaged(self) -> float:
        """Bytes of the average of the trained weights, which is float32 for weights of any dtype."""
        model = self.config.model
        dtype = model.lora.dtype if model.lora.rank else model.dtype
        return self.training.gradients * 4 / DTYPES[dtype].itemsize

    @property
    def _engine_weights(self) -> float:
        """Bytes of the engine's transformer: as the trainer's, if it is the same model in process, else unquantized."""
        if samples_codes(self.config):
            return self.training.transformer
        size = DTYPES[self.config.rollout.dtype].itemsize
        each = QUANTIZED_BYTES.get(str(self.quantized), size) if self.quantized else size
        shards = self.ranks if shards_weights(self.config, self.ranks) else 1
        return shards * self.training.numbers * each

    def _engine(self, sampling: float) -> float:
        """Peak bytes of an engine in its own process."""
        config = self.config
        adapter = self.training.adapter / DTYPES[config.model.lora.dtype].itemsize
        held = self._engine_weights / (self.options.get("tensor_parallel_size") or 1)
        held += adapter * DTYPES[config.rollout.dtype].itemsize
        if not resolve_engine(config.rollout.name).own_processes:
            held += self.training.gradients  # a Ray worker on a GPU keeps what it loaded last
        if needs_base(config):  # a Ray worker merges adapters into a copy of its model
            held += self.training.transformer
        return engine_peak(held, sampling, self.traces.decoder.weights, self.traces.decoder.work.peak)

    @property
    def _rows(self) -> int:
        """Images that the engine denoises together."""
        return sampled_together(self.config, self.images)

    @property
    def _rows_traced(self) -> int:
        """Images and steps in one traced forward pass."""
        steps = self.config.sampling.sde_window_size
        return self.traces.micro_batch * (steps if passes_of(self.config).folded else 1)

    def _sampling_peak(self) -> float:
        gathered = 0.0 if self.own_engine else self.training.gathered_forward
        return gathered + self.traces.sampling.peak * self._rows / self._rows_traced

    # Time --------------------------------------------------------------------------------------------------

    @property
    def engine_speed(self) -> Speed:
        """The speed of the run's rollout engine."""
        if not resolve_engine(self.config.rollout.name).compiles or self.options.get("enforce_eager"):
            return EAGER
        return ADAPTED if engine_layers(self.config) == "beside" else COMPILED

    def phases(self, gpu: Gpu) -> list[Phase]:
        """The phases of a step: of one rank, and of one engine if engines have processes of their own."""
        config, training = self.config, self.training
        half = config.model.dtype in HALF or config.actor.autocast
        link = gpu.link_among(self.ranks) * LINK
        images, share = self.images, self._sampled_share
        micro_batches = self.learned / self.traces.micro_batch
        updates = self.mini_batches * config.actor.epochs
        place: Literal["trainer", "engine"] = "engine" if self.own_engine else "trainer"
        engine_half = config.rollout.dtype in HALF

        def phase(name: str, work: Work, sent: float = 0.0, extra: float = 0.0) -> Phase:
            seconds = max(roofline(work, gpu, EAGER, half=half), sent / link) + extra
            return Phase(name=name, where="trainer", flops=work.flops, seconds=seconds)

        denoised = self._denoising().times(share)
        gathers = 0.0 if self.own_engine else training.sent_forward * self._passes / self._passes_traced
        sampling = max(roofline(denoised, gpu, self.engine_speed, half=engine_half), gathers / link)
        decoded = self.traces.decoder.scaled(images * share)
        decoding = roofline(decoded, gpu, DECODING, half=self.traces.decoder.half)
        scored = [(reward.scaled(images), reward.half) for reward in self.traces.rewards]
        update = training.backward.times(micro_batches * config.actor.epochs)
        stepped = training.step.times(updates)
        reduces = self.ranks > 1 and not trains_shards(config, self.ranks)
        updating = phase(
            "update",
            update.then(stepped),
            training.sent * micro_batches * config.actor.epochs,
            updates * 2 * training.gradients / link if reduces else 0.0,
        )
        recomputing = phase(
            "recompute", training.recompute.times(micro_batches), training.sent_forward * micro_batches
        )
        before_update = [
            Phase(name="sample", where=place, flops=denoised.flops, seconds=sampling),
            Phase(name="decode", where=place, flops=decoded.flops, seconds=decoding),
            *(
                Phase(
                    name="reward model",
                    where="trainer",
                    flops=work.flops,
                    seconds=roofline(work, gpu, EAGER, half=in_half),
                )
                for work, in_half in scored
            ),
        ]
        waits = config.rollout.n_learned is not None  # the recompute, for the rewards
        beside = 0.0 if self.bypass or waits else recomputing.seconds or 0.0
        if not config.rollout.max_staleness:
            beside += sampling + decoding
        elif config.reward.placement == "ray":  # workers score the next step's images beside training
            beside += updating.seconds or 0.0
        before_update += self._host_rewards(beside)
        synced = self._synced() / HOST_BANDWIDTH
        return [
            *before_update,
            *([] if self.bypass else [recomputing]),
            updating,
            Phase(name="sync", where="trainer", seconds=synced),
        ]

    @property
    def _passes(self) -> float:
        """Forward passes of the engine in a step."""
        return math.ceil(self.images / self._rows) * len(self.config.sampling.rollout_steps)

    @property
    def _passes_traced(self) -> float:
        """Forward passes of a traced micro-batch."""
        return self.traces.micro_batch * self.config.sampling.sde_window_size / self._rows_traced

    def _denoising(self) -> Work:
        """All denoising steps of all images, as the engine computes them."""
        config, work = self.config, self.traces.sampling
        steps = len(config.sampling.rollout_steps)
        traced = self.traces.micro_batch * config.sampling.sde_window_size
        kernels = work.kernels * self._passes / self._passes_traced
        return replace(work.times(self.images * steps / traced), kernels=kernels)

    @property
    def _sampled_share(self) -> float:
        """Images of one engine, relative to one rank's. Ray's workers serve all ranks by whole groups."""
        rollout = self.config.rollout
        if rollout.placement != "ray":
            return 1.0
        groups = rollout.prompts_per_step / rollout.num_workers
        # A worker that samples ahead goes on with the next step's groups.
        return (groups if rollout.max_staleness else math.ceil(groups)) / self.prompts

    def _synced(self) -> float:
        """Bytes that pass between GPUs and the host in a step, for the engine's weights."""
        if not self.own_engine:
            return 0.0
        sent = 2 * (self.training.gradients if self.sends_adapter else self._engine_weights)
        # A sleeping engine's weights move to the host and back, twice in a step.
        return sent + (4 * self._engine_weights if self.sleeps else 0.0)

    def _host_rewards(self, beside: float) -> list[Phase]:
        """Phases of rewards outside the trainer's GPU; `beside` is seconds of other work that they may overlap."""
        reward = self.config.reward
        overlaps = all(states(term, "overlaps") for term in reward.step_terms)
        follows = reward.placement == "ray" == self.config.rollout.placement
        if not (follows or reward.placement == "thread" or (reward.placement == "auto" and overlaps)):
            beside = 0.0
        share = self.ranks / reward.num_workers if reward.placement == "ray" else 1
        phases = []
        for term in reward.step_terms:
            if computes_on_gpu(term) and reward.placement != "ray":
                continue
            known = term.name == "ocr" and bool(term.options.get("detect"))
            seconds = max(0.0, self.images * OCR_SECONDS * share - beside) if known else None
            phases.append(Phase(name=f"reward {term.name}", where="host", seconds=seconds))
        return phases

    # What to change ----------------------------------------------------------------------------------------

    def changes(self) -> dict[str, _Rank]:
        """Overrides that save the trainer much memory."""
        config, changed_configs = self.config, {}
        if not config.model.lora.rank and config.actor.optimizer == "adamw":
            changed_configs[IN_8_BITS] = replace(config, actor=replace(config.actor, optimizer="adamw_8bit"))
        if config.trainer.eval_on == "both":
            changed_configs[ON_TRAINED] = replace(config, trainer=replace(config.trainer, eval_on="trained"))
        if not config.model.offload_text_encoders:
            changed_configs[OFFLOAD] = replace(
                config, model=replace(config.model, offload_text_encoders=True)
            )
        return {keys: _Rank(self.traces, changed, self.ranks) for keys, changed in changed_configs.items()}

    def engine_changes(self, *ways: str) -> dict[str, _Rank]:
        """Select the `ways` to save memory that an engine in its own processes offers."""
        config, by_keys = self.config, {}
        for keys in ways:
            more: dict[str, Any] = {}
            if SLEEP in keys:
                more["enable_sleep_mode"] = True
            if FP8 in keys:
                if not self.traces.quantizable or (keys == FP8 and not self._may_take_fp8):
                    continue
                more["quantization"] = "fp8"
            engine = {**self.options, **more}
            changed = replace(config, rollout=replace(config.rollout, engine=engine))
            by_keys[keys] = _Rank(self.traces, changed, self.ranks)
        return by_keys

    @property
    def _may_take_fp8(self) -> bool:
        own = resolve_engine(self.config.rollout.name).own_processes
        return own and self.sends_adapter and not self.quantized


def roofline(work: Work, gpu: Gpu, speed: Speed, *, half: bool) -> float:
    """Seconds of `work`: arithmetic and memory traffic, or the host that launches its operations, limit it."""
    arithmetic = work.flops / (speed.share * (gpu.half if half else gpu.float32))
    traffic = work.moved / (speed.traffic * gpu.bandwidth)
    device = arithmetic + traffic if speed.in_turn else max(arithmetic, traffic)
    return max(device, work.kernels * speed.launch)


def engine_peak(weights: float, sampling: float, decoder: float, decoding: float) -> float:
    """Peak bytes of an engine, which holds the transformer's weights and the VAE's."""
    return weights + decoder + max(sampling, decoding)


def other_changes(config: Config, ranks: int) -> tuple[str, ...]:
    """Other ways to save memory, in words, for a run on `ranks` ranks."""
    shards = shards_weights(config, ranks)
    if config.model.lora.rank:
        quantized = config.model.quantization != "none"
        ways = [] if quantized else ["more ranks" if shards else "actor.fsdp=true on several ranks"]
        if not quantized and _may_quantize(config):
            ways.append("model.quantization=nf4")
        return (*ways, "a smaller model.lora.rank")
    if shards:
        ways = ["more ranks"]
    elif resolve_engine(config.rollout.name).shares_weights and config.rollout.placement == "local":
        ways = ["actor.fsdp=true on several ranks"]
    else:
        ways = ["actor.fsdp=true on several ranks (with rollout.name=in_process rollout.placement=local)"]
    if config.actor.optimizer == "adamw":
        ways.append(IN_8_BITS)
    return tuple(ways)


def _may_quantize(config: Config) -> bool:
    """Whether the run may have its frozen weights in NF4."""
    try:
        check(replace(config, model=replace(config.model, quantization="nf4")))
    except ConfigError:
        return False
    return True


def _largest_micro_batch(memory: Memory, gpu: Gpu, most: int) -> int:
    room = gpu.memory / MARGIN - memory.update_fixed
    return max(0, min(int(room / memory.update_a_sample), most))
