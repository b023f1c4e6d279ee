"""Builds the reward of a recipe: a weighted sum of its terms, and held-out rewards that are not optimised."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flowcorr.config.task import RewardTerm
from flowcorr.errors import BackendError, ConfigError, unknown_choice
from flowcorr.imports import import_target
from flowcorr.records import ImageArray, Prompt
from flowcorr.rewards.aesthetic import Aesthetic
from flowcorr.rewards.base import Reward, RewardOutput, as_reward_output
from flowcorr.rewards.frames import score_videos
from flowcorr.rewards.http import HttpReward
from flowcorr.rewards.jpeg import JpegCompressibility, JpegIncompressibility
from flowcorr.rewards.ocr import OcrReward
from flowcorr.rewards.pickscore import PickScore
from flowcorr.rewards.reference_similarity import ReferenceSimilarity
from flowcorr.rewards.slow import reported_when_slow
from flowcorr.rewards.vlm_judge import VlmJudge

REWARDS: Mapping[str, Callable[..., Reward]] = {
    "ocr": OcrReward,
    "jpeg_compressibility": JpegCompressibility,
    "jpeg_incompressibility": JpegIncompressibility,
    "pickscore": PickScore,
    "aesthetic": Aesthetic,
    "reference_similarity": ReferenceSimilarity,
    "vlm_judge": VlmJudge,
    "http": HttpReward,
}

GOLD = "gold/"
IMAGE_STATISTICS = ("dark", "saturated", "contrast", "sharpness", "bits_per_pixel", "motion", "diversity")
BUILT_IN_METRICS = frozenset(
    {
        *("reward", "reward_std", "scored_images"),  # eval/
        *(
            "mean",
            "std",
            "min",
            "max",
            "failed_samples",
            "zero_std_group_fraction",
            "learned_advantage",
        ),  # reward/
        *(f"image/{name}" for name in IMAGE_STATISTICS),
    }
)
"""Names under `reward/` and `eval/` that every run logs; no score of a reward may have one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorer:
    """The reward of one term.

    Attributes:
        label: its short name; that of a held-out reward begins with `gold/`.
        reward: scores images; it may return a plain sequence of numbers.
        weight: of its scores in the sum; 0 if it is held out.
        tags: tags of the prompts that it scores, empty for all; its scores of other prompts are NaN.
        frames: the rule by which a reward of images gets the frames of videos.
    """

    label: str
    reward: Callable[[ImageArray, list[Prompt]], Any]
    weight: float = 1.0
    tags: Sequence[str] = ()
    frames: str = "middle"

    @property
    def is_gold(self) -> bool:
        """Whether its scores are only logged."""
        return self.label.startswith(GOLD)

    def reads(self, prompt: Prompt) -> bool:
        """Whether it scores images of this prompt."""
        return not self.tags or prompt.tag in self.tags


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedSum:
    """`sum_k weight_k * reward_k`, over the terms that score the sample's prompt.

    One term keeps the names of its extras. With several, each extra is called `<label>_<extra>`, and the
    term's own score, before its weight, is logged as `<label>`. A sample that any of them cannot score has failed, so
    that all are compared on the same samples.

    Attributes:
        scorers: of each term, and of each held-out reward.
        timeout: seconds after which the log says which reward is still computing; None never says so.

    Raises:
        ConfigError: a score would be logged under the name of another metric: a label, or, when called, an extra.
    """

    scorers: tuple[Scorer, ...]
    timeout: float | None = None

    def __post_init__(self) -> None:
        for scorer in self.scorers:
            label = scorer.label
            if label in BUILT_IN_METRICS and not self._is_lone(scorer):
                raise ConfigError(
                    f"reward.terms has a term {label!r}, whose score would be logged as reward/{label}, a metric of "
                    "every run; rename the function or class"
                )

    @property
    def name(self) -> str:
        """The labels of all terms, for messages."""
        return " + ".join(scorer.label for scorer in self.scorers)

    @property
    def overlaps(self) -> bool:
        """Whether every term may score parts of a batch, in a thread that runs during sampling."""
        return all(getattr(scorer.reward, "overlaps", False) for scorer in self.scorers)

    def __call__(self, images: ImageArray, prompts: list[Prompt]) -> RewardOutput:
        """Score the images of `B` prompts."""
        outputs: list[RewardOutput] = []
        scores = np.zeros(len(prompts))
        for scorer in self.scorers:
            rows = np.flatnonzero([scorer.reads(prompt) for prompt in prompts])
            own = self._score_rows(scorer, images, prompts, rows)
            with np.errstate(invalid="ignore"):  # 0 * inf: the sample has failed
                scores[rows] += scorer.weight * own.scores
            outputs.append(own.at(rows, len(prompts)))
        scored = list(zip(self.scorers, outputs, strict=True))
        return RewardOutput(
            scores=scores,
            extra=self._extras(scored),
            terms={scorer.label: output.scores for scorer, output in scored if not scorer.is_gold},
            errors=self._errors(scored),
        )

    def describe_cuts(self, prompts: Sequence[Prompt]) -> list[str]:
        """A sentence for each term that does not read all of its prompts to their end."""
        told = []
        for scorer in self.scorers:
            describe = getattr(scorer.reward, "describe_cuts", None)
            own = {prompt.text: prompt for prompt in prompts if scorer.reads(prompt)}
            if describe is not None and (sentence := describe(list(own.values()))) is not None:
                told.append(sentence)
        return told

    def _score_rows(
        self, scorer: Scorer, images: ImageArray, prompts: list[Prompt], rows: np.ndarray
    ) -> RewardOutput:
        if len(rows) == 0:
            return RewardOutput(scores=np.zeros(0))

        def score(own_images: ImageArray, own_rows: np.ndarray) -> RewardOutput:
            own_prompts = [replace(prompts[row], metadata=dict(prompts[row].metadata)) for row in own_rows]
            return self._score(scorer, own_images, own_prompts)

        if images.ndim == 5:
            takes_videos = getattr(scorer.reward, "takes_videos", False)
            return score_videos(score, images, rows, scorer.frames, takes_videos=takes_videos)
        # A copy for each term, even of all rows: a reward may write into its images, as into its prompts' metadata.
        return score(images[rows], rows)

    def _score(self, scorer: Scorer, images: ImageArray, prompts: list[Prompt]) -> RewardOutput:
        label = scorer.label
        try:
            with reported_when_slow(label, self.timeout):
                return as_reward_output(scorer.reward(images, prompts), len(prompts), label)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if not isinstance(error, Exception):
                # SystemExit would end the process as if the run had succeeded.
                raise BackendError(
                    f"reward {label} raised {error!r}; raise an ordinary exception where it cannot score"
                ) from error
            if len(self.scorers) > 1:
                error.add_note(f"from reward {label}")
            raise

    def _is_lone(self, scorer: Scorer) -> bool:
        """Whether this is the only term that is optimised: its extras keep their names, and its score is the reward."""
        return not scorer.is_gold and sum(not other.is_gold for other in self.scorers) == 1

    def _extras(self, scored: Sequence[tuple[Scorer, RewardOutput]]) -> dict[str, np.ndarray]:
        extras: dict[str, np.ndarray] = {}
        for scorer, output in scored:
            label, named = scorer.label, output.extra
            if not self._is_lone(scorer):
                named = {label: output.scores, **{f"{label}_{key}": named[key] for key in named}}
            for name, array in named.items():
                if name in BUILT_IN_METRICS or name in extras:
                    other = "a metric of every run" if name in BUILT_IN_METRICS else "another score's name"
                    raise ConfigError(
                        f"reward {label} returned an extra score that would be logged as reward/{name}, {other}; "
                        "give it another key in RewardOutput.extra"
                    )
                extras[name] = array
        return extras

    def _errors(self, scored: Sequence[tuple[Scorer, RewardOutput]]) -> dict[int, str]:
        errors: dict[int, str] = {}
        for scorer, output in scored:
            for index, error in output.errors.items():
                errors.setdefault(index, f"{scorer.label}: {error}" if len(scored) > 1 else error)
        return errors


def build_reward(
    terms: Sequence[RewardTerm], gold: Sequence[RewardTerm] = (), *, timeout: float | None = None
) -> WeightedSum:
    """The reward of a recipe, the weighted sum of its terms, with its held-out rewards at weight 0.

    A term's name is a key of `REWARDS`, or `package.module:name` for a user's own: a function is called as
    `name(images, prompts, **options)`, a class is built with `name(**options)` and its instance called as
    `instance(images, prompts)`. Either returns `[B]` numbers or a `RewardOutput`.

    Args:
        terms: rewards that are optimised.
        gold: rewards that are only logged, as `gold/<name>`.
        timeout: see `WeightedSum`.

    Raises:
        ConfigError: an unknown name, an option that the reward does not take, two terms of one name.
        MissingExtraError: a reward needs a package that is not installed.
    """
    listed = [(label, term, float(term.weight)) for label, term in _labelled("reward.terms", terms)]
    listed += [(f"{GOLD}{label}", term, 0.0) for label, term in _labelled("reward.gold", gold)]
    scorers = [
        Scorer(label=label, reward=_build_term(term), weight=weight, tags=term.tags, frames=term.frames)
        for label, term, weight in listed
    ]
    return WeightedSum(scorers=tuple(scorers), timeout=timeout)


def check_terms(terms: Sequence[RewardTerm], gold: Sequence[RewardTerm] = ()) -> None:
    """Check names and options of the rewards in `REWARDS`; a user's own rewards are not imported.

    Raises:
        ConfigError: a name is unknown or given twice, or a reward does not take an option.
    """
    for key, listed in (("reward.terms", terms), ("reward.gold", gold)):
        for _, term in _labelled(key, listed):
            if ":" not in term.name:
                _check_options(term, _known_reward(term))


def states(term: RewardTerm, fact: str) -> bool:
    """Whether the class of a term's reward states a fact of `Reward`, such as `overlaps`.

    A reward of the user's own is not imported, and is taken to state none.
    """
    return bool(getattr(REWARDS.get(term.name), fact, False))


def frame_rules(terms: Sequence[RewardTerm], *, own: bool) -> dict[str, str]:
    """The rule by which each reward of images gets the frames of videos, by its name.

    Args:
        terms: the rewards.
        own: import rewards of the user's own, and read whether they take videos; without that they are left out.
    """

    def takes_videos(term: RewardTerm) -> bool:
        if ":" in term.name:
            return not own or getattr(_imported(term), "takes_videos", False)
        return states(term, "takes_videos")

    return {term.name: term.frames for term in terms if not takes_videos(term)}


def computes_on_gpu(term: RewardTerm) -> bool:
    """Whether a term's reward uses the GPU of its process, if there is one."""
    return states(term, "computes_on_gpu") and term.options.get("device") != "cpu"


def known_scores(
    terms: Sequence[RewardTerm], gold: Sequence[RewardTerm] = (), *, own: bool
) -> set[str] | None:
    """Names under `eval/` that the scores of a recipe's reward may have, before it is built.

    Args:
        terms: rewards that are optimised.
        gold: rewards that are only logged.
        own: import rewards of the user's own, and read their `extras`; without that their scores are not known.

    Returns:
        None if something chooses the names of its extras while it scores, such as a server.
    """
    names: set[str] = set()
    for prefix, listed in (("", terms), (GOLD, gold)):
        for term in listed:
            extras = _stated_extras(term, own)
            if extras is None:
                return None
            label = prefix + label_of(term)
            lone = not prefix and len(terms) == 1
            names.update(extras if lone else (label, *(f"{label}_{extra}" for extra in extras)))
    return names


def _stated_extras(term: RewardTerm, own: bool) -> Sequence[str] | None:
    if ":" not in term.name:
        return getattr(REWARDS.get(term.name), "extras", None)
    return getattr(_imported(term), "extras", ()) if own else None


def _labelled(key: str, terms: Sequence[RewardTerm]) -> list[tuple[str, RewardTerm]]:
    labels = [label_of(term) for term in terms]
    repeated = [label for label in labels if labels.count(label) > 1]
    if repeated:
        raise ConfigError(f"{key} has several terms named {repeated[0]!r}; give each name once")
    return list(zip(labels, terms, strict=True))


def label_of(term: RewardTerm) -> str:
    """The short name of a term, under which its scores are logged."""
    return term.name.rpartition(":")[2]


def _build_term(term: RewardTerm) -> Callable[..., Any]:
    if ":" in term.name:
        return _users_own(term)
    factory = _known_reward(term)
    _check_options(term, factory)
    return factory(**term.options)


def _known_reward(term: RewardTerm) -> Callable[..., Any]:
    if term.name not in REWARDS:
        raise ConfigError(unknown_choice("reward.terms.name", term.name, [*REWARDS, "package.module:name"]))
    return REWARDS[term.name]


def _imported(term: RewardTerm) -> Any:
    return import_target("reward.terms.name", term.name, "a function or class")


def _users_own(term: RewardTerm) -> Callable[..., Any]:
    target = _imported(term)
    if inspect.isclass(target):
        _check_options(term, target)
        target = target(**term.options)
        options: Mapping[str, Any] = {}
    else:
        options = term.options
    if not callable(target):
        raise ConfigError(
            f"reward {term.name}: an object of type {type(target).__name__} cannot be called; name a function of "
            "(images, prompts), or a class whose instances have __call__(images, prompts)"
        )
    _check_call(term, target, options)
    return functools.update_wrapper(functools.partial(target, **options), target) if options else target


def _check_options(term: RewardTerm, factory: Callable[..., Any]) -> None:
    signature = inspect.signature(factory)
    try:
        signature.bind(**term.options)
    except TypeError as error:
        takes = f"it takes {', '.join(signature.parameters) or 'none'}"
        raise ConfigError(
            f"reward {term.name} with options {', '.join(term.options) or 'none'}: {error}; {takes}"
        ) from error


def _check_call(term: RewardTerm, target: Callable[..., Any], options: Mapping[str, Any]) -> None:
    try:
        inspect.signature(target).bind("images", "prompts", **options)
    except TypeError as error:
        given = ", ".join(["images", "prompts", *(f"{key}=..." for key in options)])
        raise ConfigError(f"reward {term.name} cannot be called as ({given}): {error}") from error
