"""Builds pipelines from their configurations, without weights. The configurations are shipped, local or on the hub."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from flowcorr import hub
from flowcorr.config.schema import ModelConfig
from flowcorr.errors import ConfigError
from flowcorr.instruments.plan.tracing import TRACED, Tracer
from flowcorr.models import EMBEDDED, FAMILIES, ModelFamily, quiet_loaders, resolve_family, resolve_path
from flowcorr.models.quantized import quantize_blocks

Kind = tuple[list[nn.Module], int]
"""Blocks that are alike, of which few are built, and how many the real module has."""
SHIPPED = Path(__file__).parent / "architectures"
_DEPTHS = {
    "transformer_blocks": "num_layers",
    "single_transformer_blocks": "num_single_layers",
    "layers": "n_layers",
    "noise_refiner": "n_refiner_layers",
    "context_refiner": "n_refiner_layers",
    "blocks": "num_layers",
}
"""The key of a transformer's configuration with the number of its blocks, by the name of their list."""


def on_meta() -> AbstractContextManager[Any]:
    """Build modules on torch's `meta` device."""
    return torch.device("meta")


class Places(Protocol):
    """Gives the weights of modules on torch's `meta` device a place, as a tracer does."""

    def place(self, module: nn.Module, dtype: torch.dtype) -> None:
        """Replace the module's parameters and buffers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The configurations of a pipeline's components.

    Attributes:
        path: the pipeline's folder or hub name.
        model_index: the content of `model_index.json`: the classes of the pipeline and its components.
        configs: the configuration of each component, by its name.
        num_references: reference images of each prompt of the run.
    """

    path: str
    model_index: Mapping[str, Any]
    configs: Mapping[str, Mapping[str, Any]]
    num_references: int = 0

    def cut(self, shorter: Callable[[int], int]) -> Architecture:
        """The same pipeline with `shorter(depth)` blocks of each kind in its transformer."""
        transformer = dict(self.configs["transformer"])
        dual = len(transformer.get("dual_attention_layers", ()))
        plain = transformer.get("num_layers", 0) - dual
        for key in set(_DEPTHS.values()) & transformer.keys():
            transformer[key] = shorter(transformer[key])
        if dual:
            transformer["dual_attention_layers"] = tuple(range(shorter(dual)))
            transformer["num_layers"] = shorter(dual) + shorter(plain)
        return replace(self, configs={**self.configs, "transformer": transformer})

    @property
    def shallow(self) -> Architecture:
        """The same pipeline with at most `TRACED` blocks of a kind in its transformer."""
        return self.cut(lambda depth: min(depth, TRACED))

    @property
    def depth(self) -> int:
        """Blocks of all kinds in the transformer."""
        config = self.configs["transformer"]
        return sum(config[key] for key in set(_DEPTHS.values()) & config.keys())

    def kinds(self, transformer: nn.Module) -> list[Kind]:
        """The blocks of each kind in a shallow transformer, and how many the real one has."""
        config = self.configs["transformer"]
        kinds = []
        for name, blocks in transformer.named_children():
            if not isinstance(blocks, nn.ModuleList) or _DEPTHS.get(name) not in config:
                continue
            depth, dual = config[_DEPTHS[name]], len(config.get("dual_attention_layers", ()))
            if dual:
                first = min(dual, TRACED)
                kinds += [(list(blocks[:first]), dual), (list(blocks[first:]), depth - dual)]
            else:
                kinds.append((list(blocks), depth))
        return kinds

    def whole(self, transformer: nn.Module, measure: Callable[[nn.Module], float]) -> float:
        """A sum over the weights of the real transformer, measured on a shallow one."""
        return _of_all(transformer, self.kinds(transformer), measure)

    @property
    def text_encoders(self) -> list[str]:
        return [name for name in self.configs if name.startswith("text_encoder")]


def find_architecture(path: str) -> Architecture:
    """The configurations of the model at `path`: from a folder, shipped with flowcorr, or from the hub.

    Raises:
        ConfigError: no configuration is found.
    """
    location = Path(resolve_path(path))
    if location.is_dir():
        return _read_folder(path, location)
    return _shipped(path) or _read_folder(
        path, _download(path, ["model_index.json", "*/config.json", "scheduler/*"])
    )


def local_architecture(path: str) -> Architecture | None:
    """The configurations of the model at `path` if they are on this machine, which asks the hub nothing.

    Raises:
        ConfigError: the folder at `path` is no pipeline.
    """
    location = os.path.expanduser(EMBEDDED.get(path, path))
    return _read_folder(path, Path(location)) if os.path.isdir(location) else _shipped(path)


def find_clip(path: str) -> Architecture:
    """The configuration of the CLIP model at `path`, as a pipeline with the one component `model`."""
    if not Path(path).is_dir() and (known := _shipped(path)):
        return known
    folder = Path(path) if Path(path).is_dir() else _download(path, ["config.json"])
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the reward's path={path!r} has no configuration: {error}") from error
    return Architecture(
        path=path, model_index={"model": ["transformers", "CLIPModel"]}, configs={"model": config}
    )


def family_class(architecture: Architecture, model: ModelConfig) -> type[ModelFamily]:
    """The model family named by `model.family`, or that of the pipeline's class.

    Raises:
        ConfigError: the family is unknown.
    """
    if model.family != "auto":
        return resolve_family(model.family)
    class_name = architecture.model_index["_class_name"]
    for family in FAMILIES.values():
        if family.pipeline_class == class_name:
            return family
    known = ", ".join(family.pipeline_class for family in FAMILIES.values())
    raise ConfigError(
        f"model.path={model.path!r} is a {class_name}, but flowcorr plan knows only {known}; set model.family"
    )


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
    return module, _of_all(module, kinds, nbytes)


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


def _of_all(module: nn.Module, kinds: Sequence[Kind], measure: Callable[[nn.Module], float]) -> float:
    """A sum over the weights of a module with all its blocks, measured on one with few."""
    return measure(module) + sum(
        (depth - len(blocks)) * measure(blocks[-2]) for blocks, depth in kinds if depth > len(blocks)
    )


def _new(architecture: Architecture, name: str) -> Any:
    kind, config = _class_of(architecture, name), architecture.configs[name]
    if hasattr(kind, "from_config"):  # diffusers; transformers' models have `config_class`
        module = kind.from_config(config)
    else:
        module = kind(kind.config_class.from_dict(dict(config)))
    return module.requires_grad_(False).eval()


def _place_with_adapter(transformer: Any, tracer: Places, dtype: torch.dtype) -> None:
    """Let `add_adapter` place `transformer` afterwards, because peft cannot add layers to tensors without values."""
    add_adapter = transformer.add_adapter

    def add_and_place(*args: Any, **kwargs: Any) -> None:
        with _disable_current_modes():
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


def _read_folder(path: str, folder: Path) -> Architecture:
    try:
        index = _read_mapping(folder / "model_index.json", "_class_name")
        configs = {
            name: _read_mapping(_config_file(folder / name))
            for name, value in index.items()
            if isinstance(value, list) and any(value) and "token" not in name and (folder / name).is_dir()
        }
        return Architecture(path=path, model_index=index, configs=configs)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path={path!r} is not a diffusers pipeline: {error}") from error


def _read_mapping(file: Path, *keys: str) -> dict[str, Any]:
    """A JSON file that holds these keys; raises `OSError` or `ValueError`."""
    found = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(found, dict) or not found.keys() >= set(keys):
        raise ValueError(f"{file} is not an object{''.join(f' with the key {key}' for key in keys)}")
    return found


def _config_file(folder: Path) -> Path:
    scheduler = folder / "scheduler_config.json"
    return scheduler if scheduler.is_file() else folder / "config.json"


def _shipped(path: str) -> Architecture | None:
    for file in SHIPPED.glob("*.json"):
        stored = json.loads(file.read_text(encoding="utf-8"))
        if stored["path"] == path:
            return Architecture(**stored)
    return None


def _download(path: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(path, allow_patterns=patterns, local_files_only=hub.only_cached(path)))
    except (OSError, ValueError, HfHubHTTPError) as error:
        files = sorted(SHIPPED.glob("*.json"))
        known = ", ".join(json.loads(file.read_text(encoding="utf-8"))["path"] for file in files)
        raise ConfigError(
            f"model.path={path!r} is not a folder and not a model that flowcorr knows ({known}), and its "
            f"configuration files cannot be read from the hub: {' '.join(str(error).split())}"
        ) from error
