"""Transformers of real size with random weights, and batches that their own engine samples."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from flowcorr.actor import DiffusionActor
from flowcorr.algorithm import (
    AutoMode,
    apply_bypass_mode_to_diffusion_batch,
    apply_rollout_correction_to_diffusion_batch,
    needs_rollout_means,
)
from flowcorr.config import load
from flowcorr.config.schema import Config
from flowcorr.instruments.plan.architecture import Architecture, find_architecture
from flowcorr.instruments.plan.pipelines import build_family
from flowcorr.instruments.plan.text_inputs import text_inputs
from flowcorr.instruments.plan.training import one_optimizer_step
from flowcorr.models import DTYPES, Conditioning, Guidance, ModelFamily
from flowcorr.records import ActorBatch
from flowcorr.rollout import InProcessEngine
from tests import tiny_pipelines
from tests.gpu.hour.parts import RECIPES, Hour

TOKENS_USED = 1 / 8
"""Of the tokens that a prompt is padded to."""


def recipe_config(hour: Hour, family: str) -> Config:
    """The recipe of a family with an engine in this process; tiny, with a tiny pipeline of the same classes."""
    overrides = ["rollout.name=in_process", "rollout.engine={}"]
    if hour.tiny:
        tiny = tiny_pipelines.PIPELINES[family]
        folder = tiny.build(hour.folder / family)
        overrides = [*tiny_pipelines.overrides(folder, tiny.size, "float32"), *overrides]
        overrides.append("model.max_sequence_length=8")
    return load(RECIPES[family], [*overrides, f"trainer.device={hour.device}"])


def at_depth(architecture: Architecture, share: float) -> Architecture:
    """The pipeline with this share of each kind of its transformer's blocks."""
    return architecture.cut(lambda depth: max(1, round(share * depth)))


def planned_config(hour: Hour, family: str) -> tuple[Config, Architecture, dict[str, Any]]:
    """A step of two micro-batches, as many blocks as fit, and what is predicted for it."""
    planned = hour.fact_of("plan", family)
    config = one_optimizer_step(recipe_config(hour, family))
    rollout = replace(config.rollout, n=2 * planned["micro_batch"], batch_size=None)
    architecture = at_depth(find_architecture(config.model.path), planned["share"])
    return replace(config, rollout=rollout), architecture, planned


class RandomWeights:
    """Puts modules on a device with random weights, drawn anew from one seed for each; see `build_family`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def place(self, module: nn.Module, dtype: torch.dtype) -> None:
        draw = torch.Generator(self.device).manual_seed(0)
        for part in module.modules():
            for name, parameter in list(part.named_parameters(recurse=False)):
                values = self._draw(name, parameter, draw).to(dtype)
                # Not by `setattr`: `init_empty_weights` would put it on meta.
                part._parameters[name] = nn.Parameter(values, requires_grad=False)
            for name, buffer in list(part.named_buffers(recurse=False)):
                setattr(part, name, buffer.to(self.device, dtype if buffer.is_floating_point() else None))

    def _draw(self, name: str, parameter: Tensor, draw: torch.Generator) -> Tensor:
        values = torch.empty(parameter.shape, device=self.device)
        if parameter.dim() < 2:  # scales of norms are 1 and biases small
            values.normal_(0, 0.02, generator=draw)
            return 1 + values if name == "weight" else values
        return values.normal_(0, parameter[0].numel() ** -0.5, generator=draw)


def random_family(
    config: Config, architecture: Architecture, device: torch.device, dtype: torch.dtype
) -> ModelFamily:
    """A family around random weights, the same for every dtype but for its rounding."""
    from accelerate import init_empty_weights

    weights = RandomWeights(device)
    empty = functools.partial(init_empty_weights, include_buffers=False)
    model = replace(config.model, lora=replace(config.model.lora, rank=0))
    family = build_family(architecture, model, dtype=dtype, place=weights.place, empty=empty)
    weights.place(family.pipeline.vae, dtype)
    family.pipeline.set_progress_bar_config(disable=True)
    return family


@torch.no_grad()
def scale_velocities(config: Config, architecture: Architecture, family: ModelFamily) -> None:
    """Give velocities a mean square of 1, as those of trained models have."""
    device = next(family.transformer.parameters()).device
    latents = torch.randn(1, *latent_shape(config, family)).to(device)
    conditioning = random_conditioning(config, architecture, family, 1)
    timesteps = torch.full((1,), 800.0, device=device)
    sampling = config.sampling
    guidance = Guidance(guidance_scale=sampling.guidance_scale, true_cfg_scale=sampling.true_cfg_scale)
    velocity = family.velocity(family.transformer, latents, timesteps, conditioning, guidance)
    for parameter in _last_layer(family.transformer).parameters():
        parameter.div_(velocity.square().mean().sqrt())


def _last_layer(transformer: Any) -> nn.Module:
    """The linear layer that the velocity comes from."""
    if hasattr(transformer, "proj_out"):
        return transformer.proj_out
    (final,) = transformer.all_final_layer.values()
    return final.linear


def latent_shape(config: Config, family: ModelFamily) -> tuple[int, ...]:
    return family.latent_shape(config.sampling.height, config.sampling.width)


def random_conditioning(
    config: Config, architecture: Architecture, family: ModelFamily, prompts: int
) -> Conditioning:
    """Embeddings of unit scale in the shapes that the family encodes prompts to."""
    device = next(family.transformer.parameters()).device
    draw = torch.Generator(device).manual_seed(1)
    conditioning = {}
    for name, shape in text_inputs(architecture, type(family), config).shapes.items():
        if name.endswith("mask"):
            used = max(1, round(TOKENS_USED * shape[0]))
            conditioning[name] = (torch.arange(shape[0], device=device) < used).repeat(prompts, 1)
        else:
            values = torch.randn(prompts, *shape, device=device, generator=draw)
            conditioning[name] = values.to(family.dtype)
    return conditioning


def build_actor(
    hour: Hour, config: Config, architecture: Architecture
) -> tuple[DiffusionActor, Conditioning]:
    """The actor, and one prompt."""
    family = random_family(config, architecture, hour.device, DTYPES[config.model.dtype])
    scale_velocities(config, architecture, family)
    conditioning = random_conditioning(config, architecture, family, 1)
    return DiffusionActor(family, config), conditioning


def sampled_batch(engine: InProcessEngine, conditioning: Conditioning, config: Config) -> ActorBatch:
    """A batch of one group whose advantages differ from sample to sample."""
    means = needs_rollout_means(config)
    rollout = engine.sample(conditioning, [0], training_step=1, with_means=means)
    device = rollout.log_probs.device
    advantages = torch.linspace(-1.5, 1.2, rollout.num_samples, dtype=torch.float64, device=device)
    return ActorBatch(rollout=replace(rollout, images=None), advantages=advantages)


def correct(actor: DiffusionActor, batch: ActorBatch) -> ActorBatch:
    """The batch after rollout correction in the configured mode."""
    correction, config = AutoMode.of(actor.config).correction, actor.config
    if correction.mode == "bypass":
        return apply_bypass_mode_to_diffusion_batch(batch)
    corrected, _ = apply_rollout_correction_to_diffusion_batch(
        batch, correction, actor_config=config.actor, num_steps=config.sampling.num_inference_steps
    )
    return corrected


def update(actor: DiffusionActor, batch: ActorBatch) -> None:
    """One optimizer step on the whole batch."""
    actor.update(batch, AutoMode.of(actor.config).correction, training_step=1)
