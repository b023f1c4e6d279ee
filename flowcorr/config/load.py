"""Recipes and overrides to a checked `Config`, by OmegaConf."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

import flowcorr
from flowcorr.config import yaml_text
from flowcorr.config.build import build, to_mapping
from flowcorr.config.older_verl import translate_algorithm
from flowcorr.config.overrides import created, redact_override, resolved
from flowcorr.config.rules import check, warn
from flowcorr.config.schema import Config
from flowcorr.config.text_file import read_text
from flowcorr.errors import ConfigError, nearest

__all__ = [
    "errors_name",
    "find_recipe",
    "load",
    "load_mapping",
    "read_mapping",
    "recipe_names",
    "to_mapping",
    "to_yaml",
]


def load(recipe: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Config:
    """Load a recipe with overrides and check it.

    Args:
        recipe: a YAML file, or the name of a recipe that ships with flowcorr.
        overrides: `dotted.key=value` strings; values are YAML, so `key=[0, 4]` and `key=null` work. A mapping adds to
            the recipe's, and `key={}` empties it. `data.path` and `data.heldout_path` may also name files beside the
            recipe. A `preset` of rollout correction takes the place of all that the recipe says of it, so that one key
            switches between modes.

    Raises:
        ConfigError: no such recipe, no YAML, or a key, value or combination that cannot be used. The message names
            the file, the key, the value and what is allowed.

    Warns:
        UserWarning: a key has no effect, or gave way to a preset.
        FutureWarning: an older dialect's keys were translated.
    """
    path = find_recipe(recipe)
    with errors_name(path, overrides):
        return load_mapping(read_mapping(path, overrides))


def read_mapping(path: Path, overrides: Sequence[str] = ()) -> Mapping[str, Any]:
    """The plain values of a recipe's file with overrides: nothing of them is checked, and nothing is imported."""
    return _beside(path, resolved(_parsed(read_text(path)), overrides))


@contextlib.contextmanager
def errors_name(path: Path, overrides: Sequence[str] = ()) -> Iterator[None]:
    """Put the file and the overrides behind the message of a `ConfigError`."""
    try:
        yield
    except ConfigError as error:
        origin = f" with {' '.join(map(redact_override, overrides))}" if overrides else ""
        raise ConfigError(" ".join(f"{error} (in {path}{origin})".split())) from None


def load_text(text: str) -> Config:
    """Make and check a `Config` from the text of a recipe; see `load`."""
    return load_mapping(resolved(_parsed(text), ()))


def load_mapping(values: Mapping[str, Any]) -> Config:
    """Make and check a `Config` from plain nested mappings, as `to_mapping` returns them."""
    config = build(Config, _translate(values))
    check(config)
    warn(config)
    return config


def defaults() -> dict[str, Any]:
    """Every key of a configuration with its default, as nested mappings."""
    return to_mapping(Config())


def to_yaml(config: Config) -> str:
    """The whole config as YAML, every key written out; `load` reads an equal config from it."""
    return yaml_text.dump(without_interpolation(to_mapping(config)))


def without_interpolation(value: Any) -> Any:
    """Plain data as a recipe has to write it, so that text that looks like an interpolation is not resolved."""
    if isinstance(value, dict):
        return {key: without_interpolation(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_interpolation(item) for item in value]
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    return value


def dotted(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """All values of nested mappings by their dotted keys; an empty mapping is a value."""
    by_key: dict[str, Any] = {}
    for name, value in values.items():
        inner = isinstance(value, Mapping) and value
        by_key |= dotted(value, f"{prefix}{name}.") if inner else {f"{prefix}{name}": value}
    return by_key


def recipe_names() -> list[str]:
    """Names of the recipes that ship with flowcorr."""
    return sorted(path.stem for path in _recipes_folder().glob("*.yaml"))


def find_recipe(recipe: str | os.PathLike[str], *, or_folder: bool = False) -> Path:
    """The file of a recipe: an existing path as it is, a bare name among the recipes that ship with flowcorr.

    Args:
        recipe: path or name.
        or_folder: whether the folder of a run, or of dumped steps, might have been meant, for the message.

    Raises:
        ConfigError: there is no such file or recipe.
    """
    path = Path(recipe)
    if os.path.isfile(path):
        return path
    shipped = _recipes_folder() / f"{path.name}.yaml"
    if len(path.parts) == 1 and os.path.isfile(shipped):
        return shipped
    if os.path.isfile(path / "config.yaml"):
        raise ConfigError(
            f"recipe={str(recipe)!r} is the folder of a run; give its recipe, {path / 'config.yaml'}"
        )
    beside = sorted(file.name for ending in ("yaml", "yml") for file in path.parent.glob(f"*.{ending}"))
    similar = nearest(path.name, beside)
    near = str(path.parent / similar) if similar else nearest(path.stem, recipe_names())
    hint = f" (did you mean {near}?)" if near else ""
    none, folder = (
        ("no such file or folder", " a folder of a run or of dumped steps,")
        if or_folder
        else ("no such file", "")
    )
    raise ConfigError(
        f"recipe={str(recipe)!r}: {none}{hint}; give{folder} a YAML file or one of {', '.join(recipe_names())}"
    )


def _beside(recipe: Path, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Resolve prompt files relative to the recipe if they are not in the working directory."""
    data = values.get("data")
    if not isinstance(data, Mapping):
        return values
    resolved = {}
    for key in ("path", "heldout_path"):
        name = data.get(key)
        if isinstance(name, str) and not os.path.exists(name) and os.path.isfile(recipe.parent / name):
            resolved[key] = str((recipe.parent / name).resolve())
    return {**values, "data": {**data, **resolved}}


def _recipes_folder() -> Path:
    """`flowcorr/recipes` in an installed wheel, `recipes` at the top of a checkout."""
    package = Path(flowcorr.__file__).parent
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parent / "recipes"


def _parsed(text: str) -> DictConfig:
    values = yaml_text.parse(text)
    if values is None or values == {}:
        raise ConfigError("the recipe is empty; name at least the model, such as model: {path: tiny_ocr}")
    if not isinstance(values, dict):
        raise ConfigError(f"a recipe must hold sections of keys, and this is a {type(values).__name__}")
    return created(values)


def _translate(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Translate older dialects' keys of rollout correction at `algorithm.*`."""
    algorithm = values.get("algorithm")
    if not isinstance(algorithm, Mapping):
        return values
    if not isinstance(algorithm.get("rollout_correction"), Mapping | None):
        return values  # `build` says what is wrong
    return {**values, "algorithm": translate_algorithm(algorithm)}
