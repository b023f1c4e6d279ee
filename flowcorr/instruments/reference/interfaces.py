"""Classes and functions that a user's loop or extension fills in, read from docstrings and signatures."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from pkgutil import resolve_name
from typing import Any

from flowcorr.instruments.reference.schema import meanings_of

Row = tuple[str, str, str]
"""Name, meaning, default; a default is empty where a value is required."""


def arguments(function: Callable[..., Any]) -> Iterator[Row]:
    """The arguments of a function."""
    meanings = meanings_of(function, "Args")
    for name, parameter in inspect.signature(function).parameters.items():
        yield name, meanings[name], _default(parameter.default, inspect.Parameter.empty)


def fields(record: type) -> Iterator[Row]:
    """The fields of a dataclass."""
    meanings = meanings_of(record)
    for field in dataclasses.fields(record):
        yield field.name, meanings[field.name], _default(field.default, dataclasses.MISSING)


def members(interface: type) -> Iterator[Row]:
    """The attributes that a class of this interface states, then the methods and properties that it has to have."""
    meanings = meanings_of(interface)
    for name in inspect.get_annotations(interface) or meanings:
        yield name, meanings[name], _default(getattr(interface, name, _REQUIRED), _REQUIRED)
    required = getattr(interface, "__abstractmethods__", None) or vars(interface)
    for name, member in vars(interface).items():
        if name not in required or name.startswith("_"):
            continue
        if inspect.isfunction(member) or isinstance(member, property):
            shown = name if isinstance(member, property) else f"{name}()"
            yield shown, (inspect.getdoc(member) or "").splitlines()[0], ""


_REQUIRED = object()


def _default(value: Any, required: Any) -> str:
    if value is required:
        return ""
    return str(getattr(value, "__name__", value)) if callable(value) else repr(value)


INTERFACES: Mapping[str, Callable[[Any], Iterator[Row]]] = {
    "flowcorr.correction.compute_rollout_correction_and_rejection_mask": arguments,
    "flowcorr.losses.Loss": fields,
    "flowcorr.correction.Mode": fields,
    "flowcorr.config.Engine": fields,
    "flowcorr.rollout.base.RolloutEngine": members,
    "flowcorr.models.base.ModelFamily": members,
    "flowcorr.health.Metric": fields,
    "flowcorr.health.Rule": fields,
    "flowcorr.health.Units": fields,
    "flowcorr.questions.question.Question": fields,
    "flowcorr.rewards.Reward": members,
}
"""By the name to import, the reader of its rows."""


def rows_of(name: str) -> Iterator[Row]:
    """The rows of an interface, which is imported for that."""
    return INTERFACES[name](resolve_name(name))


def find_interface(name: str) -> str | None:
    """The full name of an interface, from that name or its last part."""
    return next((full for full in INTERFACES if name in (full, full.rpartition(".")[2])), None)
