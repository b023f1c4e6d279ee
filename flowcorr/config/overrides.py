"""Applies overrides to a recipe, with their effects on other keys."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from flowcorr.config import yaml_text
from flowcorr.config.older_verl import FLAT_KEYS
from flowcorr.config.rules import warn_of_other_scale, warn_of_replaced_keys
from flowcorr.errors import ConfigError
from flowcorr.private import REDACTED, names_secret, redact

_CORRECTION = "algorithm.rollout_correction"
_INTERPOLATION = re.compile(r"(?<!\\)(?:\\\\)*\$\{")
_MAX_INTERPOLATIONS = 24  # each value may use others, so the text that they make grows exponentially


def resolved(config: DictConfig, overrides: Sequence[str]) -> dict[str, Any]:
    """The plain values of a recipe with its overrides applied and its interpolations resolved.

    Args:
        config: the recipe.
        overrides: `dotted.key=value` strings, see `flowcorr.config.load`.

    Raises:
        ConfigError: an override has another form or cannot be set, or an interpolation cannot be resolved.

    Warns:
        UserWarning: a preset takes the place of keys of the recipe.
    """
    recipe = OmegaConf.to_container(config)
    texts = [text for text in yaml_text.leaves(recipe) if isinstance(text, str)]
    num_interpolations = sum(len(_INTERPOLATION.findall(text)) for text in (*texts, *overrides))
    if num_interpolations > _MAX_INTERPOLATIONS:
        raise ConfigError(
            f"{num_interpolations} interpolations ${{...}} are more than the {_MAX_INTERPOLATIONS} that a recipe may "
            "hold; write their values out"
        )
    _give_way_to_preset(config, overrides)
    _check_blanks(overrides)
    for override in overrides:
        _override(config, override)
    warn_of_other_scale(recipe, OmegaConf.to_container(config))
    try:
        values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key or 'a value'} cannot be resolved: {reason_of(error)}") from None
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def redact_override(override: str) -> str:
    """Redact an override `key=value` to `key=***` if its value holds a secret, see `redact`."""
    key, _, text = override.partition("=")
    try:
        values = {key.strip().rpartition(".")[2]: text, "": yaml_text.parse(text)}
        hidden = redact(values) != values
    except ConfigError:
        hidden = names_secret(override)
    return f"{key}={REDACTED}" if hidden else override


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
        raise ConfigError(f"{redact_override(override)} cannot be set: {reason_of(error)}") from None
    except (TypeError, ValueError):
        raise ConfigError(
            f"{redact_override(override)} cannot be set: its key names an entry of a list by a word; entries are "
            "counted from 0, as in reward.terms[0].weight=1"
        ) from None


def _give_way_to_preset(config: DictConfig, overrides: Sequence[str]) -> None:
    """Empty the recipe's section of rollout correction if an override names a preset."""
    given = [override.partition("=") for override in overrides]
    chosen = [text.strip() for key, _, text in given if key.strip() == f"{_CORRECTION}.preset"]
    algorithm = OmegaConf.select(config, "algorithm")
    if not chosen or chosen[-1] in ("", "null") or not isinstance(algorithm, DictConfig):
        return
    section = OmegaConf.select(config, _CORRECTION)
    said = dict(section) if isinstance(section, DictConfig) else {}
    said |= {key: algorithm.pop(key) for key in FLAT_KEYS if key in algorithm}  # those of older dialects
    warn_of_replaced_keys(said, chosen[-1])
    if isinstance(section, DictConfig):
        OmegaConf.update(config, _CORRECTION, {}, merge=False)


def created(values: Mapping[Any, Any]) -> DictConfig:
    """Plain values as OmegaConf holds them, with interpolations that are not resolved yet.

    Raises:
        ConfigError: a key, or an interpolation, cannot be read.
    """
    try:
        return OmegaConf.create(dict(values))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key or 'a key'} cannot be read: {reason_of(error)}") from None


def reason_of(error: Exception) -> str:
    """The first line of OmegaConf's message; the others name the key once more."""
    return str(getattr(error, "msg", None) or error).partition("\n")[0]
