"""What `flowcorr plan` traces of the steps that `step` will take."""

from __future__ import annotations

from dataclasses import replace

from flowcorr.config.schema import Config
from flowcorr.instruments.plan.answers import MARGIN
from flowcorr.instruments.plan.architecture import Architecture, find_architecture
from flowcorr.instruments.plan.components import trace_decoder, trace_text_encoders
from flowcorr.instruments.plan.devices import DECODING, EAGER, Gpu
from flowcorr.instruments.plan.estimate import HALF, roofline
from flowcorr.instruments.plan.pipelines import family_class
from flowcorr.instruments.plan.text_inputs import TextInputs, text_inputs
from flowcorr.instruments.plan.tracing import Work
from flowcorr.instruments.plan.training import Training, one_optimizer_step, trace_training
from flowcorr.models import DTYPES
from tests.gpu.hour.families import at_depth, recipe_config
from tests.gpu.hour.parts import RECIPES, Hour

SHARES = (1.0, 0.5, 0.25, 0.1)
"""Of a transformer's depth, tried in turn until it fits."""
ENCODED = 16
"""Prompts that `encoders` encodes at a time."""


def measure(hour: Hour) -> None:
    gpu = Gpu(**hour.fact_of("machine", "gpu"))
    for family in RECIPES:
        config = one_optimizer_step(recipe_config(hour, family))
        architecture = find_architecture(config.model.path)
        for share in SHARES:
            part = at_depth(architecture, share)
            training = trace_training(config, part)
            work = max(training.recompute.peak, training.gradients + training.backward.peak)
            needed = training.weights + training.moments + work
            if MARGIN * needed <= gpu.memory:
                break
        hour.row(f"{family}: blocks", part.depth, note=f"of {architecture.depth}")
        hour.row(f"{family}: weights", training.weights / 1e9, unit="GB")
        hour.row(f"{family}: peak of an update", needed / 1e9, unit="GB", at_most=gpu.memory / MARGIN / 1e9)
        hour.fact(family, {"share": share, "blocks": part.depth, **_numbers(config, part, training, gpu)})
    hour.fact("text_encoders", _encoding(recipe_config(hour, "sd35"), gpu))


def encoded_text(config: Config, architecture: Architecture) -> TextInputs:
    """The text inputs of `encoders`."""
    return text_inputs(architecture, family_class(architecture, config.model), config)


def _encoding(config: Config, gpu: Gpu) -> dict[str, dict[str, float]]:
    architecture = find_architecture(config.model.path)
    inputs = encoded_text(config, architecture)
    found = trace_text_encoders(config, architecture, inputs, prompts=ENCODED)
    return {
        name: {"peak": found[offloaded].work.peak, "seconds": _seconds(config, found[offloaded].work, gpu)}
        for name, offloaded in (("here", False), ("offloaded", True))
    }


def _numbers(config: Config, architecture: Architecture, training: Training, gpu: Gpu) -> dict[str, float]:
    micro_batch = config.actor.micro_batch_size
    assert micro_batch is not None
    # Decoding in the dtype that the VAE is loaded in here.
    decoding = replace(config, rollout=replace(config.rollout, dtype=config.model.dtype))
    (decoder,) = trace_decoder(decoding, architecture, micro_batch)
    return {
        "micro_batch": micro_batch,
        "dtype": DTYPES[config.model.dtype].itemsize,
        "weights": training.weights,
        "moments": training.moments,
        "recompute_peak": training.recompute.peak,
        "recompute_seconds": _seconds(config, training.recompute, gpu),
        "update_peak": training.gradients + max(training.backward.peak, training.step.peak),
        "update_seconds": 2 * _seconds(config, training.backward, gpu) + _seconds(config, training.step, gpu),
        "decoded": decoder.batch,
        "decode_peak": decoder.work.peak,
        "decode_seconds": roofline(decoder.work, gpu, DECODING, half=decoder.half),
    }


def _seconds(config: Config, work: Work, gpu: Gpu) -> float:
    return roofline(work, gpu, EAGER, half=config.model.dtype in HALF)
