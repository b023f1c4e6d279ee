"""SD3.5's text encoders with random weights, on the device and offloaded: embeddings, peak memory and time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flowcorr.instruments.plan.architecture import Architecture, find_architecture
from flowcorr.models import DTYPES
from tests.gpu.hour import meter
from tests.gpu.hour.families import RandomWeights, random_family, recipe_config
from tests.gpu.hour.parts import Hour
from tests.gpu.hour.predict import ENCODED, encoded_text
from tests.gpu.hour.step import MEMORY, TIME


@torch.no_grad()
def measure(hour: Hour) -> None:
    config = recipe_config(hour, "sd35")
    planned = hour.fact_of("plan", "text_encoders")
    architecture = find_architecture(config.model.path)
    shallow = architecture.cut(lambda depth: 1)
    dtype = DTYPES[config.model.dtype]
    family = random_family(config, shallow, hour.device, dtype)
    draw = torch.Generator(hour.device).manual_seed(0)
    encoders, inputs = {}, {}
    for name, tokens in encoded_text(config, architecture).tokens.items():
        encoders[name] = _random_encoder(architecture, name, RandomWeights(hour.device), dtype)
        vocabulary = encoders[name].config.vocab_size
        inputs[name] = torch.randint(vocabulary, (ENCODED, tokens), device=hour.device, generator=draw)
    family.pipeline.register_modules(**encoders)

    def encode() -> list[Tensor]:
        return [encoders[name](tokens, output_hidden_states=True)[0] for name, tokens in inputs.items()]

    expected = encode()
    _report(hour, "on the device", encode, planned["here"])
    for kernel, share in meter.kernel_shares(hour.device, encode, most=6).items():
        hour.row(f"on the device: {kernel[:80]}", share, unit="of the time")
    before = meter.allocated(hour.device)
    family.offload_text_encoders(hour.device)
    hour.row("offloaded: freed", (before - meter.allocated(hour.device)) / 1e9, unit="GB")
    gap = max((found - rows).abs().max().item() for found, rows in zip(encode(), expected, strict=True))
    hour.row("offloaded: embeddings beside those on the device", gap, at_most=0.0)
    _report(hour, "offloaded", encode, planned["offloaded"])


def _report(hour: Hour, name: str, encode: Callable[[], object], planned: dict[str, float]) -> None:
    prompts = f"{ENCODED} prompts"
    peak = meter.peak(hour.device, encode)
    hour.row(
        f"{name}: {prompts}, peak above the weights", peak / 1e9, expected=planned["peak"] / 1e9, **MEMORY
    )
    seconds = meter.seconds(hour.device, encode, repeats=1)
    hour.row(f"{name}: {prompts}", seconds, expected=planned["seconds"], **TIME)


def _random_encoder(architecture: Architecture, name: str, weights: RandomWeights, dtype: torch.dtype) -> Any:
    import transformers
    from accelerate import init_empty_weights

    kind = getattr(transformers, architecture.model_index[name][1])
    with init_empty_weights(include_buffers=False):
        encoder = kind(kind.config_class.from_dict(dict(architecture.configs[name])))
    weights.place(encoder, dtype)
    return encoder.eval()
