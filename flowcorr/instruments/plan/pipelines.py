"""Builds pipelines from their configurations, without weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from flowcorr.config.schema import ModelConfig
from flowcorr.instruments.plan.architecture import TRACED, Architecture, Kind, of_all
from flowcorr.models import ModelFamily, quiet_loaders, resolve_family
from flowcorr.models.quantized import quantize_blocks


@contextmanager
def on_meta() -> Iterator[None]:
    """Build modules on torch's `meta` device, for which no weights are drawn."""
    from transformers.initialization import no_init_weights

    with torch.device("meta"), no_init_weights():
        yield


def cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Give a module's weights and floating-point buffers a dtype, but the scales of quantized layers."""
    nn.Module.to(module, dtype)  # that of diffusers warns whenever it is given a dtype


def family_class(architecture: Architecture, model: ModelConfig) -> type[ModelFamily]:
    """The model family named by `model.family`, or that of the pipeline's class.

    Raises:
        ConfigError: the family is unknown.
    """
    return resolve_family(architecture.family if model.family == "auto" else model.family)


def build_family(
    architecture: Architecture,
    model: ModelConfig,
    *,
    dtype: torch.dtype,
    place: Callable[[nn.Module, torch.dtype], None] = cast,
    empty: Callable[[], AbstractContextManager[Any]] = on_meta,
) -> ModelFamily:
    """The family's adapter around a pipeline without values, text encoders and tokenizers; its VAE is not placed.

    Args:
        architecture: see `find_architecture`.
        model: the section `model` of the configuration.
        dtype: the dtype of the weights.
        place: gives the transformer's weights, on torch's `meta` device, a dtype and a place.
        empty: modules are built in this context.

    Raises:
        ConfigError: the family is unknown.
    """
    import diffusers

    family = family_class(architecture, model)
    parts: dict[str, Any] = dict.fromkeys(_component_names(architecture))
    parts["scheduler"] = _class_of(architecture, "scheduler").from_config(architecture.configs["scheduler"])
    with empty():
        for name in ("transformer", "vae"):
            parts[name] = _new(architecture, name)
    if model.quantization != "none":
        quantize_blocks(parts["transformer"], model.quantization)
    place(parts["transformer"], dtype)
    with quiet_loaders():
        pipeline = getattr(diffusers, architecture.model_index["_class_name"])(**parts)
    return family(pipeline, dtype=dtype, max_sequence_length=model.max_sequence_length)


def build_component(
    architecture: Architecture, name: str, dtype: torch.dtype
) -> tuple[Any, list[Kind], float]:
    """One component without values and with few blocks, frozen and in evaluation mode; its blocks; and its bytes."""
    with on_meta():
        module = _new(architecture, name)
        kinds = _shortened(module)
    cast(module, dtype)
    return module, kinds, of_all(module, kinds, nbytes)


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


def _class_of(architecture: Architecture, name: str) -> Any:
    import diffusers
    import transformers

    library, class_name = architecture.model_index[name]
    return getattr({"diffusers": diffusers, "transformers": transformers}[library], class_name)


def _component_names(architecture: Architecture) -> list[str]:
    import diffusers

    kind = getattr(diffusers, architecture.model_index["_class_name"])
    return [name for name in kind._get_signature_types() if name not in kind._optional_components]
