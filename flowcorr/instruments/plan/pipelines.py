"""Builds pipelines from their configurations, without weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from flowcorr.config.schema import ModelConfig
from flowcorr.instruments.plan.architecture import TRACED, Architecture, Kind, of_all
from flowcorr.instruments.plan.tracing import Tracer
from flowcorr.models import ModelFamily, quiet_loaders, resolve_family
from flowcorr.models.quantized import quantize_blocks


@contextmanager
def on_meta() -> Iterator[None]:
    """Build modules on torch's `meta` device, for which no weights are drawn."""
    from transformers.initialization import no_init_weights

    with torch.device("meta"), no_init_weights():
        yield


class Places(Protocol):
    """Gives the weights of modules on torch's `meta` device a place, as a tracer does."""

    def place(self, module: nn.Module, dtype: torch.dtype) -> None:
        """Replace the module's parameters and buffers."""


def family_class(architecture: Architecture, model: ModelConfig) -> type[ModelFamily]:
    """The model family named by `model.family`, or that of the pipeline's class.

    Raises:
        ConfigError: the family is unknown.
    """
    return resolve_family(architecture.family if model.family == "auto" else model.family)


def build_family(
    architecture: Architecture,
    model: ModelConfig,
    tracer: Places,
    *,
    dtype: torch.dtype,
    empty: Callable[[], AbstractContextManager[Any]] = on_meta,
) -> ModelFamily:
    """The family's adapter around a pipeline without values, text encoders and tokenizers; its VAE is not placed.

    Args:
        architecture: see `find_architecture`.
        model: the section `model` of the configuration.
        tracer: places the transformer's weights; inside its context.
        dtype: the dtype of the weights.
        empty: modules are built in this context.

    Raises:
        ConfigError: the family is unknown.
    """
    import diffusers

    family = family_class(architecture, model)
    parts: dict[str, Any] = dict.fromkeys(_component_names(architecture))
    with _disable_current_modes():
        parts["scheduler"] = _class_of(architecture, "scheduler").from_config(
            architecture.configs["scheduler"]
        )
    with _disable_current_modes(), empty():
        for name in ("transformer", "vae"):
            parts[name] = _new(architecture, name)
    with _disable_current_modes():
        if model.quantization != "none":
            quantize_blocks(parts["transformer"], model.quantization)
    if model.lora.rank:
        _place_with_adapter(parts["transformer"], tracer, dtype)
    else:
        tracer.place(parts["transformer"], dtype)
    with quiet_loaders():
        pipeline = getattr(diffusers, architecture.model_index["_class_name"])(**parts)
    return family(pipeline, dtype=dtype, max_sequence_length=model.max_sequence_length)


def build_component(
    architecture: Architecture, name: str, tracer: Tracer, dtype: torch.dtype
) -> tuple[Any, float]:
    """One component without values, of few blocks that count as all, frozen and in evaluation mode; and its bytes."""
    with _disable_current_modes(), on_meta():
        module = _new(architecture, name)
        kinds = _shortened(module)
    tracer.place(module, dtype)
    for blocks, depth in kinds:
        tracer.repeat(blocks, depth)
    return module, of_all(module, kinds, nbytes)


def nbytes(module: nn.Module) -> float:
    """Bytes of a module's weights and buffers."""
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def _shortened(module: nn.Module) -> list[Kind]:
    """Leave `TRACED` of each list of blocks that are alike; the first and the last one may differ from the others."""
    kinds: list[Kind] = []
    for parent in list(module.modules()):
        for name, blocks in parent.named_children():
            if isinstance(blocks, nn.ModuleList) and len(blocks) > TRACED:
                sizes = [[weight.shape for weight in block.parameters()] for block in blocks[1:-1]]
                if all(size == sizes[0] for size in sizes):
                    kept = [*blocks[: TRACED - 1], blocks[-1]]
                    setattr(parent, name, nn.ModuleList(kept))
                    kinds.append((kept, len(blocks)))
    return kinds


def _new(architecture: Architecture, name: str) -> Any:
    kind, config = _class_of(architecture, name), architecture.configs[name]
    if hasattr(kind, "from_config"):  # diffusers; transformers' models have `config_class`
        module = kind.from_config(config)
    else:
        module = kind(kind.config_class.from_dict(dict(config)))
        module.tie_weights()  # its constructor leaves that out where no weights are drawn
    return module.requires_grad_(False).eval()


def _place_with_adapter(transformer: Any, tracer: Places, dtype: torch.dtype) -> None:
    """Let `add_adapter` place `transformer` afterwards, because peft cannot add layers to tensors without values."""
    add_adapter = transformer.add_adapter

    def add_and_place(*args: Any, **kwargs: Any) -> None:
        with _disable_current_modes(), on_meta():
            add_adapter(*args, **kwargs)
        tracer.place(transformer, dtype)

    transformer.add_adapter = add_and_place


def _class_of(architecture: Architecture, name: str) -> Any:
    import diffusers
    import transformers

    library, class_name = architecture.model_index[name]
    return getattr({"diffusers": diffusers, "transformers": transformers}[library], class_name)


def _component_names(architecture: Architecture) -> list[str]:
    import diffusers

    kind = getattr(diffusers, architecture.model_index["_class_name"])
    return [name for name in kind._get_signature_types() if name not in kind._optional_components]
