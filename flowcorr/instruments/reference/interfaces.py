"""What a loop or an extension of the user's own fills in, read from docstrings and signatures."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from flowcorr.config import Engine
from flowcorr.correction import Mode, compute_rollout_correction_and_rejection_mask
from flowcorr.instruments.metrics import Metric, Rule
from flowcorr.instruments.reference.keys import meanings_of
from flowcorr.losses import Loss
from flowcorr.models.base import ModelFamily
from flowcorr.rewards import Reward
from flowcorr.rollout.base import RolloutEngine

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
    return f"`{getattr(value, '__name__', value)!s}`" if callable(value) else f"`{value!r}`"


INTERFACES: dict[str, Callable[[], Iterator[Row]]] = {
    "call": lambda: arguments(compute_rollout_correction_and_rejection_mask),
    "loss": lambda: fields(Loss),
    "mode": lambda: fields(Mode),
    "engine": lambda: fields(Engine),
    "engine_methods": lambda: members(RolloutEngine),
    "family": lambda: members(ModelFamily),
    "metric": lambda: fields(Metric),
    "rule": lambda: fields(Rule),
    "reward": lambda: members(Reward),
}
"""Tables of `examples/README.md`, by the name in their marker."""
