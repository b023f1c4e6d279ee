"""Traces a run's parts on the fake device. One trace serves every GPU and every layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from flowcorr.actor.passes import passes_of
from flowcorr.config.schema import Config, ModelConfig
from flowcorr.config.task import RewardTerm
from flowcorr.data import load_prompts
from flowcorr.models import DTYPES
from flowcorr.models.prompt_cache import MAX_BYTES, chunk_size
from flowcorr.plan.components import Component, measure_clip, measure_decoder, measure_text_encoders
from flowcorr.plan.pipelines import Architecture, family_class, find_architecture
from flowcorr.plan.sharding import computed
from flowcorr.plan.text_inputs import encoder_inputs, text_inputs, with_longest_prompt
from flowcorr.plan.training import (
    Scoring,
    Training,
    Work,
    measure_scoring,
    measure_training,
    one_optimizer_step,
)
from flowcorr.rollout.base import samples_codes


@dataclass(frozen=True, slots=True, kw_only=True)
class Traces:
    """The work of the parts of a run, whatever computes them.

    Attributes:
        training: the transformer's training, of a whole copy of the weights.
        micro_batch: samples of the traced micro-batch.
        adapted_pass, wrapped_pass, plain_pass: forward passes in the engine's precision, on all SDE steps of one
            micro-batch: with flowcorr's layers for adapters, with those of an engine of its own, and without adapter.
        text: the text encoders.
        offloaded_text: the text encoders under `model.offload_text_encoders`.
        decoder: the VAE's decoder.
        rewards: the models on the trainer's GPU that score each training step.
        gold: those that only evaluations score with.
        prompts: number of prompts of the whole data set, the negative prompt included.
        quantizable: whether vllm-omni can quantize the transformer.
        text_fits: whether all prompts are encoded before training; otherwise each step encodes its own.
    """

    training: Training
    micro_batch: int
    adapted_pass: Work
    wrapped_pass: Work
    plain_pass: Work
    text: Component
    offloaded_text: Component
    decoder: Component
    rewards: Sequence[Component]
    gold: Sequence[Component]
    prompts: int
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
    texts = {prompt.text for prompt in (*data.train, *data.heldout)}
    encoded = encoder_inputs(architecture, family, config, texts)
    chunk = chunk_size(family.count_text_tokens(config.model.max_sequence_length))
    config = with_longest_prompt(config, family, texts)
    inputs = text_inputs(architecture, family, config)
    groups = -(-config.rollout.prompts_per_step // ranks)
    config = replace(config, rollout=replace(config.rollout, prompts_per_step=groups))
    micro_batch = passes_of(one_optimizer_step(config)).samples
    reward = config.reward
    in_trainer = () if reward.placement == "ray" else reward.step_terms
    trained = computed(config, ranks)
    training = measure_training(trained, architecture)
    text, offloaded_text = (
        measure_text_encoders(
            config, architecture, encoded, prompts=min(len(texts), chunk), offloaded=offloaded
        )
        for offloaded in (False, True)
    )
    adapted_pass, wrapped_pass, plain_pass = _engine_passes(trained, training, architecture)
    return Traces(
        training=training,
        micro_batch=micro_batch,
        adapted_pass=adapted_pass,
        wrapped_pass=wrapped_pass,
        plain_pass=plain_pass,
        text=text,
        offloaded_text=offloaded_text,
        decoder=measure_decoder(config, architecture, images=groups * config.rollout.n),
        rewards=_models(in_trainer),
        gold=_models(reward.evaluation_gold),
        prompts=len(texts) + inputs.negative,
        quantizable=family.vllm_omni is None or family.vllm_omni.quantizes,
        text_fits=len(texts) * inputs.nbytes(DTYPES[config.model.dtype]) <= MAX_BYTES,
    )


def _models(terms: Sequence[RewardTerm]) -> list[Component]:
    return [model for term in terms if (model := measure_clip(term)) is not None]


def engine_scoring(config: Config, architecture: Architecture) -> Scoring:
    """A forward pass as an engine without adapters computes it: in `rollout.dtype`, without autocast."""
    model = _engine_model(config)
    plain = replace(
        config,
        model=replace(model, lora=replace(model.lora, rank=0)),
        actor=replace(config.actor, autocast=False),
    )
    return measure_scoring(plain, architecture)


def _engine_model(config: Config) -> ModelConfig:
    """The section `model` of what the engine computes with."""
    quantization = config.model.quantization if samples_codes(config) else "none"
    return replace(config.model, dtype=config.rollout.dtype, quantization=quantization)


def _engine_passes(config: Config, training: Training, architecture: Architecture) -> tuple[Work, Work, Work]:
    """Forward passes of the engine, see `Traces`: often as the recompute pass does."""
    as_trained = config.model.quantization == "none" or samples_codes(config)
    if config.model.dtype == config.rollout.dtype and not config.actor.autocast and as_trained:
        return training.recompute, training.wrapped, training.unadapted
    plain = engine_scoring(config, architecture).work
    if not config.model.lora.rank:
        return plain, plain, plain
    sampled = replace(config, model=_engine_model(config), actor=replace(config.actor, autocast=False))
    adapted, wrapped = (
        measure_scoring(sampled, architecture, wrapped=wrapped).work for wrapped in (False, True)
    )
    return adapted, wrapped, plain
