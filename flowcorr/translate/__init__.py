"""`flowcorr translate`: turns the configuration of another trainer into a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from flowcorr.config import Config, yaml_text
from flowcorr.errors import ConfigError
from flowcorr.translate import flow_grpo, verl_omni
from flowcorr.translate.python_config import read_config, read_functions
from flowcorr.translate.recipe import recipe_text
from flowcorr.translate.shell import read_command
from flowcorr.translate.table import translate_values

__all__ = ["translate"]

_MODULE = "verl_omni.trainer.main_"


def translate(source: str, overrides: Sequence[str] = (), *, gpus: int | None = None) -> str:
    """Translate a configuration of another trainer into the text of a recipe.

    Args:
        source: a shell script or Hydra YAML of verl-omni, or `FILE.py:FUNCTION` of flow_grpo.
        overrides: more Hydra overrides of a script or YAML.
        gpus: number of GPUs of a flow_grpo run, if its file does not define `gpu_number`.

    Raises:
        ConfigError: the file cannot be read, or flowcorr cannot run its configuration; the message says why.
    """
    name, _, function = source.partition(".py:") if ".py:" in source else (source, "", "")
    path = Path(f"{name}.py" if function else name)
    if not path.is_file():
        raise ConfigError(
            f"{path}: no such file; give a shell script, a Hydra YAML, or FILE.py:FUNCTION of flow_grpo"
        )
    try:
        return _of_flow_grpo(path, function, gpus) if path.suffix == ".py" else _of_verl_omni(path, overrides)
    except ConfigError as error:
        raise ConfigError(f"{source} cannot be translated: {error}") from None


def _of_flow_grpo(path: Path, function: str, gpus: int | None) -> str:
    if not function:
        names = ", ".join(read_functions(path))
        raise ConfigError(f"choose one of its configurations, as {path}:NAME; it has {names}")
    config, names_there = read_config(path, function)
    given = _flat(config, keep=("reward_fn",))
    given["gpus"] = gpus or names_there.get("gpu_number")
    return recipe_text(translate_values(given, flow_grpo.TABLE), f"{path.name}:{function} (flow_grpo)")


def _of_verl_omni(path: Path, overrides: Sequence[str]) -> str:
    text = path.read_text(encoding="utf-8")
    if path.suffix in (".yaml", ".yml"):
        given = _flat(_hydra(text), keep=("reward.reward_functions",))
        words: list[str] = []
    else:
        module, words = read_command(text, _MODULE)
        given = {"main": module}
    for override in (*words, *overrides):
        key, equals, value = override.partition("=")
        if not equals:
            raise ConfigError(f"override {override!r} must have the form key=value")
        given[key.lstrip("+")] = _parsed(value)
    if "main" not in given:
        _check_sections({key.partition(".")[0] for key in given})
    functions: dict[str, dict[str, Any]] = given.pop("reward.reward_functions", {})
    for key in [key for key in given if key.startswith("reward.reward_functions.")]:
        _, _, name, entry = key.split(".", 3)
        functions.setdefault(name, {})[entry] = given.pop(key)
    if functions:
        given["reward.reward_functions"] = functions
    return recipe_text(translate_values(given, verl_omni.TABLE), f"{path.name} (verl-omni)")


def _check_sections(names: set[str]) -> None:
    """Refuse a YAML file that is not of verl-omni, by the names of its sections."""
    known = {key.partition(".")[0] for key in (*verl_omni.TABLE.defaults, *verl_omni.TABLE.no_place)}
    if names and names <= {section.name for section in fields(Config)}:
        raise ConfigError("it is a flowcorr recipe already; flowcorr train takes it")
    if not names & known:
        raise ConfigError(f"it holds no key of verl-omni (it has: {', '.join(sorted(names)) or 'nothing'})")


def _hydra(text: str) -> dict[str, Any]:
    """A Hydra configuration, resolved; values that cannot be resolved are left out."""
    try:
        config = OmegaConf.create(text)
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(f"is not a Hydra YAML: {' '.join(str(error).split())}") from None
    if not isinstance(config, DictConfig):
        raise ConfigError("is not a Hydra YAML: it must hold sections of keys")
    config.pop("defaults", None)
    return _resolved(config)


def _resolved(config: DictConfig) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key in config:
        try:
            value = config[key]
        except OmegaConfBaseException:
            continue
        if isinstance(value, DictConfig):
            value = _resolved(value)
        elif isinstance(value, ListConfig):
            value = OmegaConf.to_container(value)
        values[str(key)] = value
    return values


def _parsed(text: str) -> Any:
    try:
        return yaml_text.parse(text)
    except ConfigError:
        return text


def _flat(mapping: dict[str, Any], keep: Sequence[str], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value and name not in keep:
            flat |= _flat(value, keep, f"{name}.")
        elif key != "_target_":
            flat[name] = value
    return flat
