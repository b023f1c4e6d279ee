"""Inputs with which the engine may have sampled instead: the mistake that explains the gap, if only one kind does.

The actor scores the engine's own steps under the inputs of each mistake. All kinds are compared with each other, so
that wrong references or negative prompts fail no check of prompts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from flowcorr.instruments.doctor.exam import FACTOR_RANGE, Evidence, Exam
from flowcorr.instruments.doctor.reference_inputs import affine, placed, places, prepared
from flowcorr.instruments.doctor.trials import NEGATIVE, REFERENCES, Trial, score_means
from flowcorr.models import Conditioning
from flowcorr.models.packed import PackedFamily
from flowcorr.rollout.precision import NO_GAP

EXACT = 1e-6  # of r^2: less is rounding, and says nothing about which of two mistakes is the better one
FITTED = (
    10.0  # a mistake whose numbers were fitted has to leave so many times less than one without such numbers
)
SHORT_LENGTHS = 8  # every length up to this one is tried, then powers of two, CLIP's 77 and all but one token


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mistake:
    """Other inputs with which the engine may have sampled.

    Attributes:
        check: the check that fails then.
        message: the inputs, in words.
        numbers: the same as data.
        inputs: conditioning `{name: [P, ...]}` of the prompts; each step may have been taken with another of them.
        placed: changes the actor's transformer while it scores.
        fitted: whether its numbers are those that fit best.
    """

    check: str
    message: str
    numbers: Mapping[str, Any]
    inputs: Sequence[Conditioning]
    placed: Callable[[nn.Module], AbstractContextManager[None]] = field(
        default=lambda transformer: contextlib.nullcontext()
    )
    fitted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Explanation:
    """The mistake that explains the gap, why it is accepted, and the samples that have it."""

    mistake: Mistake
    evidence: Evidence
    samples: Sequence[int]
    num_samples: int

    @property
    def text(self) -> str:
        """The mistake, the evidence, and the samples if not all have it."""
        text = f"the steps fit {self.mistake.message}, {self.evidence.text}"
        if len(self.samples) == self.num_samples:
            return text
        return f"{text}; it is {named(self.samples)} of {self.num_samples} alone"


def named(samples: Sequence[int]) -> str:
    """Some samples in words, such as "samples 1, 5 and 8 more"."""
    shown = ", ".join(map(str, samples[:3])) + (f" and {len(samples) - 3} more" if len(samples) > 3 else "")
    return f"sample{'s'[: len(samples) != 1]} {shown}"


def explanation(exam: Exam) -> Explanation | None:
    """The mistake with which most of the gap between the engine's steps and the actor's disappears, if there is one.

    One image of each prompt is tried, the one with the largest gap. The answer is computed once for an exam.
    """
    if "explanation" not in exam.answers:
        exam.answers["explanation"] = _explanation(exam)
    return cast("Explanation | None", exam.answers["explanation"])


def _explanation(exam: Exam) -> Explanation | None:
    base, count = exam.trials.base, exam.trials.num_prompts
    if base.velocity_gap() <= NO_GAP:
        return None
    gaps = base.squared_distance().sum(1).view(count, -1)
    prompts = torch.arange(count, device=gaps.device)
    worst = base.select(prompts * gaps.shape[1] + gaps.argmax(1))
    best: tuple[float, Mistake, Evidence] | None = None
    for mistake in mistakes(exam, worst):
        means = _means(exam, worst, mistake, prompts)
        evidence = _evidence(exam, worst, means)
        if evidence is None:
            continue
        left = max(1 - evidence.share, EXACT) * (FITTED if mistake.fitted else 1)
        if best is None or left < best[0]:
            best = left, mistake, evidence
    if best is None or _another_scale(exam, worst) >= best[2].share:
        return None
    _, mistake, evidence = best
    return Explanation(
        mistake=mistake,
        evidence=evidence,
        samples=base.samples_off(),
        num_samples=base.rollout.num_samples,
    )


def mistakes(exam: Exam, trial: Trial) -> Iterator[Mistake]:
    """The mistakes that the inputs of a trial with one image a prompt may have.

    Those with references and negative prompts are tried where the gap is larger than precision explains.
    """
    conditioning = dict(trial.rollout.sample_conditioning())
    yield from _of_prompts(conditioning)
    if exam.trials.base.velocity_gap() > exam.usual_gap:
        yield from _of_negatives(conditioning)
        if REFERENCES in conditioning:
            yield from _of_references(exam, trial, conditioning)


def _means(exam: Exam, trial: Trial, mistake: Mistake, prompts: Tensor) -> list[Tensor]:
    """The actor's step means `[B, T, *L]` under each of the mistake's inputs; `prompts` `[B]` are the samples' own."""
    with mistake.placed(exam.actor.family.transformer):
        return [
            score_means(exam.actor, replace(trial.rollout, conditioning=inputs, conditioning_rows=prompts))
            for inputs in mistake.inputs
        ]


def _evidence(exam: Exam, trial: Trial, means: Sequence[Tensor]) -> Evidence | None:
    """Evidence for a mistake: of all samples, with any factor near 1, or of some of them, as it is."""
    distances = torch.stack([trial.squared_distance(other) for other in means])
    samples, steps = distances.shape[1:]
    stacked = torch.stack(list(means))
    nearest = stacked[distances.argmin(0), torch.arange(samples)[:, None], torch.arange(steps)]
    fit = trial.fit(nearest)
    every = exam.evidence(trial, fit)
    some = exam.explains(trial.explained_by([trial.means, *means]))
    return max(
        (each for each in (every, some) if each is not None), key=lambda each: each.share, default=None
    )


def _another_scale(exam: Exam, trial: Trial) -> float:
    """Fraction of `r^2` that another guidance scale explains, which `check_guidance` fits."""
    if not any(name.startswith(NEGATIVE) for name in trial.rollout.conditioning):
        return 0.0
    plain = without(trial.rollout.sample_conditioning(), NEGATIVE)
    rows = torch.arange(trial.rollout.num_samples, device=trial.means.device)
    unguided = score_means(exam.actor, replace(trial.rollout, conditioning=plain, conditioning_rows=rows))
    fit = trial.fit(unguided)
    # Beyond, guidance would push away from the prompt.
    return fit.share if fit.factor <= 1 + FACTOR_RANGE else 0.0


def without(conditioning: Mapping[str, Tensor], prefix: str) -> Conditioning:
    """Conditioning without the tensors whose names begin so."""
    return {name: rows for name, rows in conditioning.items() if not name.startswith(prefix)}


# Prompts -----------------------------------------------------------------------------------------------------


def _of_prompts(conditioning: Mapping[str, Tensor]) -> Iterator[Mistake]:
    """Prompts of other samples, and prompts of another length."""
    count = len(next(iter(conditioning.values())))
    if count > 1:
        texts = [name for name in conditioning if name != REFERENCES]
        yield Mistake(
            check="embeddings",
            message="other prompts of the batch",
            numbers={"fits": "others"},
            inputs=_of_others(conditioning, texts)
            + (_of_others(conditioning, list(conditioning)) if REFERENCES in conditioning else []),
        )
        for name in texts:
            if len(texts) > 1 and not name.startswith(NEGATIVE):
                yield Mistake(
                    check="embeddings",
                    message=f"{name} of another prompt",
                    numbers={"fits": "another's", "field": name},
                    inputs=_of_others(conditioning, [name]),
                )
    sequences = [name for name, rows in conditioning.items() if rows.dim() == 3 or name.endswith("_mask")]
    for kept in _lengths(_longest([conditioning[name] for name in sequences])):
        cut = {name: conditioning[name][:, :kept] for name in sequences}
        yield Mistake(
            check="embeddings",
            message=f"prompts cut after {kept} tokens",
            numbers={"fits": "cut", "tokens": kept},
            inputs=[{**conditioning, **cut}],
        )
        blank = {
            name: torch.cat([rows, torch.zeros_like(conditioning[name][:, kept:])], 1)
            for name, rows in cut.items()
            if not name.startswith(NEGATIVE)
        }
        yield Mistake(
            check="embeddings",
            message=f"prompts blank after {kept} tokens",
            numbers={"fits": "blank", "tokens": kept},
            inputs=[{**conditioning, **blank}],
        )


def _of_others(conditioning: Mapping[str, Tensor], names: Sequence[str]) -> list[Conditioning]:
    """Conditioning with some tensors of each other prompt in turn."""
    count = len(next(iter(conditioning.values())))
    return [
        {**conditioning, **{name: conditioning[name].roll(shift, 0) for name in names}}
        for shift in range(1, count)
    ]


def _longest(sequences: Sequence[Tensor]) -> int:
    """Tokens of the longest prompt; padding that a mask leaves out can be cut without an effect."""
    masks = [rows for rows in sequences if rows.dim() == 2]
    if masks:
        return max(int(mask.any(0).nonzero().max()) + 1 for mask in masks)
    return max((rows.shape[1] for rows in sequences), default=0)


def _lengths(length: int) -> list[int]:
    """Usual lengths to which a prompt of `length` tokens may have been cut."""
    usual = [*range(1, SHORT_LENGTHS + 1), 16, 32, 64, 77, 128, 256, length - 1]
    return sorted({kept for kept in usual if 0 < kept < length})


# Negative prompts --------------------------------------------------------------------------------------------


def _of_negatives(conditioning: Mapping[str, Tensor]) -> Iterator[Mistake]:
    """Other negative prompts, and both sides of guidance exchanged."""
    negatives = {name: name.removeprefix(NEGATIVE) for name in conditioning if name.startswith(NEGATIVE)}
    if not negatives:
        return
    exchanged = {
        left: conditioning[right] for pair in negatives.items() for left, right in (pair, pair[::-1])
    }
    yield Mistake(
        check="guidance",
        message="guidance whose prompt and negative prompt are exchanged",
        numbers={"fits": "exchanged"},
        inputs=[{**conditioning, **exchanged}],
    )
    zeros = {
        name: torch.zeros_like(conditioning[name])
        for name in negatives
        if conditioning[name].is_floating_point()
    }
    yield Mistake(
        check="guidance",
        message="a negative prompt of zeros",
        numbers={"fits": "zeros"},
        inputs=[{**conditioning, **zeros}],
    )
    count = len(next(iter(conditioning.values())))
    if count > 1:
        as_negative = {name: conditioning[positive] for name, positive in negatives.items()}
        others = _of_others({**conditioning, **as_negative}, list(negatives))
        yield Mistake(
            check="guidance",
            message="the negative prompt, or the prompt, of another sample as negative prompt",
            numbers={"fits": "another's negative"},
            inputs=[*_of_others(conditioning, list(negatives)), *others],
        )


# References --------------------------------------------------------------------------------------------------


def _of_references(exam: Exam, trial: Trial, conditioning: Conditioning) -> Iterator[Mistake]:
    """Reference images that were left out, are those of others, or were prepared or placed otherwise."""
    references, family = conditioning[REFERENCES], exam.actor.family
    prompts, images = references.shape[:2]

    def of(message: str, fits: str, *others: Tensor, **options: Any) -> Mistake:
        numbers = {"fits": fits, **options.pop("numbers", {})}
        inputs = [{**conditioning, REFERENCES: other} for other in others]
        return Mistake(check=REFERENCES, message=message, numbers=numbers, inputs=inputs, **options)

    yield Mistake(
        check=REFERENCES,
        message="no reference images",
        numbers={"fits": "none"},
        inputs=[without(conditioning, REFERENCES)],
    )
    yield of("reference images of zeros", "zeros", torch.zeros_like(references))
    if prompts > 1:
        others = [references.roll(shift, 0) for shift in range(1, prompts)]
        yield of("reference images of other samples", "others", *others)
    if images > 1:
        orders = [references.roll(shift, 1) for shift in range(1, images)] + [references.flip(1)]
        yield of("reference images in another order", "order", *orders)
        left_out = [references[:, [kept for kept in range(images) if kept != out]] for out in range(images)]
        firsts = [references[:, :kept] for kept in range(1, images - 1)]
        yield of("fewer reference images", "fewer", *left_out, *firsts)
    if isinstance(family, PackedFamily):
        for name, other in prepared(family, exam.prompts, references).items():
            yield of(f"reference images {name}", name, other)
    scale, shift = affine(exam, trial, conditioning)
    yield of(
        f"reference images whose latents are scaled by {scale:.3g} and shifted by {shift:.2g}",
        "scaled",
        scale * references + shift,
        numbers={"scale": scale, "shift": shift},
        fitted=True,
    )
    drawn = trial.rollout.latent_shape[0] * trial.rollout.latent_shape[1]
    for name, place in places(family.transformer).items():
        yield of(
            f"reference images {name}", name, references, placed=partial(placed, place=place, drawn=drawn)
        )
