"""`flowcorr translate`: turns the configuration of another trainer into a recipe."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowcorr.config import Config, to_mapping, yaml_text
from flowcorr.config.load import load_text
from flowcorr.config.text_file import read_text
from flowcorr.errors import ConfigError
from flowcorr.plan.preflight import check_settings
from flowcorr.translate import flow_factory, flow_grpo, verl_omni
from flowcorr.translate.hydra import check_defaults, flat, overridden, read_overrides, resolved
from flowcorr.translate.python_config import read_config, read_functions
from flowcorr.translate.recipe import recipe_text
from flowcorr.translate.shell import read_command
from flowcorr.translate.table import Table, Translation, check_required, translate_values
from flowcorr.translate.trainers import other_trainer
from flowcorr.translate.unread import Unread
from flowcorr.translate.verl_omni_defaults import OF_A_FILE

__all__ = ["translate"]

_MODULE = "verl_omni.trainer.main_"


def translate(source: str, overrides: Sequence[str] = (), *, gpus: int | None = None) -> str:
    """Translate a configuration of another trainer into the text of a recipe.

    Args:
        source: a shell script or Hydra YAML of verl-omni, a YAML of Flow-Factory, or `FILE.py:FUNCTION` of flow_grpo.
        overrides: more overrides, `dotted.key=value`.
        gpus: number of GPUs of a flow_grpo run, if its file does not define `gpu_number`.

    Warns of each override from which no line of the recipe follows.

    Raises:
        ConfigError: the file cannot be read, or flowcorr cannot run its configuration; the message says why.
    """
    name, _, function = source.partition(".py:") if ".py:" in source else (source, "", "")
    path = Path(f"{name}.py" if function else name)
    if not os.path.isfile(path):
        raise ConfigError(
            f"{path}: no such file; give a shell script, a YAML file, or FILE.py:FUNCTION of flow_grpo"
        )
    try:
        if path.suffix == ".py":
            text = _of_flow_grpo(path, function, overrides, gpus)
        elif gpus is not None:
            raise ConfigError(f"--gpus {gpus} belongs to a file of flow_grpo; leave it out")
        elif path.suffix in (".yaml", ".yml"):
            text = _of_yaml(path, overrides)
        else:
            text = _of_script(path, overrides)
        _check(text)
    except ConfigError as error:
        raise ConfigError(" ".join(f"{error} ({source} cannot be translated)".split())) from None
    return text


def _check(text: str) -> None:
    """Refuse a recipe that does not load, or that no run would take."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check_settings(load_text(text))
    except ConfigError as error:
        raise ConfigError(f"the recipe that it becomes cannot be loaded: {error}") from None


def _of_flow_grpo(path: Path, function: str, overrides: Sequence[str], gpus: int | None) -> str:
    if not function:
        names = ", ".join(read_functions(path))
        raise ConfigError(f"choose one of its configurations, as {path}:NAME; it has {names}")
    config, names_there = read_config(path, function)
    table = flow_grpo.TABLE
    keep = (*table.sections, *(f"config.{section}" for section in table.sections))
    changed = {key.removeprefix("config."): value for key, value in read_overrides(overrides, keep).items()}
    given = overridden(dict(flat(config, table.sections)), changed)
    given["gpus"] = names_there.get("gpu_number") if gpus is None else gpus
    script = flow_grpo.as_script(given, function)
    origin = f"{path.name}:{function} ({table.name}, as scripts/{script} runs it)"
    return _recipe({**given, flow_grpo.SCRIPT: script}, table, origin, changed)


def _of_yaml(path: Path, overrides: Sequence[str]) -> str:
    config = yaml_text.parse_older(read_text(path))
    if not isinstance(config, dict) or not config:
        raise ConfigError("it is no configuration of a trainer: that holds sections of keys")
    names = {str(name) for name in config}
    if _is_recipe(config):
        raise ConfigError("it is a flowcorr recipe already; flowcorr train takes it")
    model, train = config.get("model"), config.get("train")
    if isinstance(train, dict) and isinstance(model, dict) and "model_name_or_path" in model:
        table = flow_factory.TABLE
        changed = read_overrides(overrides, table.sections)
        given = overridden(dict(flat(config, table.sections)), changed)
        return _recipe(given, table, f"{path.name} ({table.name})", changed)
    known = {key.partition(".")[0] for key in verl_omni.TABLE.defaults}
    if not names & known:
        raise ConfigError(
            f"it holds no key of verl-omni or Flow-Factory (it has: {', '.join(sorted(names))})"
        )
    check_defaults(config)
    given, changed = dict(flat(config)), read_overrides(overrides)
    check_required(overridden(given, changed), OF_A_FILE, "verl-omni's diffusion trainer")
    return _of_verl_omni(given, path, changed)


def _is_recipe(config: Mapping[str, Any]) -> bool:
    """Whether all keys are those of a recipe."""
    ours = to_mapping(Config())
    return all(
        name in ours and isinstance(section, dict) and section.keys() <= ours[name].keys()
        for name, section in config.items()
    )


def _of_script(path: Path, overrides: Sequence[str]) -> str:
    text = read_text(path)
    if _MODULE not in text and (reason := other_trainer(text)):
        raise ConfigError(reason)
    command = read_command(text, _MODULE)
    given = {"main": command.module} | read_overrides(command.words)
    return _of_verl_omni(given, path, read_overrides(overrides), command.not_read)


def _of_verl_omni(
    given: Mapping[str, Any], path: Path, changed: Mapping[str, Any], not_read: Sequence[str] = ()
) -> str:
    values = {
        key: _file_name(value) if key.endswith(".path") else value
        for key, value in resolved(overridden(given, changed)).items()
    }
    table = verl_omni.TABLE
    return _recipe(values, table, f"{path.name} ({table.name})", changed, not_read)


def _recipe(
    given: Mapping[str, Any],
    table: Table,
    origin: str,
    changed: Mapping[str, Any],
    not_read: Sequence[str] = (),
) -> str:
    """The recipe of the `given` values, among them those that overrides `changed`."""
    for section in table.sections:
        given = _gathered(given, section)
    translation = translate_values(given, table)
    _warn_of_overrides(changed, translation, table)
    return recipe_text(translation, origin, not_read)


def _warn_of_overrides(changed: Mapping[str, Any], translation: Translation, table: Table) -> None:
    """Warn of each override from which no line of the recipe follows: its key may be mistyped."""
    for key, value in changed.items():
        whole = next((section for section in table.sections if key.startswith(f"{section}.")), key)
        if whole not in translation.sources:
            warnings.warn(
                f"no line of the recipe follows from {key}={value}; check the key, and the recipe's last comments",
                UserWarning,
                stacklevel=2,
            )


def _file_name(value: Any) -> Any:
    """Of a file in a folder that is not known, what is known; its name is enough."""
    found = re.fullmatch(r"\$\{?\w+\}?/([\w./-]+\.py)", str(value)) if isinstance(value, Unread) else None
    return value if found is None else found[1]


def _gathered(given: Mapping[str, Any], section: str) -> dict[str, Any]:
    """The values with all keys `SECTION.NAME.ENTRY` as one section of sections."""
    rest = {key: value for key, value in given.items() if not key.startswith(f"{section}.")}
    for key in [key for key in given if key not in rest]:
        *sections, name = key.removeprefix(f"{section}.").split(".")
        place = rest.setdefault(section, {})
        for part in sections:
            place = place.setdefault(part, {}) if isinstance(place, dict) else None
        if not isinstance(place, dict):
            raise ConfigError(
                f"{key}={given[key]} lies in {section}, which is no section of keys; give all of {section} instead"
            )
        place[name] = given[key]
    return rest
