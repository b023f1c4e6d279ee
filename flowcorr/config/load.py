"""Recipes and overrides to a checked `Config`, by OmegaConf."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import flowcorr
from flowcorr.config import yaml_text
from flowcorr.config.build import build, to_mapping
from flowcorr.config.older_verl import FLAT_KEYS, translate_algorithm
from flowcorr.config.rules import check, warn
from flowcorr.config.schema import Config, LoraConfig
from flowcorr.config.text_file import read_text
from flowcorr.correction import RolloutCorrectionConfig
from flowcorr.errors import ConfigError, nearest
from flowcorr.private import REDACTED, names_secret, redact

__all__ = [
    "errors_name",
    "find_recipe",
    "load",
    "load_mapping",
    "read_mapping",
    "recipe_names",
    "redact_override",
    "to_mapping",
    "to_yaml",
]

logger = logging.getLogger(__name__)

_CORRECTION = "algorithm.rollout_correction"
_INTERPOLATION = re.compile(r"(?<!\\)(?:\\\\)*\$\{")
_MAX_INTERPOLATIONS = 24  # each value may use others, so the text that they make grows exponentially


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
    return _beside(path, _resolve(_parsed(read_text(path)), overrides))


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
    return load_mapping(_resolve(_parsed(text), ()))


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
    found: dict[str, Any] = {}
    for name, value in values.items():
        inner = isinstance(value, Mapping) and value
        found |= dotted(value, f"{prefix}{name}.") if inner else {f"{prefix}{name}": value}
    return found


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
    found = nearest(path.name, beside)
    near = str(path.parent / found) if found else nearest(path.stem, recipe_names())
    hint = f" (did you mean {near}?)" if near else ""
    none, folder = (
        ("no such file or folder", " a folder of a run or of dumped steps,")
        if or_folder
        else ("no such file", "")
    )
    raise ConfigError(
        f"recipe={str(recipe)!r}: {none}{hint}; give{folder} a YAML file or one of {', '.join(recipe_names())}"
    )


def redact_override(override: str) -> str:
    """An override `key=value` as it may be shown: `key=***` where its value holds a secret, see `redact`."""
    key, _, text = override.partition("=")
    try:
        values = {key.strip().rpartition(".")[2]: text, "": yaml_text.parse(text)}
        hidden = redact(values) != values
    except ConfigError:
        hidden = names_secret(override)
    return f"{key}={REDACTED}" if hidden else override


def _beside(recipe: Path, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The values with prompts files that lie beside the recipe, and not in the current folder, found there."""
    data = values.get("data")
    if not isinstance(data, Mapping):
        return values
    found = {}
    for key in ("path", "heldout_path"):
        name = data.get(key)
        if isinstance(name, str) and not os.path.exists(name) and os.path.isfile(recipe.parent / name):
            found[key] = str((recipe.parent / name).resolve())
    return {**values, "data": {**data, **found}}


def _recipes_folder() -> Path:
    """`flowcorr/recipes` in an installed wheel, `recipes` beside the package in a checkout."""
    package = Path(flowcorr.__file__).parent
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parent / "recipes"


def _parsed(text: str) -> DictConfig:
    values = yaml_text.parse(text)
    if values is None or values == {}:
        raise ConfigError("the recipe is empty; name at least the model, such as model: {path: tiny_ocr}")
    if not isinstance(values, dict):
        raise ConfigError(f"a recipe must hold sections of keys, and this is a {type(values).__name__}")
    try:
        return OmegaConf.create(values)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key or 'a key'} cannot be read: {_reason(error)}") from None


def _resolve(config: DictConfig, overrides: Sequence[str]) -> dict[str, Any]:
    """Apply overrides, then interpolate."""
    found = sum(
        len(_INTERPOLATION.findall(text)) for text in (*_texts(OmegaConf.to_container(config)), *overrides)
    )
    if found > _MAX_INTERPOLATIONS:
        raise ConfigError(
            f"{found} interpolations ${{...}} are more than the {_MAX_INTERPOLATIONS} that a recipe may hold; write "
            "their values out"
        )
    recipe = _numbers_of_lora(config)
    _give_way_to_preset(config, overrides)
    _check_blanks(overrides)
    for override in overrides:
        _override(config, override)
    _say_other_scale(recipe, _numbers_of_lora(config))
    try:
        values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key or 'a value'} cannot be resolved: {_reason(error)}") from None
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _numbers_of_lora(config: DictConfig) -> dict[str, float]:
    """The rank and the alpha of a recipe, their defaults where it states none; empty if they are no numbers yet."""
    model = OmegaConf.to_container(config).get("model")  # type: ignore[union-attr]
    lora = model.get("lora") if isinstance(model, dict) else None
    stated = lora if isinstance(lora, dict) else {}
    numbers = {key: stated.get(key, getattr(LoraConfig(), key)) for key in ("rank", "alpha")}
    return numbers if all(type(number) in (int, float) for number in numbers.values()) else {}


def _say_other_scale(recipe: Mapping[str, float], run: Mapping[str, float]) -> None:
    """Say where a rank alone changes `alpha / rank`: an override beside the recipe's alpha, or beside the default."""
    default = {"rank": LoraConfig().rank, "alpha": LoraConfig().alpha}
    for before, origin in ((recipe, "the recipe"), (default, "the default")):
        if not before or not run or 0 in (before["rank"], run["rank"]):
            continue
        if run["alpha"] == before["alpha"] and run["rank"] != before["rank"]:
            scale = before["alpha"] / before["rank"]
            logger.warning(
                "model.lora.rank=%g beside alpha %g of %s scales the adapter by %g instead of %g; model.lora.alpha=%g "
                "keeps the scale",
                *(run["rank"], run["alpha"], origin, run["alpha"] / run["rank"], scale, scale * run["rank"]),
            )
            return


def _give_way_to_preset(config: DictConfig, overrides: Sequence[str]) -> None:
    """Empty the recipe's section of rollout correction where an override names a preset."""
    given = [override.partition("=") for override in overrides]
    chosen = [text.strip() for key, _, text in given if key.strip() == f"{_CORRECTION}.preset"]
    algorithm = OmegaConf.select(config, "algorithm")
    if not chosen or chosen[-1] in ("", "null") or not isinstance(algorithm, DictConfig):
        return
    section = OmegaConf.select(config, _CORRECTION)
    said = dict(section) if isinstance(section, DictConfig) else {}
    said |= {key: algorithm.pop(key) for key in FLAT_KEYS if key in algorithm}  # those of older dialects
    default = to_mapping(RolloutCorrectionConfig())
    lost = [
        key for key, value in said.items() if key != "preset" and value != default.get(str(key), object())
    ]
    if lost:
        warnings.warn(
            f"{_CORRECTION}.preset={chosen[-1]} replaces the recipe's {', '.join(map(str, lost))}",
            UserWarning,
            stacklevel=4,
        )
    if isinstance(section, DictConfig):
        OmegaConf.update(config, _CORRECTION, {}, merge=False)


def _check_blanks(overrides: Sequence[str]) -> None:
    """Refuse `key = value`, which a shell hands over as several words."""
    if any("=" not in override or override.startswith("=") for override in overrides):
        joined = re.sub(r" *= *", "=", " ".join(overrides)).split()
        meant = [redact_override(word) for word in joined if "=" in word and word not in overrides]
        if meant:
            raise ConfigError(f"an override must have no blanks around =; write {' '.join(meant)}")


def _override(config: DictConfig, override: str) -> None:
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(
            f"override {override!r} must have the form section.key=value, such as trainer.seed=1"
        )
    if key.startswith("+"):
        raise ConfigError(
            f"override {redact_override(override)} must have no + before its key; write "
            f"{redact_override(override.lstrip('+ '))}"
        )
    try:
        value = yaml_text.parse(text)
    except ConfigError as error:
        shown = redact_override(override)
        reason = f"{error}" if shown == override else "not valid YAML"
        raise ConfigError(f"{shown} is {reason}") from None
    if yaml_text.has_comment(text):
        raise ConfigError(
            f"{redact_override(override)} has a # that begins a comment of YAML; put the value into quotes"
        )
    try:
        OmegaConf.update(config, key, value, merge=value != {})  # to merge nothing would leave all as it was
    except (OmegaConfBaseException, IndexError, RecursionError) as error:
        raise ConfigError(f"{redact_override(override)} cannot be set: {_reason(error)}") from None
    except (TypeError, ValueError):
        raise ConfigError(
            f"{redact_override(override)} cannot be set: its key names an entry of a list by a word; entries are "
            "counted from 0, as in reward.terms[0].weight=1"
        ) from None


def _translate(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Translate older dialects' keys of rollout correction at `algorithm.*`."""
    algorithm = values.get("algorithm")
    if not isinstance(algorithm, Mapping):
        return values
    if not isinstance(algorithm.get("rollout_correction"), Mapping | None):
        return values  # `build` says what is wrong
    return {**values, "algorithm": translate_algorithm(algorithm)}


def _texts(value: Any) -> Iterator[str]:
    """All strings in plain data."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def _reason(error: Exception) -> str:
    """The first line of OmegaConf's message; the others name the key once more."""
    return str(getattr(error, "msg", None) or error).partition("\n")[0]
