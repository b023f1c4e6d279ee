"""Makes a plan from a configuration: memory and time of each phase of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flowcorr.algorithm import AutoMode
from flowcorr.config.schema import Config
from flowcorr.data import load_prompts
from flowcorr.models import DTYPES
from flowcorr.models.prompt_cache import MAX_BYTES, chunk_size
from flowcorr.plan.answers import Memory, Phase, Plan
from flowcorr.plan.components import Component, measure_clip, measure_decoder, measure_text_encoders
from flowcorr.plan.devices import Gpu, Utilisation
from flowcorr.plan.fake_device import FakeDevice
from flowcorr.plan.pipelines import Architecture, family_class, find_architecture
from flowcorr.plan.sharding import computed, sharded
from flowcorr.plan.text_inputs import encoder_inputs, text_inputs, with_longest_prompt
from flowcorr.plan.training import Training, Work, measure_scoring, measure_training, one_optimizer_step
from flowcorr.rewards.combine import ON_CLIP
from flowcorr.rollout.base import needs_base, shards_weights, shares_weights
from flowcorr.rollout.vllm_omni.options import WITHOUT_QUANTIZATION

HOST_BANDWIDTH = 25e9
"""Bytes per second between a GPU and the host, over PCIe."""
OCR_SECONDS = 0.55
"""CPU seconds per image of OCR with text detection."""
OVERLAPPING = ("ocr", "jpeg_compressibility", "jpeg_incompressibility", "http", "vlm_judge")
"""Rewards that `reward.placement: auto` computes in a thread, beside sampling."""
QUANTIZED_BYTES = {"fp8": 1.0, "int8": 1.0, "int4": 0.5}
"""Bytes per weight, by vllm-omni's quantization."""
NOTHING = Work(peaks={}, flops=0, moved=0, busy=0, kernels=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """The measurements for one rank of a run.

    Attributes:
        config: the configuration, with the prompts of one rank.
        ranks: training ranks of the run.
        training: the transformer's training.
        engine_pass: forward passes in the engine's precision, on all SDE steps of one micro-batch.
        text: the text encoders.
        offloaded_text: the text encoders under `model.offload_text_encoders`.
        decoder: the VAE's decoder.
        rewards: the rewards that are models on the GPU.
        prompts: number of prompts of the whole data set, the negative prompt included.
        quantizable: whether vllm-omni can quantize the transformer.
        text_fits: whether all prompts are encoded before training; otherwise each step encodes its own.
    """

    config: Config
    ranks: int
    training: Training
    engine_pass: Work
    text: Component
    offloaded_text: Component
    decoder: Component
    rewards: Sequence[Component]
    prompts: int
    quantizable: bool
    text_fits: bool

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
    def micro_batch(self) -> int:
        size = one_optimizer_step(self.config).actor.micro_batch_size
        assert size is not None, "`one_optimizer_step` has set it"
        return size

    @property
    def bypass(self) -> bool:
        return AutoMode.of(self.config).correction.mode == "bypass"

    @property
    def own_engine(self) -> bool:
        """Whether the rollout engine runs in its own process."""
        return self.config.rollout.name == "vllm_omni" or self.config.rollout.placement == "ray"

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
            + self.decoder.weights
            + sum(reward.weights for reward in self.rewards)
            + (0 if config.actor.ema is None else trained)
            + trained * versions  # the engine's history
            + (training.transformer if config.actor.kl_coef and not adapted else 0)
            + (self.engine_weights if copied else 0)
        )

    @property
    def engine_weights(self) -> float:
        """Bytes of the engine's transformer."""
        rollout = self.config.rollout
        options = rollout.engine
        quantized = options.get("quantization") or options.get("quantization_config")
        size = DTYPES[rollout.dtype].itemsize
        each = QUANTIZED_BYTES.get(str(quantized), size) if quantized else size
        shards = self.ranks if shards_weights(self.config, self.ranks) else 1
        numbers = shards * self.training.transformer / DTYPES[self.config.model.dtype].itemsize
        return numbers * each

    @property
    def engine_adapter(self) -> float:
        """Bytes of the engine's adapter."""
        config = self.config
        numbers = self.training.adapter / DTYPES[config.model.lora.dtype].itemsize
        return numbers * DTYPES[config.rollout.dtype].itemsize

    @property
    def sampling(self) -> Work:
        """All denoising steps of all images, scaled from `engine_pass`."""
        config, measured_pass = self.config, self.engine_pass
        steps = config.sampling.sde_window_size
        rows = config.rollout.batch_size or self.images
        limit = config.rollout.engine.get("max_num_seqs")
        rows = min(rows, self.images, limit if isinstance(limit, int) else rows)
        measured = self.micro_batch * steps
        together = measured if config.actor.fold_steps else self.micro_batch
        passes = math.ceil(self.images / rows) * config.sampling.num_inference_steps
        work = measured_pass.times(self.images * config.sampling.num_inference_steps / measured)
        kernels = measured_pass.kernels / (measured / together) * passes
        return replace(work, peaks={"": measured_pass.peak * rows / together}, kernels=kernels)

    @property
    def recomputing(self) -> Work:
        return self.training.recompute.times(self.images / self.micro_batch)

    @property
    def updating(self) -> Work:
        passes = self.images / self.micro_batch * self.config.actor.epochs
        steps = self.mini_batches * self.config.actor.epochs
        return self.training.backward.times(passes).then(self.training.step.times(steps))


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
    measured = _measure(config, ranks, lambda: FakeDevice(gpu, utilisation))
    memory = _memory(measured)
    return Plan(
        title=title,
        gpu=gpu,
        utilisation=utilisation,
        ranks=ranks,
        images=measured.images,
        phases=tuple(_phases(measured, memory, ranks, utilisation)),
        memory=memory,
        micro_batch=measured.micro_batch,
        mini_batch=measured.mini_batch,
        bypass=measured.bypass,
        attention=config.model.attention,
        ways_to_fit=_ways_to_fit(measured),
        ways_to_share=_ways_to_share(measured, memory),
        other_ways=other_ways(config, ranks),
    )


def _ways_to_fit(measured: _Measured) -> dict[str, Memory]:
    """Overrides that save the trainer much memory, with the memory under each."""
    ways = {}
    if not measured.config.model.lora.rank and measured.config.actor.optimizer == "adamw":
        ways["actor.optimizer=adamw_8bit"] = replace(measured, training=measured.training.in_8_bits())
    if not measured.config.model.offload_text_encoders:
        ways["model.offload_text_encoders=true"] = replace(measured, text=measured.offloaded_text)
    return {overrides: _memory(changed) for overrides, changed in ways.items()}


def other_ways(config: Config, ranks: int) -> tuple[str, ...]:
    """Words for what else saves memory, in a run on so many ranks."""
    if config.model.lora.rank:
        return ("a smaller model.lora.rank",)
    if shards_weights(config, ranks):
        ways = ["more ranks"]
    elif config.rollout.name == "in_process" and config.rollout.placement == "local":
        ways = ["actor.fsdp=true on several ranks"]
    else:
        ways = ["actor.fsdp=true on several ranks (with rollout.name=in_process rollout.placement=local)"]
    if config.actor.optimizer == "adamw":
        ways.append("actor.optimizer=adamw_8bit")
    return tuple(ways)


def _ways_to_share(measured: _Measured, memory: Memory) -> dict[str, float]:
    """Overrides that save memory on a GPU shared by trainer and engine, with the peak under each."""
    if not memory.may_share:
        return {}
    config = measured.config
    changes: list[dict[str, Any]] = [{"enable_sleep_mode": True}]
    if measured.quantizable:
        changes.append({"enable_sleep_mode": True, "quantization": "fp8"})
    ways = {}
    for change in changes:
        engine = {**config.rollout.engine, **change}
        changed = replace(config, rollout=replace(config.rollout, engine=engine))
        overrides = " ".join(f"rollout.engine.{key}={str(value).lower()}" for key, value in change.items())
        ways[overrides] = _memory(replace(measured, config=changed)).shared
    return ways


def _measure(config: Config, ranks: int, new_device: Callable[[], FakeDevice]) -> _Measured:
    architecture = find_architecture(config.model.path)
    family = family_class(architecture, config.model)
    data = load_prompts(config.data)
    texts = {prompt.text for prompt in (*data.train, *data.heldout)}
    encoded = encoder_inputs(architecture, family, config, texts)
    chunk = chunk_size(config.model.max_sequence_length)
    config = with_longest_prompt(config, family, texts)
    inputs = text_inputs(architecture, family, config)
    groups = math.ceil(config.rollout.prompts_per_step / ranks)
    config = replace(config, rollout=replace(config.rollout, prompts_per_step=groups))
    prompts = len(texts)
    terms = (*config.reward.terms, *config.reward.gold) if config.reward.placement != "ray" else ()
    rewards = [reward for term in terms if (reward := measure_clip(term, new_device())) is not None]
    images = groups * config.rollout.n
    trained = computed(config, ranks)
    training = measure_training(trained, architecture, new_device)
    if shards_weights(config, ranks):
        training = sharded(training, config, ranks)
    text, offloaded_text = (
        measure_text_encoders(
            config, architecture, encoded, new_device(), prompts=min(prompts, chunk), offloaded=offloaded
        )
        for offloaded in (False, True)
    )
    return _Measured(
        config=config,
        ranks=ranks,
        engine_pass=_engine_pass(trained, training, architecture, new_device),
        training=training.in_8_bits() if config.actor.optimizer == "adamw_8bit" else training,
        text=offloaded_text if config.model.offload_text_encoders else text,
        offloaded_text=offloaded_text,
        decoder=measure_decoder(config, architecture, new_device(), images=images),
        rewards=rewards,
        prompts=prompts + inputs.negative,
        quantizable=family.name not in WITHOUT_QUANTIZATION,
        text_fits=prompts * inputs.nbytes(DTYPES[config.model.dtype]) <= MAX_BYTES,
    )


def _engine_pass(
    config: Config, training: Training, architecture: Architecture, new_device: Callable[[], FakeDevice]
) -> Work:
    """The engine computes without autocast, in `rollout.dtype`: often as the recompute pass does."""
    if config.model.dtype == config.rollout.dtype and not config.actor.autocast:
        return training.recompute
    model = replace(config.model, dtype=config.rollout.dtype)
    sampled = replace(config, model=model, actor=replace(config.actor, autocast=False))
    return measure_scoring(sampled, architecture, new_device)


def _memory(measured: _Measured) -> Memory:
    config, training = measured.config, measured.training
    weights = training.weights + measured.decoder.weights + sum(reward.weights for reward in measured.rewards)
    with_text = weights + measured.text.weights
    encode = with_text if measured.text_fits else max(with_text, measured.resident + measured.text.weights)
    resident = measured.resident
    collected = measured.collected
    update = resident + collected + measured.mini_batch * training.sample
    without_samples = training.gradients + training.gathered + training.backward.copied
    engine = 0.0
    if measured.own_engine:
        spread = config.rollout.engine.get("tensor_parallel_size", 1)
        held = measured.engine_weights / spread + measured.engine_adapter + measured.decoder.weights
        if needs_base(config):  # a Ray worker merges adapters into a copy of its model
            held += training.transformer
        engine = held + max(measured.sampling.peak, measured.decoder.work.peak)
    return Memory(
        load=with_text,
        encode=encode + measured.text.work.peak,
        idle=resident + collected,
        sample=resident + collected + measured.sampling.peak,
        decode=resident + collected + measured.decoder.work.peak,
        reward=resident + collected + max((reward.work.peak for reward in measured.rewards), default=0.0),
        recompute=resident + collected + training.recompute.peak,
        update=update + max(training.backward.peak, training.step.peak),
        update_without_samples=update + without_samples,
        update_a_sample=(training.backward.peak - without_samples) / measured.micro_batch,
        sync=resident + collected + training.gradients + _merged(measured),
        engine=engine,
        engine_sleeps=bool(config.rollout.engine.get("enable_sleep_mode")),
        may_share=measured.own_engine and config.rollout.placement == "local",
    )


def _merged(measured: _Measured) -> float:
    """Bytes of merging the largest weight in float32, for an engine that gets whole weights; otherwise 0."""
    config = measured.config
    asked = config.rollout.engine.get("weight_sync")
    if not measured.own_engine or (config.model.lora.rank and asked != "merged"):
        return 0.0
    return 3 * 4 * measured.training.largest / DTYPES[config.model.dtype].itemsize


def _phases(measured: _Measured, memory: Memory, ranks: int, utilisation: Utilisation) -> list[Phase]:
    config, training = measured.config, measured.training

    def phase(
        name: str, peak: float | None, work: Work, extra: float = 0.0, *, of_engine: bool = False
    ) -> Phase:
        seconds = max(work.busy, work.kernels * utilisation.launch) + extra
        return Phase(
            name=name,
            where="engine" if of_engine else "trainer",
            peak=peak,
            flops=work.flops,
            moved=work.moved,
            seconds=seconds,
        )

    own = measured.own_engine
    # All ranks share the workers.
    share = ranks / config.rollout.num_workers if config.rollout.placement == "ray" else 1
    updates = measured.mini_batches * config.actor.epochs
    reduces = ranks > 1 and not shards_weights(config, ranks)
    reduced = updates * 2 * training.gradients / HOST_BANDWIDTH if reduces else 0.0
    phases = [
        phase("load", memory.load, NOTHING, memory.load / HOST_BANDWIDTH),
        phase("encode prompts", memory.encode, measured.text.scaled(measured.prompts)),
        phase(
            "sample",
            memory.engine if own else memory.sample,
            measured.sampling.times(share),
            of_engine=own,
        ),
        phase(
            "decode",
            memory.engine if own else memory.decode,
            measured.decoder.scaled(measured.images * share),
            of_engine=own,
        ),
    ]
    for reward in measured.rewards:
        phases.append(phase("reward model", memory.reward, reward.scaled(measured.images)))
    sampled = sum(phase.seconds or 0.0 for phase in phases if phase.name in ("sample", "decode"))
    recomputed = 0.0 if measured.bypass else phase("", None, measured.recomputing).seconds or 0.0
    phases += _host_rewards(measured, ranks, beside=sampled + recomputed)
    if not measured.bypass:
        phases.append(phase("recompute", memory.recompute, measured.recomputing))
    phases += [
        phase("update", memory.update, measured.updating, reduced),
        phase("sync", memory.sync, NOTHING, (memory.sync - memory.idle) / HOST_BANDWIDTH),
    ]
    if own:
        held = 0.0 if memory.engine_sleeps else memory.engine
        phases.append(Phase(name="engine beside it", where="engine", peak=held))
    return phases


def _host_rewards(measured: _Measured, ranks: int, *, beside: float) -> list[Phase]:
    """Phases of the rewards on the host; `beside` are the seconds of other work that they overlap with."""
    config = measured.config.reward
    scored = (*config.terms, *config.step_gold)
    overlaps = all(term.name in OVERLAPPING for term in scored)
    if not (config.placement == "thread" or (config.placement == "auto" and overlaps)):
        beside = 0.0
    share = ranks / config.num_workers if config.placement == "ray" else 1
    phases = []
    for term in scored:
        if term.name in ON_CLIP:
            continue
        known = term.name == "ocr" and bool(term.options.get("detect"))
        seconds = max(0.0, measured.images * OCR_SECONDS * share - beside) if known else None
        phases.append(Phase(name=f"reward {term.name}", where="host", peak=None, seconds=seconds))
    return phases
