"""The configurations of a pipeline's components: shipped with flowcorr, local or on the hub. They need no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from flowcorr import hub
from flowcorr.config.families import PIPELINES
from flowcorr.errors import ConfigError
from flowcorr.models.paths import EMBEDDED, resolve_path

if TYPE_CHECKING:
    from torch import nn

TRACED = 3
"""Blocks of a kind that are built, of a model with more. The first and the last may differ from those between them."""
Kind: TypeAlias = "tuple[list[nn.Module], int]"
"""Blocks that are alike, of which few are built, and how many the real module has."""
SHIPPED = Path(__file__).parent / "architectures"
_MODELED = ("transformer", "vae", "scheduler", "text_encoder")
"""How the names of components begin that have a configuration. Tokenizers, processors and such have other files."""
_DEPTHS = {
    "transformer_blocks": "num_layers",
    "single_transformer_blocks": "num_single_layers",
    "layers": "n_layers",
    "noise_refiner": "n_refiner_layers",
    "context_refiner": "n_refiner_layers",
    "blocks": "num_layers",
}
"""The key of a transformer's configuration with the number of its blocks, by the name of their list."""


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
        children: dict[str, Any] = dict(transformer.named_children())
        for name, blocks in children.items():
            if _DEPTHS.get(name) not in config:
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
        return of_all(transformer, self.kinds(transformer), measure)

    @property
    def family(self) -> str:
        """The name of the family of the pipeline's class.

        Raises:
            ConfigError: no family has that class.
        """
        class_name = self.model_index["_class_name"]
        if class_name not in PIPELINES:
            raise ConfigError(
                f"model.path={self.path!r} is a {class_name}, but flowcorr plan knows only {', '.join(PIPELINES)}; set "
                "model.family"
            )
        return PIPELINES[class_name]


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


def of_all(module: nn.Module, kinds: Sequence[Kind], measure: Callable[[nn.Module], float]) -> float:
    """A sum over the weights of a module with all its blocks, measured on one with few."""
    return measure(module) + sum(
        (depth - len(blocks)) * measure(blocks[-2]) for blocks, depth in kinds if depth > len(blocks)
    )


def _read_folder(path: str, folder: Path) -> Architecture:
    try:
        index = _read_mapping(folder / "model_index.json", "_class_name")
        files = {
            name: folder / name / ("scheduler_config.json" if name == "scheduler" else "config.json")
            for name, value in index.items()
            if isinstance(value, list) and any(value)
        }
        configs = {
            name: _read_mapping(file)
            for name, file in files.items()
            if file.is_file() or name.startswith(_MODELED)
        }
        return Architecture(path=path, model_index=index, configs=configs)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path={path!r} is not a diffusers pipeline: {error}") from error


def _read_mapping(file: Path, *keys: str) -> dict[str, Any]:
    """A JSON file that holds these keys; raises `OSError` or `ValueError`."""
    values = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(values, dict) or not values.keys() >= set(keys):
        raise ValueError(f"{file} is not an object{''.join(f' with the key {key}' for key in keys)}")
    return values


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
