"""From the terms of a recipe to one reward: a weighted sum."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from flowcorr.errors import ConfigError, unknown_choice
from flowcorr.records import Prompt
from flowcorr.rewards.base import Reward, RewardOutput, as_reward_output
from flowcorr.rewards.jpeg import JpegCompressibility, JpegIncompressibility
from flowcorr.rewards.ocr import OcrReward

REWARDS: Mapping[str, Callable[..., Reward]] = {
    "ocr": OcrReward,
    "jpeg_compressibility": JpegCompressibility,
    "jpeg_incompressibility": JpegIncompressibility,
}


class Term(Protocol):
    """One term of a recipe's reward, as `flowcorr.config` reads it."""

    @property
    def name(self) -> str:
        """A key of `REWARDS`, or `package.module:name`."""

    @property
    def weight(self) -> float:
        """Its factor in the sum."""

    @property
    def options(self) -> Mapping[str, Any]:
        """Keyword arguments of the reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedSum:
    """`sum_k weight_k * reward_k`.

    One term keeps the names of its extras. With several, each extra is called `<label>_<extra>`, and the
    term's own score, before its weight, is logged as `<label>`.

    Attributes:
        labels: a short name for each term.
        weights: their weights.
        rewards: their rewards; may return plain sequences of numbers.
    """

    labels: tuple[str, ...]
    weights: tuple[float, ...]
    rewards: tuple[Callable[[np.ndarray, list[Prompt]], Any], ...]

    @property
    def name(self) -> str:
        """The labels of all terms, for messages."""
        return " + ".join(self.labels)

    def __call__(self, images: np.ndarray, prompts: list[Prompt]) -> RewardOutput:
        """Score images `[B, H, W, 3]` uint8."""
        outputs = [
            as_reward_output(self._score(label, reward, images, prompts), len(prompts), label)
            for label, reward in zip(self.labels, self.rewards, strict=True)
        ]
        scores = sum(
            (weight * output.scores for weight, output in zip(self.weights, outputs, strict=True)),
            start=np.zeros(len(prompts)),
        )
        return RewardOutput(scores=scores, extra=self._extras(outputs))

    def _score(
        self, label: str, reward: Callable[..., Any], images: np.ndarray, prompts: list[Prompt]
    ) -> Any:
        try:
            return reward(images, prompts)
        except Exception as error:
            if len(self.labels) > 1:
                error.add_note(f"from reward {label}")
            raise

    def _extras(self, outputs: Sequence[RewardOutput]) -> dict[str, np.ndarray]:
        if len(outputs) == 1:
            return dict(outputs[0].extra)
        extras: dict[str, np.ndarray] = {}
        for label, output in zip(self.labels, outputs, strict=True):
            extras[label] = output.scores
            extras.update({f"{label}_{key}": array for key, array in output.extra.items()})
        return extras


def build_reward(terms: Sequence[Term]) -> WeightedSum:
    """The reward of a recipe, the weighted sum of its terms.

    A term's name is a key of `REWARDS`, or `package.module:name` for a user's own: a function is called as
    `name(images, prompts, **options)`, a class is built with `name(**options)` and its instance called as
    `instance(images, prompts)`. Either returns `[B]` numbers or a `RewardOutput`.

    Raises:
        ConfigError: an unknown name, an option that the reward does not take, two terms of one name.
        MissingExtraError: a reward needs a package that is not installed.
    """
    labels = tuple(term.name.rpartition(":")[2] for term in terms)
    repeated = [label for label in labels if labels.count(label) > 1]
    if repeated:
        raise ConfigError(
            f"reward.terms has several terms named {repeated[0]!r}; give each name once, with one weight"
        )
    return WeightedSum(
        labels=labels,
        weights=tuple(float(term.weight) for term in terms),
        rewards=tuple(_build_term(term) for term in terms),
    )


def _build_term(term: Term) -> Callable[..., Any]:
    if ":" in term.name:
        return _users_own(term)
    if term.name not in REWARDS:
        raise ConfigError(unknown_choice("reward.terms.name", term.name, [*REWARDS, "package.module:name"]))
    factory = REWARDS[term.name]
    _check_options(term, factory)
    return factory(**term.options)


def _users_own(term: Term) -> Callable[..., Any]:
    target = _import_target(term.name)
    if inspect.isclass(target):
        _check_options(term, target)
        target = target(**term.options)
        options: Mapping[str, Any] = {}
    else:
        options = term.options
    if not callable(target):
        raise ConfigError(
            f"reward {term.name} is of type {type(target).__name__}; it must be a function or a class"
        )
    _check_call(term, target, options)
    return functools.partial(target, **options) if options else target


def _import_target(path: str) -> Any:
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, and lacks something that it imports itself
        raise ConfigError(
            f"reward {path}: there is no module {error.name!r} on the Python path; "
            "install it, or add its folder to PYTHONPATH"
        ) from error
    if not attribute or not hasattr(module, attribute):
        raise ConfigError(
            f"reward {path}: module {module_name} has no {attribute!r}; name a function or class of it"
        )
    return getattr(module, attribute)


def _check_options(term: Term, factory: Callable[..., Any]) -> None:
    signature = inspect.signature(factory)
    try:
        signature.bind(**term.options)
    except TypeError as error:
        takes = f"it takes {', '.join(signature.parameters) or 'none'}"
        raise ConfigError(
            f"reward {term.name} with options {dict(term.options)}: {error}; {takes}"
        ) from error


def _check_call(term: Term, target: Callable[..., Any], options: Mapping[str, Any]) -> None:
    try:
        inspect.signature(target).bind("images", "prompts", **options)
    except TypeError as error:
        given = ", ".join(["images", "prompts", *(f"{key}=..." for key in options)])
        raise ConfigError(f"reward {term.name} cannot be called as ({given}): {error}") from error
