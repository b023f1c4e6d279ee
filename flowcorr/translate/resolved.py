"""Reads configurations that another trainer has resolved: Hydra's, W&B's, JSON, or the output of a script with one.

Nothing is executed, and no variable of the environment is read: of OmegaConf's references, only those to other keys of
the file are replaced. A value that cannot be replaced keeps its `${...}`, and is refused where a line needs it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from flowcorr.config import yaml_text
from flowcorr.config.load import without_interpolation
from flowcorr.config.overrides import created, reason_of, redact_override
from flowcorr.config.yaml_text import MAX_LEVELS, MAX_VALUES
from flowcorr.errors import ConfigError

_ROOT = "actor_rollout_ref:"
_SECTION = re.compile(r"'?[a-z_][a-z0-9_]*'?:( \S+)?\s*$")
_INSIDE = re.compile(r"\s+\S|- |\s*$")
_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?[\w./\-\[\] ]+(?:,[^${}]*)?\}")
_OVERRIDE = re.compile(r"\+{0,2}(\w[\w/-]*(?:\.[\w/-]+)*)=(.*)", re.DOTALL)
_SCRIPT = re.compile(
    r"^#!|^set -|^[ \t]*(export |python3? |accelerate |torchrun |bash |ff-train )", re.MULTILINE
)
_OF_WANDB = ("_wandb", "wandb_version")
_CHOSEN = ("reward_fn", "rewards", "eval_rewards", "reward.reward_functions")
"""Sections of names that the user chooses; an override of one replaces it."""
_MAX_JOINED = 24


def printed_by(script: Path | str) -> str:
    """The command that writes the resolved configuration of a script that hands its arguments on to Hydra."""
    return f"bash {script} --cfg job --resolve > resolved.yaml"


def read_sections(text: str) -> dict[str, Any] | None:
    """Read the sections of a configuration file, with references unresolved; None if the text is a script.

    Raises:
        ConfigError: it is no configuration, or one that takes values from other files.
    """
    if any(line.startswith(_ROOT) for line in text.split("\n")):
        text = _printed_block(text)
    elif _SCRIPT.search(text):
        return None
    values = yaml_text.parse_older(text)
    if not isinstance(values, dict) or not values:
        raise ConfigError("it is no configuration of a trainer: that holds sections of keys")
    if any(name in values for name in _OF_WANDB):
        values = {
            name: part["value"] for name, part in values.items() if name not in _OF_WANDB and "value" in part
        }
    if values.pop("defaults", None) not in (None, [], ["_self_"]):
        raise ConfigError(
            "it takes values from other files by its list defaults; translate the config.yaml that Hydra saves with a "
            f"run, under .hydra, or let Hydra print it: {printed_by('run.sh')}"
        )
    return values


def _printed_block(text: str) -> str:
    """The configuration in the output of a script, which may print other lines before and after it.

    Raises:
        ConfigError: there are several, or lines of something else are between its own.
    """
    lines = text.replace("\r\n", "\n").split("\n")
    roots = [number for number, line in enumerate(lines) if line.startswith(_ROOT)]
    if len(roots) > 1:
        raise ConfigError(
            f"lines {', '.join(str(root + 1) for root in roots)} all begin a configuration; leave the one to translate"
        )
    first, last = roots[0], roots[0] + 1
    while first and (_SECTION.match(lines[first - 1]) or _INSIDE.match(lines[first - 1])):
        first -= 1
    while first < roots[0] and not _SECTION.match(lines[first]):  # the end of what the script printed before
        first += 1
    while last < len(lines) and (_SECTION.match(lines[last]) or _INSIDE.match(lines[last])):
        last += 1
    for number, line in enumerate(lines[last:], last):
        if re.match(r"\s+['\w]+:(\s|$)", line) or _SECTION.match(line):
            raise ConfigError(
                f"line {last + 1}, {lines[last][:60]!r}, stands inside the configuration, which goes on in line "
                f"{number + 1}; leave out all lines that the script itself prints"
            )
    return "\n".join(lines[first:last])


def read_overrides(words: Sequence[str]) -> dict[str, Any]:
    """The values of `key=value`, `+key=value` or `++key=value` by their dotted keys; the last of a key counts."""
    changed: dict[str, Any] = {}
    for word in words:
        match = _OVERRIDE.fullmatch(word)
        if match is None:
            chooses = " chooses other defaults, which are not read" if word.startswith("--config") else ""
            raise ConfigError(
                f"the argument {word!r}{chooses or ' is not read, only key=value'}; leave it out, or let Hydra print "
                f"what it makes: {printed_by('run.sh')}"
            )
        changed.pop(match[1], None)  # so that a section and a key in it count in their order
        try:
            changed[match[1]] = yaml_text.parse(match[2])
        except ConfigError:
            changed[match[1]] = match[2]
    return changed


def resolved(values: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """The sections with overrides, and with the references `${key}` and `${oc.select:key,default}` replaced.

    Raises:
        ConfigError: an override cannot be set, or the references make more values than a configuration can need.
    """
    config = created(values)
    for key, value in changed.items():
        try:
            OmegaConf.update(config, key, value, merge=value != {} and key not in _CHOSEN)
        except (OmegaConfBaseException, IndexError, ValueError) as error:
            shown = redact_override(f"{key}={value}")
            raise ConfigError(f"{shown} cannot be set: {reason_of(error)}") from None
    counts = [0, 0]
    config = created(_other_references_as_text(OmegaConf.to_container(config), counts))
    if counts[1] > _MAX_JOINED:
        raise ConfigError(
            f"{counts[1]} references inside text are more than {_MAX_JOINED}; write their values out"
        )
    return _plain(config, counts)


def _other_references_as_text(value: Any, counts: list[int]) -> Any:
    """Escape references to anything but keys; adds the number of key references inside longer texts to `counts`."""
    if isinstance(value, dict):
        return {name: _other_references_as_text(part, counts) for name, part in value.items()}
    if isinstance(value, list):
        return [_other_references_as_text(part, counts) for part in value]
    if not isinstance(value, str) or "${" not in value:
        return value
    if "\\" in value or "${" in _REFERENCE.sub("", value):
        return without_interpolation(value)
    counts[1] += len(_REFERENCE.findall(value)) if _REFERENCE.fullmatch(value) is None else 0
    return value


def _plain(node: DictConfig | ListConfig, counts: list[int], level: int = 0) -> Any:
    """Plain data with references replaced; dangling ones stay. Adds the number of values to `counts`."""
    names = list(node) if isinstance(node, DictConfig) else range(len(node))
    resolved = {}
    for name in names:
        counts[0] += 1
        if counts[0] > MAX_VALUES or level > MAX_LEVELS:
            raise ConfigError(
                f"with its references it holds more than {MAX_VALUES} values, or {MAX_LEVELS} levels"
            )
        try:
            value = node[name]
        except OmegaConfBaseException:  # missing, or a reference that leads nowhere
            raw: Any = OmegaConf.to_container(node)
            value = raw[name]
        resolved[name] = (
            _plain(value, counts, level + 1) if isinstance(value, DictConfig | ListConfig) else value
        )
    return resolved if isinstance(node, DictConfig) else list(resolved.values())
