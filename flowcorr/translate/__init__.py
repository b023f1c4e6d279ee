"""`flowcorr translate`: turns the configuration of another trainer into a recipe."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from flowcorr.config import Config
from flowcorr.config.load import load_text
from flowcorr.config.text_file import read_text
from flowcorr.errors import ConfigError
from flowcorr.translate import flow_grpo, verl_omni
from flowcorr.translate.hydra import flat, read_override, read_yaml, resolved
from flowcorr.translate.python_config import read_config, read_functions
from flowcorr.translate.recipe import recipe_text
from flowcorr.translate.shell import read_command
from flowcorr.translate.table import translate_values
from flowcorr.translate.unread import Unread

__all__ = ["translate"]

_MODULE, _FUNCTIONS = "verl_omni.trainer.main_", "reward.reward_functions"


def translate(source: str, overrides: Sequence[str] = (), *, gpus: int | None = None) -> str:
    """Translate a configuration of another trainer into the text of a recipe.

    Args:
        source: a shell script or Hydra YAML of verl-omni, or `FILE.py:FUNCTION` of flow_grpo.
        overrides: more overrides, `dotted.key=value`.
        gpus: number of GPUs of a flow_grpo run, if its file does not define `gpu_number`.

    Raises:
        ConfigError: the file cannot be read, or flowcorr cannot run its configuration; the message says why.
    """
    name, _, function = source.partition(".py:") if ".py:" in source else (source, "", "")
    path = Path(f"{name}.py" if function else name)
    if not os.path.isfile(path):
        raise ConfigError(
            f"{path}: no such file; give a shell script, a Hydra YAML, or FILE.py:FUNCTION of flow_grpo"
        )
    try:
        if path.suffix == ".py":
            text = _of_flow_grpo(path, function, overrides, gpus)
        elif gpus is None:
            text = _of_verl_omni(path, overrides)
        else:
            raise ConfigError(f"--gpus {gpus} belongs to a file of flow_grpo; leave it out")
        _check(text)
    except ConfigError as error:
        raise ConfigError(" ".join(f"{error} ({source} cannot be translated)".split())) from None
    return text


def _check(text: str) -> None:
    """Refuse a recipe that does not load."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load_text(text)
    except ConfigError as error:
        raise ConfigError(f"the recipe that it becomes cannot be loaded: {error}") from None


def _of_flow_grpo(path: Path, function: str, overrides: Sequence[str], gpus: int | None) -> str:
    if not function:
        names = ", ".join(read_functions(path))
        raise ConfigError(f"choose one of its configurations, as {path}:NAME; it has {names}")
    config, names_there = read_config(path, function)
    given = dict(flat(config, keep=("reward_fn",)))
    given |= {key.removeprefix("config."): value for key, value in map(read_override, overrides)}
    given["gpus"] = names_there.get("gpu_number") if gpus is None else gpus
    return recipe_text(translate_values(given, flow_grpo.TABLE), f"{path.name}:{function} (flow_grpo)")


def _of_verl_omni(path: Path, overrides: Sequence[str]) -> str:
    text = read_text(path)
    if path.suffix in (".yaml", ".yml"):
        given = read_yaml(text, keep=(_FUNCTIONS,))
        words: Sequence[str | Unread] = ()
        not_read: Sequence[str] = ()
    else:
        command = read_command(text, _MODULE)
        given, words, not_read = {"main": command.module}, command.words, command.not_read
    given |= dict(map(read_override, (*words, *overrides)))
    given = resolved(given)
    if "main" not in given:
        _check_sections({key.partition(".")[0] for key in given})
    given = _gathered(given, _FUNCTIONS)
    return recipe_text(translate_values(given, verl_omni.TABLE), f"{path.name} (verl-omni)", not_read)


def _gathered(given: Mapping[str, Any], section: str) -> dict[str, Any]:
    """The values with all keys `SECTION.NAME.ENTRY` as one section of sections."""
    rest = {key: value for key, value in given.items() if not key.startswith(f"{section}.")}
    for key in [key for key in given if key not in rest]:
        name, _, entry = key.removeprefix(f"{section}.").partition(".")
        if not entry:
            raise ConfigError(f"{key}={given[key]} must be a section of keys")
        functions = rest.setdefault(section, {})
        if isinstance(functions, dict) and isinstance(functions.setdefault(name, {}), dict):
            functions[name][entry] = given[key]
    return rest


def _check_sections(names: set[str]) -> None:
    """Refuse a YAML file that is not of verl-omni, by the names of its sections."""
    known = {key.partition(".")[0] for key in (*verl_omni.TABLE.defaults, *verl_omni.TABLE.no_place)}
    if names and names <= {section.name for section in fields(Config)}:
        raise ConfigError("it is a flowcorr recipe already; flowcorr train takes it")
    if not names & known:
        raise ConfigError(f"it holds no key of verl-omni (it has: {', '.join(sorted(names)) or 'nothing'})")
