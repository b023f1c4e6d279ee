"""What `flowcorr plan`'s own measurements on the fake device say of the steps that `step` will take."""

from __future__ import annotations

from dataclasses import replace

from flowcorr.config.schema import Config
from flowcorr.models import DTYPES
from flowcorr.plan.answers import MARGIN
from flowcorr.plan.components import measure_decoder, measure_text_encoders
from flowcorr.plan.devices import Gpu, Utilisation
from flowcorr.plan.fake_device import FakeDevice
from flowcorr.plan.pipelines import Architecture, family_class, find_architecture
from flowcorr.plan.text_inputs import TextInputs, text_inputs
from flowcorr.plan.training import (
    Training,
    Work,
    actor_batch,
    load_actor,
    measure_training,
    one_optimizer_step,
    recompute_log_probs,
    update,
)
from tests.gpu.hour.families import recipe_config
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
            depths = {kind: max(1, round(share * depth)) for kind, depth in architecture.depths.items()}
            training = measure_training(config, architecture.with_depths(depths))
            work = max(training.recompute.peak, training.backward.peak, training.step.peak)
            needed = training.weights + training.moments + work
            if MARGIN * needed <= gpu.memory:
                break
        part = architecture.with_depths(depths)
        hour.row(f"{family}: blocks", sum(depths.values()), note=f"of {sum(architecture.depths.values())}")
        hour.row(f"{family}: weights", training.weights / 1e9, unit="GB")
        hour.row(f"{family}: peak of an update", needed / 1e9, unit="GB", at_most=gpu.memory / MARGIN / 1e9)
        hour.fact(family, {"depths": depths, **_numbers(config, part, training, gpu)})
    hour.fact("text_encoders", _encoding(recipe_config(hour, "sd35"), gpu))


def encoded_text(config: Config, architecture: Architecture) -> TextInputs:
    """The text inputs of `encoders`."""
    return text_inputs(architecture, family_class(architecture, config.model), config)


def _encoding(config: Config, gpu: Gpu) -> dict[str, dict[str, float]]:
    architecture = find_architecture(config.model.path)
    inputs = encoded_text(config, architecture)
    found = {}
    for name, offloaded in (("here", False), ("offloaded", True)):
        work = measure_text_encoders(config, architecture, inputs, prompts=ENCODED, offloaded=offloaded).work
        found[name] = {"peak": work.peak, "seconds": _seconds(work, gpu)}
    return found


def _numbers(config: Config, architecture: Architecture, training: Training, gpu: Gpu) -> dict[str, float]:
    micro_batch = config.actor.micro_batch_size
    assert micro_batch is not None
    shallow = architecture.with_depths({kind: min(depth, 2) for kind, depth in architecture.depths.items()})
    with FakeDevice() as device:
        family, actor = load_actor(config, shallow, device)
        batch = actor_batch(config, shallow, family, 2 * micro_batch)
        with device.section() as recomputed:
            recompute_log_probs(actor, batch.select(slice(0, micro_batch)))
        with device.section() as updated:
            update(actor, batch)
    # Decoding in the dtype that the VAE is loaded in here.
    decoding = replace(config, rollout=replace(config.rollout, dtype=config.model.dtype))
    decoder = measure_decoder(decoding, architecture, images=micro_batch)
    return {
        "micro_batch": micro_batch,
        "dtype": DTYPES[config.model.dtype].itemsize,
        "weights": training.weights,
        "moments": training.moments,
        "recompute_peak": training.recompute.peak,
        "recompute_seconds": _seconds(training.recompute, gpu),
        "update_peak": max(training.backward.peak, training.step.peak),
        "update_seconds": 2 * _seconds(training.backward, gpu) + _seconds(training.step, gpu),
        "decode_peak": decoder.work.peak,
        "decode_seconds": _seconds(decoder.work, gpu),
        "recompute_reads": recomputed.host_reads.total() + recomputed.uploads.total(),
        "update_reads": updated.host_reads.total() + updated.uploads.total(),
    }


def _seconds(work: Work, gpu: Gpu) -> float:
    return work.seconds(gpu, Utilisation())
