"""`flowcorr translate`: turns the resolved configuration of another trainer into a recipe."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowcorr.config import Config, to_mapping
from flowcorr.config.load import load_text
from flowcorr.config.overrides import redact_override
from flowcorr.config.text_file import read_text
from flowcorr.errors import ConfigError
from flowcorr.translate import flow_factory, flow_grpo, unresolved, verl_omni
from flowcorr.translate.recipe import recipe_text
from flowcorr.translate.resolved import read_overrides, read_sections, resolved
from flowcorr.translate.table import Table, Translation, covers, set_values, translate_values

__all__ = ["translate"]

_SIGNS = {
    "actor_rollout_ref": verl_omni.TABLE,
    "model.model_name_or_path": flow_factory.TABLE,
    "pretrained.model": flow_grpo.TABLE,
}
"""A key that only one trainer has."""


def translate(
    source: str, overrides: Sequence[str] = (), *, gpus: int | None = None, all_keys: bool = False
) -> str:
    """Translate a configuration of another trainer into the text of a recipe.

    Args:
        source: what Hydra prints or saves for verl-omni, the JSON of flow_grpo's configuration, a YAML of Flow-Factory,
            or the `config.yaml` that W&B keeps of a run of one of them.
        overrides: changes of it, `dotted.key=value`.
        gpus: number of GPUs of a flow_grpo run.
        all_keys: list all keys that are not carried over, also those that change nothing.

    Warns of each override from which no line of the recipe follows.

    Raises:
        ConfigError: the file cannot be read, or flowcorr cannot run its configuration; the message says why.
    """
    try:
        text = _translated(source, overrides, gpus, all_keys)
        _check(text)
    except ConfigError as error:
        raise ConfigError(" ".join(f"{error} ({source} cannot be translated)".split())) from None
    return text


def _check(text: str) -> None:
    """Check that a recipe loads."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load_text(text)
    except ConfigError as error:
        raise ConfigError(f"the recipe that it becomes cannot be loaded: {error}") from None


def _translated(source: str, overrides: Sequence[str], gpus: int | None, all_keys: bool) -> str:
    name, _, function = source.partition(".py:")
    path = Path(f"{name}.py" if function else name)
    if not os.path.isfile(path):
        raise ConfigError("no such file; give a resolved configuration, as YAML or JSON")
    text = read_text(path)
    if path.suffix == ".py":
        raise ConfigError(unresolved.of_python(path, function, text))
    sections = read_sections(text)
    if sections is None:
        raise ConfigError(unresolved.of_script(path, text))
    table, origin = _table(sections), path.name
    changed = read_overrides(overrides)
    values = resolved(sections, changed)
    if table is flow_grpo.TABLE:
        values = flow_grpo.with_script(values, path.stem, gpus)
        changed.pop("script", None)  # its line is the recipe's first
        origin = f"{origin}, as scripts/{values['script']} runs it"
    elif gpus is not None:
        raise ConfigError(f"--gpus {gpus} belongs to a configuration of flow_grpo; leave it out")
    translation = translate_values(values, table)
    _warn_of_overrides(changed, translation)
    return recipe_text(translation, f"{origin} ({table.name})", all_keys=all_keys)


def _table(sections: Mapping[str, Any]) -> Table:
    """Find the table of the trainer that a configuration belongs to."""
    keys = {
        *sections,
        *(f"{name}.{key}" for name, part in sections.items() if isinstance(part, dict) for key in part),
    }
    for sign, table in _SIGNS.items():
        if sign in keys:
            return table
    ours = to_mapping(Config())
    if all(
        isinstance(part, dict) and part.keys() <= ours.get(name, {}).keys() for name, part in sections.items()
    ):
        raise ConfigError("it is a flowcorr recipe already; flowcorr train takes it")
    raise ConfigError(
        f"it holds no key of verl-omni, flow_grpo or Flow-Factory (it has: {', '.join(sorted(map(str, sections)))})"
    )


def _warn_of_overrides(changed: Mapping[str, Any], translation: Translation) -> None:
    """Warn of each override from which no line of the recipe follows: its key may be mistyped."""
    for key, value in set_values(changed):
        inside = any(source.startswith(f"{key}.") for source in translation.sources)
        if not covers(translation.sources, key) and not inside:
            warnings.warn(
                f"no line of the recipe follows from {redact_override(f'{key}={value}')}; check the key, and the "
                "recipe's last comments",
                UserWarning,
                stacklevel=2,
            )
