"""How a rollout engine computes an adapter, where it does so otherwise than the trainer."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.nn import functional

from flowcorr.lora import ADAPTER


@contextlib.contextmanager
def without_adapter(transformer: Any) -> Iterator[None]:
    """As an engine computes that merges the adapter into its weights."""
    transformer.disable_adapters()
    try:
        yield
    finally:
        transformer.enable_adapters()


@contextlib.contextmanager
def with_wrapped_adapter(transformer: Any) -> Iterator[None]:
    """As vllm-omni's layers compute, which have the scale in `lora_B`: each operation has an output of its own."""

    def forward(layer: Any, inputs: Tensor) -> Tensor:
        down, up = (factors[ADAPTER].weight.to(inputs.dtype) for factors in (layer.lora_A, layer.lora_B))
        return layer.base_layer(inputs) + functional.linear(functional.linear(inputs, down), up)

    layers = [module for module in transformer.modules() if hasattr(module, "lora_A")]
    for layer in layers:
        layer.forward = functools.partial(forward, layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward
