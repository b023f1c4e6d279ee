"""Noise floors: what the rounding of a precision does to log-probs, by timestep, at two numbers of latent elements.

The reference computes in float32 without TF32, and gets the latents, timesteps and conditioning of each precision.
Random weights round as trained ones do, but their activations have no outliers: a trained model can be worse in fp8.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from flowcorr import sde
from flowcorr.config.schema import Config
from flowcorr.instruments.plan.architecture import Architecture, find_architecture
from flowcorr.models import Guidance, ModelFamily
from flowcorr.rollout.emulate import FP8_MAX, round_weight
from flowcorr.sde.transition import over_elements
from tests.gpu.hour import meter
from tests.gpu.hour.families import latent_shape, random_conditioning, random_family, recipe_config
from tests.gpu.hour.parts import Hour

PIXELS = (384, 1024)
"""Image sizes with 36,864 and 262,144 latent elements."""
STEPS, EVERY, LAST = 10, 2, 6
GUIDANCE = 4.0
"""Distilled guidance that times 1000, as the transformer embeds it, is the same number in each precision."""
DRAWS = 16
ROOM = 0.7
"""Share of the memory that float32 weights may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """How a copy of the transformer computes; `rows` samples in a batch, of which the first counts."""

    dtype: torch.dtype
    rows: int = 1
    tf32: bool = False
    change: Callable[[nn.Module], None] = lambda transformer: None


def fp8_weights(transformer: nn.Module) -> None:
    for parameter in transformer.parameters():
        parameter.data = round_weight(parameter.data, "fp8")


def fp8_weights_and_inputs(transformer: nn.Module) -> None:
    """Inputs of linear layers too, with one scale a token."""
    fp8_weights(transformer)
    for module in transformer.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda _, inputs: (_in_fp8(inputs[0]), *inputs[1:]))


def _in_fp8(values: Tensor) -> Tensor:
    scale = values.abs().amax(dim=-1, keepdim=True).clamp(min=1e-6) / FP8_MAX
    return (values / scale).to(torch.float8_e4m3fn).to(values.dtype) * scale


PRECISIONS = {
    "float32, another batch": Precision(dtype=torch.float32, rows=2),
    "float32 with TF32": Precision(dtype=torch.float32, tf32=True),
    "float16": Precision(dtype=torch.float16),
    "bfloat16": Precision(dtype=torch.bfloat16),
    "fp8 weights": Precision(dtype=torch.bfloat16, change=fp8_weights),
    "fp8 weights and inputs": Precision(dtype=torch.bfloat16, change=fp8_weights_and_inputs),
}


def measure(hour: Hour, family: str) -> None:
    config = recipe_config(hour, family)
    architecture = _that_fits(hour, find_architecture(config.model.path), family)
    native = (config.sampling.height, config.sampling.width)
    sizes = [native, tuple(2 * side for side in native)] if hour.tiny else [(side, side) for side in PIXELS]
    configs = [
        replace(config, sampling=replace(config.sampling, height=height, width=width))
        for height, width in sizes
    ]
    points: dict[torch.dtype, list[Points]] = {}
    exact: dict[torch.dtype, list[Tensor]] = {}
    with meter.tf32(False), _loaded(hour, config, architecture, torch.float32) as reference:
        for dtype in dict.fromkeys(precision.dtype for precision in PRECISIONS.values()):
            points[dtype] = [_points(each, architecture, reference, dtype) for each in configs]
            exact[dtype] = [
                _velocities(reference, *pair) for pair in zip(configs, points[dtype], strict=True)
            ]
    for name, precision in PRECISIONS.items():
        with meter.tf32(precision.tf32), _loaded(hour, config, architecture, precision.dtype) as other:
            precision.change(other.transformer)
            cases = zip(configs, points[precision.dtype], exact[precision.dtype], strict=True)
            for each, at, expected in cases:
                found = _velocities(other, each, at, rows=precision.rows)
                _report(hour, name, each, at, expected, found)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Points:
    """Where velocities are compared: latents `[N, *L]` at the steps `indices` of a schedule."""

    latents: Tensor
    timesteps: Tensor
    sigmas: Tensor
    sigmas_next: Tensor
    conditioning: dict[str, Tensor]


def _that_fits(hour: Hour, architecture: Architecture, family: str) -> Architecture:
    planned, memory = hour.fact_of("plan", family), hour.fact_of("machine", "gpu")["memory"]
    in_float32 = planned["weights"] * 4 / planned["dtype"]
    share = min(1.0, ROOM * memory / in_float32)
    part = architecture.cut(lambda depth: max(1, math.floor(share * planned["share"] * depth)))
    hour.row("blocks", part.depth, note=f"of {architecture.depth}")
    return part


@contextmanager
def _loaded(
    hour: Hour, config: Config, architecture: Architecture, dtype: torch.dtype
) -> Iterator[ModelFamily]:
    family = random_family(config, architecture, hour.device, dtype)
    try:
        yield family
    finally:
        family.pipeline.transformer = family.pipeline.vae = None
        if hour.device.type == "cuda":
            torch.cuda.empty_cache()


def _points(config: Config, architecture: Architecture, family: ModelFamily, dtype: torch.dtype) -> Points:
    """Points of the schedule as an engine of `dtype` steps through it: its rounding of timesteps is no noise."""
    device = next(family.transformer.parameters()).device
    shape = latent_shape(config, family)
    schedule = family.in_dtype(family.schedule(STEPS, shape), dtype)
    indices = range(0, LAST + 1, EVERY)
    sigmas = torch.tensor([schedule.sigmas[index] for index in indices], device=device)
    draw = torch.Generator(device).manual_seed(2)
    data, noise = (torch.randn(len(indices), *shape, device=device, generator=draw) for _ in range(2))
    share = over_elements(sigmas, data)
    return Points(
        latents=(1 - share) * data + share * noise,
        timesteps=torch.tensor([schedule.timesteps[index] for index in indices], device=device),
        sigmas=sigmas,
        sigmas_next=torch.tensor([schedule.sigmas[index + 1] for index in indices], device=device),
        conditioning=random_conditioning(config, architecture, family, 1),
    )


@torch.no_grad()
def _velocities(family: ModelFamily, config: Config, at: Points, *, rows: int = 1) -> Tensor:
    """Velocities `[N, *L]`, one point after the other."""
    sampling = config.sampling
    scale = GUIDANCE if family.distills_guidance else sampling.guidance_scale
    guidance = Guidance(guidance_scale=scale, true_cfg_scale=sampling.true_cfg_scale)
    conditioning = {
        name: values.to(family.dtype if values.is_floating_point() else None).repeat_interleave(rows, 0)
        for name, values in at.conditioning.items()
    }
    found = [
        family.velocity(
            family.transformer,
            at.latents[place].expand(rows, *at.latents.shape[1:]),
            at.timesteps[place].expand(rows),
            conditioning,
            guidance,
        )[0]
        for place in range(len(at.latents))
    ]
    return torch.stack(found)


def _report(hour: Hour, name: str, config: Config, at: Points, exact: Tensor, found: Tensor) -> None:
    """|delta log-prob| and the exact KL of the SDE step at each point, where the reference has sampled it."""
    sampling = config.sampling

    def step(velocity: Tensor) -> sde.Transition:
        tensors = (at.latents, velocity, at.sigmas, at.sigmas_next)
        latents, velocity, sigmas, following = (tensor.double() for tensor in tensors)
        return sde.transition(sampling.sde_type, latents, velocity, sigmas, following, sampling.noise_level)

    scale = exact.square().mean().sqrt()  # random velocities are smaller than trained ones
    exact, found = exact / scale, found / scale
    reference, other = step(exact), step(found)
    draw = torch.Generator(hour.device).manual_seed(3)
    deltas = []
    for _ in range(DRAWS):
        noise = torch.randn(exact.shape, device=hour.device, generator=draw).double()
        arrived = sde.sample(reference, noise)
        deltas.append((sde.log_prob(arrived, other) - sde.log_prob(arrived, reference)).abs())
    elements = exact[0].numel()
    sigmas = " ".join(f"{sigma:.3f}" for sigma in at.sigmas.tolist())
    delta = torch.stack(deltas).mean(0).tolist()
    label = f"{name}, D = {elements:,}"
    finite = bool(torch.isfinite(found).all())
    error = ((found - exact).double().norm() / exact.double().norm()).item()
    note = f"at sigma {sigmas}; velocities off by {error:.2g} of their norm"
    hour.row(f"{label}: |delta|", delta, unit="nats", failed=not finite, note=note)
    hour.row(f"{label}: exact KL", sde.kl(reference, other).tolist(), unit="nats")
