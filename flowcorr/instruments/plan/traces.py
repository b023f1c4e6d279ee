"""Traces the parts of a run. One trace serves every GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from flowcorr.actor.passes import passes_of
from flowcorr.config import resolve_engine
from flowcorr.config.schema import Config
from flowcorr.config.task import RewardTerm
from flowcorr.data import load_prompts
from flowcorr.instruments.plan.architecture import Architecture, find_architecture
from flowcorr.instruments.plan.components import Component, trace_clip, trace_decoder, trace_text_encoders
from flowcorr.instruments.plan.pipelines import family_class
from flowcorr.instruments.plan.sharding import computed
from flowcorr.instruments.plan.text_inputs import encoder_inputs, text_inputs, with_longest_prompt
from flowcorr.instruments.plan.tracing import Work
from flowcorr.instruments.plan.training import (
    Layers,
    Pass,
    Training,
    one_optimizer_step,
    trace_pass,
    trace_training,
)
from flowcorr.models import DTYPES, Guidance
from flowcorr.models.negatives import negative_prompts
from flowcorr.models.prompt_cache import MAX_BYTES, chunk_size
from flowcorr.rollout.base import samples_codes


@dataclass(frozen=True, slots=True, kw_only=True)
class Traces:
    """The work of the parts of a run, on any GPU.

    Attributes:
        training: the transformer's training, of a whole copy of the weights.
        micro_batch: samples of the traced micro-batch.
        sampling: a forward pass of the rollout engine, on all SDE steps of one micro-batch.
        text: the text encoders, by `model.offload_text_encoders`.
        decoder: the VAE's decoder.
        evaluation: a forward pass of the trained transformer at an evaluation's size, as `sampling`.
        evaluation_decoder: the VAE's decoder in the trainer, at that size.
        num_heldout: prompts of an evaluation.
        rewards: the models on the trainer's GPU that score each training step.
        gold: those that only evaluations score with.
        quantizable: whether vllm-omni can quantize the transformer.
        text_fits: whether all prompts are encoded before training; otherwise each step encodes its own.
    """

    training: Training
    micro_batch: int
    sampling: Work
    text: Mapping[bool, Component]
    decoder: Component
    evaluation: Work
    evaluation_decoder: Component
    num_heldout: int
    rewards: Sequence[Component]
    gold: Sequence[Component]
    quantizable: bool
    text_fits: bool


def trace(config: Config, ranks: int = 1) -> Traces:
    """Trace a run. Only configurations and prompts are loaded.

    Args:
        config: the run's configuration.
        ranks: training ranks that share a step's prompts.

    Raises:
        ConfigError: the model's configurations, or the prompts, cannot be read.
    """
    architecture = find_architecture(config.model.path)
    family = family_class(architecture, config.model)
    data = load_prompts(config.data)
    prompts = (*data.train, *data.heldout)
    family.check_references(prompts)
    architecture = replace(architecture, num_references=len(data.train[0].images))
    guidance, count = Guidance.of(config.sampling), len({prompt.content for prompt in prompts})
    negatives = negative_prompts(prompts, guidance) if family.needs_negative(guidance) else []
    texts = {prompt.text for prompt in (*prompts, *negatives)}
    encoded = encoder_inputs(architecture, family, config, texts)
    chunk = chunk_size(family.count_text_tokens(config.model.max_sequence_length))
    config = with_longest_prompt(architecture, family, config, texts)
    inputs = text_inputs(architecture, family, config)
    groups = -(-config.rollout.prompts_per_step // ranks)
    config = replace(config, rollout=replace(config.rollout, prompts_per_step=groups))
    reward = config.reward
    in_trainer = () if reward.placement == "ray" else reward.step_terms
    training, sampling = _transformer(computed(config), architecture)
    evaluated = _evaluated(config)
    alike = evaluated.sampling == config.sampling
    sampled = sampled_together(config, groups * config.rollout.n)
    heldout = min(config.rollout.evaluation_batch_size, -(-len(data.heldout) // ranks))
    if evaluated == config:
        decoder, evaluation_decoder = trace_decoder(config, architecture, sampled, heldout)
    else:
        (decoder,) = trace_decoder(config, architecture, sampled)
        (evaluation_decoder,) = trace_decoder(evaluated, architecture, heldout)
    return Traces(
        training=training,
        micro_batch=passes_of(one_optimizer_step(config)).samples,
        sampling=sampling,
        text=trace_text_encoders(config, architecture, encoded, prompts=min(count, chunk)),
        decoder=decoder,
        evaluation=training.recompute if alike else trace_pass(computed(evaluated), architecture).work,
        evaluation_decoder=evaluation_decoder,
        num_heldout=len(data.heldout),
        rewards=_models(in_trainer),
        gold=_models(reward.evaluation_gold),
        quantizable=family.vllm_omni is None or family.vllm_omni.quantizes,
        text_fits=(count + len(negatives)) * inputs.nbytes(DTYPES[config.model.dtype]) <= MAX_BYTES,
    )


def _evaluated(config: Config) -> Config:
    """The config with images of an evaluation's size, which the trainer samples and decodes in its own dtype."""
    sampling, trainer = config.sampling, config.trainer
    height, width = trainer.eval_height or sampling.height, trainer.eval_width or sampling.width
    return replace(
        config,
        sampling=replace(sampling, height=height, width=width),
        rollout=replace(config.rollout, dtype=config.model.dtype),
    )


def _models(terms: Sequence[RewardTerm]) -> list[Component]:
    return [model for term in terms if (model := trace_clip(term)) is not None]


def sampled_together(config: Config, images: int) -> int:
    """Images, of so many of one rank, that the engine denoises in one pass, and then decodes."""
    rollout = config.rollout
    rows = rollout.batch_size or (rollout.n if rollout.placement == "ray" else images)
    limit = rollout.engine.get("max_num_seqs")
    return min(rows, images, limit if isinstance(limit, int) else rows)


def engine_layers(config: Config) -> Layers:
    """How the run's engine computes the adapter."""
    if not resolve_engine(config.rollout.name).compiles:
        return "own"
    return "beside" if wraps_adapters(config) else "merged"


def wraps_adapters(config: Config) -> bool:
    """Whether the engine computes the adapter separately, instead of merging it into the weights."""
    return bool(config.model.lora.rank) and config.rollout.engine.get("weight_sync") != "merged"


def engine_pass(config: Config, architecture: Architecture, layers: Layers) -> Pass:
    """A forward pass as an engine computes it: in `rollout.dtype`, without autocast."""
    quantization = config.model.quantization if samples_codes(config) else "none"
    model = replace(config.model, dtype=config.rollout.dtype, quantization=quantization)
    sampled = replace(config, model=model, actor=replace(config.actor, autocast=False))
    return trace_pass(sampled, architecture, layers)


def _transformer(config: Config, architecture: Architecture) -> tuple[Training, Work]:
    """Its training, and the engine's pass: often the trainer's own, but for the adapter."""
    layers = engine_layers(config)
    as_trained = config.model.quantization == "none" or samples_codes(config)
    if config.model.dtype == config.rollout.dtype and as_trained:
        training = trace_training(config, architecture, layers)
        return training, training.sampling
    return trace_training(config, architecture), engine_pass(config, architecture, layers).work
