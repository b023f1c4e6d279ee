"""Measures the models beside the transformer on the fake device: text encoders, VAE and reward models."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from flowcorr.config.schema import Config
from flowcorr.config.task import RewardTerm
from flowcorr.models import DTYPES
from flowcorr.plan.fake_backend import DEVICE
from flowcorr.plan.fake_device import FakeDevice
from flowcorr.plan.pipelines import Architecture, build_component, build_family, find_clip
from flowcorr.plan.text_inputs import TextInputs
from flowcorr.plan.training import NOTHING, Work
from flowcorr.rewards.clip import DTYPES as CLIP_DTYPES
from flowcorr.rewards.combine import REWARDS, computes_on_gpu
from flowcorr.rollout.sampler import decode, decoded_together

PAGEABLE_BANDWIDTH = 4e9
"""Bytes per second between a GPU and host memory that is not page-locked: a rough value for both directions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """A frozen model: bytes of its weights on the GPU, and its work on a batch of `batch` items."""

    weights: float
    work: Work
    batch: int

    def scaled(self, items: float) -> Work:
        """The work on `items` items, one batch at a time."""
        return self.work.times(items / self.batch)


def measure_text_encoders(
    config: Config,
    architecture: Architecture,
    inputs: TextInputs,
    *,
    prompts: int,
    offloaded: bool,
) -> Component:
    """All text encoders, one after the other, on `prompts` prompts at a time.

    Args:
        config: the run's configuration.
        architecture: of the pipeline.
        inputs: the text inputs while prompts are encoded.
        prompts: prompts in one batch.
        offloaded: whether the weights wait in host memory, as with `model.offload_text_encoders`.
    """
    dtype = DTYPES[config.model.dtype]
    work = NOTHING
    copied = 0.0
    with FakeDevice() as device, torch.no_grad():
        encoders = {
            name: build_component(architecture, name, device, dtype)
            for name in inputs.tokens
            if name in architecture.configs
        }
        weights = device.allocated
        for name, encoder in encoders.items():
            copies = _copy_layers(encoder) if offloaded else []
            tokens = torch.ones(prompts, inputs.tokens[name], dtype=torch.long, device=DEVICE)
            with device.section() as section:
                encoder(tokens, output_hidden_states=True)
            work = work.then(Work.of(section))
            copied += sum(copies)
    if offloaded:
        weights = 0
        work = replace(work, copying=2 * copied / PAGEABLE_BANDWIDTH)  # to the GPU and back
    return Component(weights=weights, work=work, batch=prompts)


def _copy_layers(encoder: nn.Module) -> list[int]:
    """Let each layer hold a copy of its weights on the device while it computes, as offloading does.

    diffusers' own hooks cannot move the fake device's tensors.

    Returns:
        A list that gets the bytes of each copy.
    """
    sizes: list[int] = []
    held: dict[nn.Module, list[torch.Tensor]] = {}

    def copy(layer: nn.Module, inputs: Any) -> None:
        tensors = (*layer.parameters(recurse=False), *layer.buffers(recurse=False))
        held[layer] = [torch.empty_like(tensor) for tensor in tensors]
        sizes.append(sum(tensor.nbytes for tensor in tensors))

    def drop(layer: nn.Module, inputs: Any, output: Any) -> None:
        del held[layer]

    for layer in encoder.modules():
        layer.register_forward_pre_hook(copy)
        layer.register_forward_hook(drop)
    return sizes


def measure_decoder(config: Config, architecture: Architecture, *, images: int) -> Component:
    """The VAE, decoding at most `images` images at a time, as sampling does."""
    with FakeDevice() as device:
        # Only the transformer's configuration is used, so one block of each kind is enough.
        shallow = architecture.with_depths(dict.fromkeys(architecture.depths, 1))
        dtype = DTYPES[config.rollout.dtype]
        family = build_family(shallow, config.model, device, dtype=dtype, adapted=False)
        shape = family.latent_shape(config.sampling.height, config.sampling.width)
        images = min(images, decoded_together(math.prod(shape)))
        latents = torch.ones(images, *shape, device=DEVICE)
        with device.section() as section:
            decode(family, latents)
        weights = sum(parameter.nbytes for parameter in family.pipeline.vae.parameters())
    return Component(weights=weights, work=Work.of(section), batch=images)


def measure_clip(term: RewardTerm) -> Component | None:
    """The CLIP model of a reward, on a batch of images; None if the reward has none on the GPU."""
    if not computes_on_gpu(term):
        return None
    reward: Any = REWARDS[term.name]
    defaults = {entry.name: entry.default for entry in fields(reward)}
    options: dict[str, Any] = {**defaults, **term.options}
    dtype, batch = CLIP_DTYPES[options["dtype"]], options["batch_size"]
    with FakeDevice() as device, torch.no_grad():
        model: Any = build_component(find_clip(options["path"]), "model", device, dtype)
        weights = device.allocated
        size = model.config.vision_config.image_size
        pixels = torch.ones(batch, 3, size, size, dtype=dtype, device=DEVICE)
        with device.section() as section:
            model.get_image_features(pixel_values=pixels)
    return Component(weights=weights, work=Work.of(section), batch=batch)
