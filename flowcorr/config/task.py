"""The task of a run: its prompts and rewards."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from flowcorr.config.checks import at_least, check_workers, not_blank
from flowcorr.errors import ConfigError

RewardPlacement = Literal["auto", "local", "thread", "ray"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardTerm:
    """One term of the reward.

    Attributes:
        name: `ocr`, `jpeg_compressibility`, `jpeg_incompressibility`, `pickscore`, `aesthetic`,
            `reference_similarity`, `vlm_judge`, `http` or `package.module:name`.
        weight: its factor in the sum.
        options: keyword arguments of the reward.
        tags: score only prompts with one of these tags, see `data.tag_field`; empty scores all. A term adds nothing to
            the reward of other prompts, and its own mean leaves them out.
        normalize: in training, take the term relative to its prompt's mean and divide it by the std of its `group`
            (GDPO, together with `algorithm.advantage_std: global`), or of all rewards of the step (`global`), before
            it is summed; `none` sums raw scores. Logs and evaluations are always of raw scores.
        frames: frames of a video that a reward of images scores: `middle`, the one in the middle, `mean`, the mean over
            all, or `every K`, the mean over the first and every `K`-th after it. A reward that takes videos gets them
            whole.
    """

    name: str
    weight: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    normalize: Literal["none", "group", "global"] = "none"
    frames: str = "middle"

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise ConfigError(f"reward.terms[{self.name}].weight={self.weight} must be a finite number")
        if self.frames not in ("middle", "mean") and not re.fullmatch(r"every [1-9]\d{0,3}", self.frames):
            raise ConfigError(
                f"reward.terms[{self.name}].frames={self.frames!r} is unknown; choose from middle, mean, or every K, "
                "such as every 4"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig:
    """`reward`: the rewards that are optimised, and how failures are handled.

    Attributes:
        terms: the rewards that are summed.
        gold: held-out rewards, logged as `reward/gold/<name>` and `eval/gold/<name>` and never optimised: if the sum
            rises and they fall, the policy exploits the reward.
        gold_every: score the gold rewards at every training `step` and evaluation, or at every `evaluation` alone, as
            pays for a slow one; the trainer's process then computes them.
        on_error: `fail` stops the run at a sample whose latents, pixels or reward are not finite, or whose reward
            raises; `drop_group` leaves its group out, and of an evaluation the image.
        placement: `local` scores all images of a step in one call; `thread` scores images as they are decoded, in a
            thread that runs during sampling and the recomputation of old log-probs; `ray` does so in workers. These two
            score a few images at a time, not all of a step together. `auto` takes `thread` if all rewards allow it, as
            `ocr`, the JPEG rewards, `http` and `vlm_judge` do, else `local`.
        num_workers: reward workers, which all training ranks share; each has the whole reward.
        worker_resources: Ray resources reserved for each worker, as in `rollout.worker_resources`.
        timeout: seconds that a worker may take for one request; after that it counts as hung. In the trainer's process,
            seconds after which the log names the reward that is still computing, once a minute.
    """

    terms: tuple[RewardTerm, ...] = (RewardTerm(name="ocr"),)
    gold: tuple[RewardTerm, ...] = ()
    gold_every: Literal["step", "evaluation"] = "step"
    on_error: Literal["fail", "drop_group"] = "fail"
    placement: RewardPlacement = "auto"
    num_workers: int = 1
    worker_resources: Mapping[str, float] = field(default_factory=dict)
    timeout: float = 900.0

    @property
    def step_gold(self) -> tuple[RewardTerm, ...]:
        """The gold rewards that are scored at every training step."""
        return self.gold if self.gold_every == "step" else ()

    @property
    def step_terms(self) -> tuple[RewardTerm, ...]:
        """All rewards that are scored at every training step."""
        return (*self.terms, *self.step_gold)

    @property
    def evaluation_gold(self) -> tuple[RewardTerm, ...]:
        """The gold rewards that only evaluations score, always in the trainer's process."""
        return self.gold if self.gold_every == "evaluation" else ()

    def __post_init__(self) -> None:
        check_workers("reward", self.num_workers, self.worker_resources, self.timeout)
        if not self.terms:
            raise ConfigError("reward.terms=[] scores nothing; give at least one, such as [{name: ocr}]")
        if not any(term.weight for term in self.terms):
            names = ", ".join(term.name for term in self.terms)
            raise ConfigError(
                f"reward.terms[].weight=0 of all terms ({names}) trains on nothing; give one of them another"
            )
        for term in self.gold:
            if term.weight != 1 or term.normalize != "none":
                raise ConfigError(
                    f"reward.gold[{term.name}] has a weight or normalize, and a gold reward is never optimised; "
                    "leave both out, or move it to reward.terms"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """`data`: the prompts.

    Attributes:
        path: a .txt or .jsonl file, or `tiny_words`, the word list of the embedded model.
        heldout_path: a file of prompts for evaluation; null keeps back a share of `path`.
        heldout_fraction: share of a file's prompts kept for evaluation, chosen by hash.
        num_train: prompts drawn from `tiny_words` for training.
        num_heldout: prompts of an evaluation.
        target_field: the field of a .jsonl line that holds the target, such as the words to render; without it the
            target is the text in its one pair of double quotes.
        tag_field: the field of a .jsonl line by which `reward.terms[].tags` chooses prompts.
    """

    path: str = "tiny_words"
    heldout_path: str | None = None
    heldout_fraction: float = 0.1
    num_train: int = 2048
    num_heldout: int = 128
    target_field: str = "target"
    tag_field: str = "tag"

    def __post_init__(self) -> None:
        if not 0 < self.heldout_fraction < 1:
            raise ConfigError(
                f"data.heldout_fraction={self.heldout_fraction} is out of range; use a value in (0, 1)"
            )
        not_blank("data.path", self.path)
        if self.heldout_path is not None:
            not_blank("data.heldout_path", self.heldout_path)
        at_least("data.num_train", self.num_train, 1)
        at_least("data.num_heldout", self.num_heldout, 1)
