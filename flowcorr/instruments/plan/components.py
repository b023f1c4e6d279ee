"""Traces the models beside the transformer: text encoders, VAE and reward models."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from flowcorr.config.schema import Config
from flowcorr.config.task import RewardTerm
from flowcorr.instruments.plan.architecture import Architecture, find_clip
from flowcorr.instruments.plan.pipelines import build_component, build_family
from flowcorr.instruments.plan.text_inputs import TextInputs
from flowcorr.instruments.plan.tracing import Tracer, Work
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
    with Tracer() as tracer, torch.no_grad():
        for name, length in inputs.tokens.items():
            if name not in architecture.configs:
                continue
            encoder, held = build_component(architecture, name, tracer, dtype)
            weights += held
            tokens = torch.ones(prompts, length, dtype=torch.long)
            with _copying_layers(encoder, tracer) as copying, tracer.section() as section:
                encoder(tokens, output_hidden_states=True)
            here = here.then(section.work)
            peak = max(section.work.peak, copying["peak"] - section.before)
            offloaded = offloaded.then(replace(section.work, peak=peak))
    return {
        False: Component(weights=weights, work=here, batch=prompts),
        True: Component(weights=0.0, work=offloaded, batch=prompts),
    }


@contextlib.contextmanager
def _copying_layers(encoder: nn.Module, tracer: Tracer) -> Iterator[dict[str, float]]:
    """The peak if each layer held a copy of its weights while it computes, as offloading does."""
    found = {"peak": 0.0}

    def watch(layer: nn.Module, size: int) -> None:
        def begin(*_: object) -> None:
            found["outer"] = tracer.new_peak(0.0)

        def end(*_: object) -> None:
            found["peak"] = max(found["peak"], size + tracer.new_peak(found["outer"]))

        handles.append(layer.register_forward_pre_hook(begin))
        handles.append(layer.register_forward_hook(end))

    handles: list[Any] = []
    for layer in encoder.modules():
        tensors = (*layer.parameters(recurse=False), *layer.buffers(recurse=False))
        if not any(layer.children()) and tensors:
            watch(layer, sum(tensor.nbytes for tensor in tensors))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def trace_decoder(config: Config, architecture: Architecture, *images: int) -> list[Component]:
    """The VAE, decoding each of these numbers of images, or as many together as sampling decodes."""
    dtype = DTYPES[config.rollout.dtype]
    plain = replace(config.model, quantization="none", lora=replace(config.model.lora, rank=0))
    sampling = config.sampling
    works: dict[int, Work] = {}
    with Tracer() as tracer:
        family = build_family(architecture.cut(lambda depth: 1), plain, tracer, dtype=dtype)
        tracer.place(family.pipeline.vae, dtype)
        shape = family.sample_shape(sampling.height, sampling.width, sampling.num_frames)
        batches = [min(number, decoded_together(math.prod(shape))) for number in images]
        for batch in set(batches):
            latents = torch.ones(batch, *shape)
            with tracer.section() as section:
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
    with Tracer() as tracer, torch.no_grad():
        model, weights = build_component(find_clip(options["path"]), "model", tracer, dtype)
        size = model.config.vision_config.image_size
        pixels = torch.ones(batch, 3, size, size, dtype=dtype)
        with tracer.section() as section:
            model.get_image_features(pixel_values=pixels)
    return Component(weights=weights, work=section.work, batch=batch, half=dtype.itemsize == 2)
