"""The configuration of a run as its folder holds it. The run may be a stranger's: reading imports nothing."""

from __future__ import annotations

import contextlib
import os
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from flowcorr import config as configs
from flowcorr.config import yaml_text
from flowcorr.config.schema import Config
from flowcorr.config.text_file import read_text
from flowcorr.errors import ConfigError, nearest, printable
from flowcorr.imports import is_own_name

CONFIG_FILE = "config.yaml"
_INTERPOLATION = re.compile(r"(?<!\\)(\\\\)*\$\{")
LOSS, MODES, ENGINE = "actor.loss_mode", "algorithm.rollout_correction.rollout_rs", "rollout.name"
METRICS, CHECKS = "trainer.metrics", "trainer.checks"
_LOSS_KEYS = ("loss_mode", "loss_options")
_ENGINE_KEYS = ("name", "engine")
_MODE_KEYS = ("rollout_rs", "rollout_rs_threshold", "rollout_rs_threshold_lower")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The configuration of a run, read without importing code of its own.

    Attributes:
        config: the configuration. Where the run names a loss of its own that was not to be imported, the default loss
            stands in, which clips the ratio as a function of one's own is taken to; for rejection modes, no rejection;
            for an engine, `in_process`; for metrics and checks, none.
        values: all keys and their values as the run has them, also those that another value stands in for.
        left_out: the names of code that were not imported, by key: `actor.loss_mode`,
            `algorithm.rollout_correction.rollout_rs`, `rollout.name`, `trainer.metrics` and `trainer.checks`.
    """

    config: Config
    values: Mapping[str, Any]
    left_out: Mapping[str, str]

    @property
    def loss_mode(self) -> str:
        """The name of the run's own loss, imported or not."""
        return self.left_out.get(LOSS, self.config.actor.loss_mode)


def notes(left_out: Mapping[str, str]) -> list[str]:
    """A line for each key of `RunConfig.left_out`: the stand-in for its code, and the option that imports it."""
    stand_ins = {
        LOSS: "the ratio is taken to be clipped to actor.clip_ratio",
        MODES: "this run's own rejection is left out",
        ENGINE: "the run is read as one of rollout.name=in_process",
        METRICS: "they are not judged",
        CHECKS: "their answers are not judged",
    }
    return [
        f"{key}={name} is not imported: {stand_ins[key]}; {how_to_allow(name)}"
        for key, name in left_out.items()
    ]


def how_to_allow(chain: str) -> str:
    """The options that allow the code of a chain of names to be imported, in words."""
    return f"to import it, add {' '.join(f'--allow-import {name}' for name in own_names(chain))}"


def read_config(
    folder: Path, overrides: Sequence[str] = (), *, allow_imports: Collection[str] = ()
) -> RunConfig:
    """The configuration of the run in `folder`.

    Args:
        folder: the run's folder.
        overrides: `dotted.key=value` strings, see `config.load`.
        allow_imports: names of losses, rejection modes, engines and metrics of one's own, `package.module:name`, that
            may be imported.

    Raises:
        ConfigError: there is none, or it cannot be used; or a name of `allow_imports` cannot be imported.
    """
    path = folder / CONFIG_FILE
    check_folder(folder)
    if not is_file(path):
        raise ConfigError(
            f"{folder} holds no run: {CONFIG_FILE} is missing{near_run(folder)}; name a folder that flowcorr train "
            "wrote, its --out"
        )
    with configs.errors_name(path, overrides), _in_one_line(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # shown already when the run started
        _check_text(path)
        values_of_run = configs.read_mapping(path, overrides)
        values, left_out = _without_own_code(values_of_run, frozenset(allow_imports))
        config = configs.load_mapping(values)
    whole = configs.to_mapping(config)
    whole["actor"] |= left_out.get(LOSS, {})
    whole["rollout"] |= left_out.get(ENGINE, {})
    for key in left_out.keys() & {METRICS, CHECKS}:
        name = key.rpartition(".")[2]
        whole["trainer"][name] = values_of_run["trainer"][name]
    if MODES in left_out:
        whole["algorithm"]["rollout_correction"] |= left_out[MODES]
    names = {key: hidden[key.rpartition(".")[2]] for key, hidden in left_out.items()}
    return RunConfig(config=config, values=whole, left_out=names)


@contextlib.contextmanager
def _in_one_line() -> Iterator[None]:
    """Make the message of a `ConfigError` one line, with any names and values in it."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(printable(str(error))) from None


def imported_by_eval(config: Config) -> dict[str, str]:
    """The user's own rewards and model family that an evaluation has to import, by key."""
    reward = config.reward
    terms = {
        f"reward.{section}[{place}].name": term.name
        for section, listed in (("terms", reward.terms), ("gold", reward.gold))
        for place, term in enumerate(listed)
    }
    names = {"model.family": config.model.family} | terms
    return {key: name for key, name in names.items() if own_names(name)}


def own_names(chain: object) -> list[str]:
    """The names `package.module:name` in a name, or in names that are chained by commas."""
    parts = chain.split(",") if isinstance(chain, str) else []
    return [part.strip() for part in parts if ":" in part]


def near_run(path: Path) -> str:
    """A hint in brackets that names a run's folder near a path that is no run; empty without one."""
    beside = [file.parent.name for file in path.parent.glob(f"*/{CONFIG_FILE}")]
    places = (path.parent, Path("runs") / path, path.parent / nearest(path.name, beside))
    neighbour = next((place for place in places if os.path.isfile(place / CONFIG_FILE)), None)
    return f" (did you mean {neighbour}?)" if neighbour else ""


def is_file(path: Path) -> bool:
    """Whether there is such a file.

    Raises:
        ConfigError: its folder may not be looked into.
    """
    with _readable(path):
        return path.is_file()


def is_folder(path: Path) -> bool:
    """Whether there is such a folder.

    Raises:
        ConfigError: the folder that it lies in may not be looked into.
    """
    with _readable(path):
        return path.is_dir()


def check_folder(path: Path) -> None:
    """Check that there is a folder, before its contents are asked for.

    Raises:
        ConfigError: there is none, or a file in its place.
    """
    if not is_folder(path):
        problem = "is a file" if path.exists() else "does not exist"
        raise ConfigError(
            f"{path} {problem}{near_run(path)}; name a folder that flowcorr train or flowcorr.dump wrote"
        )


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error


def _without_own_code(
    values: Mapping[str, Any], allowed: frozenset[str]
) -> tuple[Mapping[str, Any], dict[str, dict[str, Any]]]:
    """The values without names of code that may not be imported, and the removed names by key."""
    left_out: dict[str, dict[str, Any]] = {}
    sections = ("actor", "algorithm", "rollout", "trainer")
    actor, algorithm, rollout, trainer = (values.get(section) for section in sections)
    for key in (METRICS, CHECKS):
        name = key.rpartition(".")[2]
        listed = trainer.get(name) if isinstance(trainer, Mapping) else None
        if isinstance(trainer, Mapping) and isinstance(listed, Sequence) and not isinstance(listed, str):
            refused = [path for path in listed if _is_refused(path, allowed)]
            if refused:
                left_out[key] = {name: ",".join(refused)}
                trainer = {**trainer, name: [path for path in listed if path not in refused]}
                values = {**values, "trainer": trainer}
    if isinstance(actor, Mapping) and _is_refused(actor.get("loss_mode"), allowed):
        left_out[LOSS] = {key: actor[key] for key in _LOSS_KEYS if key in actor}
        values = {**values, "actor": _without(_LOSS_KEYS, actor)}
    if isinstance(rollout, Mapping) and _is_refused(rollout.get("name"), allowed):
        left_out[ENGINE] = {key: rollout[key] for key in _ENGINE_KEYS if key in rollout}
        values = {**values, "rollout": _without(_ENGINE_KEYS, rollout)}
    if isinstance(algorithm, Mapping):
        section = algorithm.get("rollout_correction")
        # In an older dialect, the keys of the correction stand beside its section.
        for place in (algorithm, section):
            if isinstance(place, Mapping) and _is_refused(place.get("rollout_rs"), allowed):
                left_out[MODES] = {key: place[key] for key in _MODE_KEYS if key in place}
        if MODES in left_out:
            kept = _without(_MODE_KEYS, section if isinstance(section, Mapping) else {})
            algorithm = _without(_MODE_KEYS, algorithm) | {"rollout_correction": kept | {"rollout_rs": None}}
            values = {**values, "algorithm": algorithm}
    return values, left_out


def _is_refused(chain: object, allowed: frozenset[str]) -> bool:
    """Whether a chain holds a name of one's own that may not be imported."""
    names = own_names(chain)
    for name in names:
        if not is_own_name(name):
            raise ConfigError(f"{name!r} must be the name of code of one's own, package.module:name")
    return not allowed.issuperset(names)


def _without(keys: Collection[str], section: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in section.items() if key not in keys}


def _check_text(path: Path) -> None:
    """Raise if a file holds interpolations: flowcorr never writes them, and they can read the environment."""
    try:
        for token in yaml_text.scan(read_text(path)):
            if isinstance(token, yaml.ScalarToken) and _INTERPOLATION.search(token.value):
                line = token.start_mark.line + 1
                raise ConfigError(f"line {line} holds an interpolation, ${{...}}; write the value itself")
    except yaml.YAMLError:
        return  # reading the values says so
