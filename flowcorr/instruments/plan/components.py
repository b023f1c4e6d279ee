"""Traces the models other than the transformer: text encoders, VAE and reward models."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from flowcorr.config.schema import Config
from flowcorr.config.task import RewardTerm
from flowcorr.instruments.plan.architecture import Architecture, find_clip
from flowcorr.instruments.plan.pipelines import build_component, build_family, cast
from flowcorr.instruments.plan.text_inputs import TextInputs
from flowcorr.instruments.plan.tracing import Tracer, Work, tracing
from flowcorr.models import DTYPES
from flowcorr.rewards.clip import DTYPES as CLIP_DTYPES
from flowcorr.rewards.combine import REWARDS, computes_on_gpu
from flowcorr.rollout.sampler import decode, decoded_together


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """A frozen model: bytes of its weights on the GPU, and its work on a batch of `batch` items.

    `half` says whether it computes in 16 bits.
    """

    weights: float
    work: Work
    batch: int
    half: bool = True

    def scaled(self, items: float) -> Work:
        """The work on `items` items, one batch at a time."""
        return self.work.times(items / self.batch)


def trace_text_encoders(
    config: Config, architecture: Architecture, inputs: TextInputs, *, prompts: int
) -> dict[bool, Component]:
    """All text encoders, one after the other, by `model.offload_text_encoders`.

    Args:
        config: the run's configuration.
        architecture: of the pipeline.
        inputs: the text inputs while prompts are encoded.
        prompts: prompts in one batch.
    """
    dtype = DTYPES[config.model.dtype]
    here = offloaded = Work()
    weights = 0.0
    for name, length in inputs.tokens.items():
        if name not in architecture.configs:
            continue
        encoder, kinds, held = build_component(architecture, name, dtype)
        weights += held
        tokens = torch.ones(prompts, length, dtype=torch.long, device="meta")
        with tracing(kinds) as tracer, torch.no_grad(), tracer.section() as section:
            peaks = _with_copies_of_layers(encoder, tracer)
            encoder(tokens, output_hidden_states=True)
        here = here.then(section.work)
        offloaded = offloaded.then(replace(section.work, peak=max([section.work.peak, *peaks])))
    return {
        False: Component(weights=weights, work=here, batch=prompts),
        True: Component(weights=0.0, work=offloaded, batch=prompts),
    }


def _with_copies_of_layers(encoder: nn.Module, tracer: Tracer) -> list[float]:
    """The peak of each layer while it computes, above an empty tracer, if it held a copy of its weights meanwhile."""
    peaks: list[float] = []
    outer: list[float] = []

    def watch(layer: nn.Module, size: int) -> None:
        def begin(*_: object) -> None:
            outer.append(tracer.peak)
            tracer.peak = tracer.allocated

        def end(*_: object) -> None:
            peaks.append(size + tracer.peak)
            tracer.peak = max(tracer.peak, outer.pop())

        layer.register_forward_pre_hook(begin)
        layer.register_forward_hook(end)

    for layer in encoder.modules():
        tensors = (*layer.parameters(recurse=False), *layer.buffers(recurse=False))
        if not any(layer.children()) and tensors:
            watch(layer, sum(tensor.nbytes for tensor in tensors))
    return peaks


def trace_decoder(config: Config, architecture: Architecture, *images: int) -> list[Component]:
    """The VAE, decoding each of these numbers of images, or as many together as sampling decodes."""
    dtype = DTYPES[config.rollout.dtype]
    plain = replace(config.model, quantization="none", lora=replace(config.model.lora, rank=0))
    sampling = config.sampling
    works: dict[int, Work] = {}
    family = build_family(architecture.cut(lambda depth: 1), plain, dtype=dtype)
    cast(family.pipeline.vae, dtype)
    shape = family.sample_shape(sampling.height, sampling.width, sampling.num_frames)
    batches = [min(number, decoded_together(math.prod(shape))) for number in images]
    for batch in set(batches):
        latents = torch.ones(batch, *shape, device="meta")
        with tracing() as tracer, tracer.section() as section:
            decode(family, latents)
        works[batch] = section.work
    weights = sum(parameter.nbytes for parameter in family.pipeline.vae.parameters())
    half = dtype.itemsize == 2
    return [Component(weights=weights, work=works[batch], batch=batch, half=half) for batch in batches]


def trace_clip(term: RewardTerm) -> Component | None:
    """The CLIP model of a reward, on a batch of images; None if the reward has none on the GPU."""
    if not computes_on_gpu(term):
        return None
    reward: Any = REWARDS[term.name]
    defaults = {entry.name: entry.default for entry in fields(reward)}
    options: dict[str, Any] = {**defaults, **term.options}
    dtype, batch = CLIP_DTYPES[options["dtype"]], options["batch_size"]
    model, kinds, weights = build_component(find_clip(options["path"]), "model", dtype)
    size = model.config.vision_config.image_size
    pixels = torch.ones(batch, 3, size, size, dtype=dtype, device="meta")
    with tracing(kinds) as tracer, torch.no_grad(), tracer.section() as section:
        model.get_image_features(pixel_values=pixels)
    return Component(weights=weights, work=section.work, batch=batch, half=dtype.itemsize == 2)
