"""Inputs with which the engine at hand may have sampled instead: which of them explain the gap, if only one kind does.

The actor scores the engine's own steps under each candidate's inputs. All kinds are compared with each other, so that
wrong references or negative prompts fail no check of prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from flowcorr.instruments.doctor.candidates import Candidate, Tried, best, search
from flowcorr.instruments.doctor.exam import FACTOR_RANGE, Exam
from flowcorr.instruments.doctor.reference_inputs import affine, placed, places, prepared
from flowcorr.instruments.doctor.trials import NEGATIVE, REFERENCES, Trial, score_means, without
from flowcorr.models import Conditioning
from flowcorr.models.packed import PackedFamily
from flowcorr.rollout.precision import NO_GAP

Means = Callable[[], Tensor]
"""Computes the actor's step means `[B, T, *L]` under other inputs."""
EXACT = 1e-6  # of r^2: less is rounding, and says nothing about which of two candidates is the better one
SHORT_LENGTHS = 8  # every length up to this one is tried, then powers of two, CLIP's 77 and all but one token


def named(samples: Sequence[int]) -> str:
    """Some samples in words, such as "samples 1, 5 and 8 more"."""
    shown = ", ".join(map(str, samples[:3])) + (f" and {len(samples) - 3} more" if len(samples) > 3 else "")
    return f"sample{'s'[: len(samples) != 1]} {shown}"


def explanation(exam: Exam) -> Tried[Means] | None:
    """The candidate with which most of the gap between the engine's steps and the actor's disappears, if there is one.

    One image of each prompt is tried, the one with the largest gap. The answer is computed once for an exam.
    """
    if "explanation" not in exam.answers:
        exam.answers["explanation"] = _explanation(exam)
    return cast("Tried[Means] | None", exam.answers["explanation"])


def _explanation(exam: Exam) -> Tried[Means] | None:
    base, count = exam.trials.base, exam.trials.num_prompts
    if base.velocity_gap() <= NO_GAP:
        return None
    gaps = base.squared_distance().sum(1).view(count, -1)
    prompts = torch.arange(count, device=gaps.device)
    worst = base.select(prompts * gaps.shape[1] + gaps.argmax(1))
    first = best(explaining(exam, worst, candidates(exam, worst)))
    if first is None or first.evidence is None or _another_scale(exam, worst) >= first.evidence.share:
        return None
    return first


def explaining(exam: Exam, trial: Trial, rows: Iterable[Candidate[Means]]) -> list[Tried[Means]]:
    """The candidates, those that explain the gap of a trial first, the best of them first.

    The evidence for a candidate is of all samples, with any factor near 1, or of some of them, as it is. Each step may
    have been taken with another of its inputs.
    """
    own = trial.squared_distance()
    samples, steps = torch.arange(own.shape[0])[:, None], torch.arange(own.shape[1])

    def attempt(candidate: Candidate[Means]) -> Tried[Means]:
        means = torch.stack([compute() for compute in candidate.inputs])
        left, nearest = torch.stack([trial.squared_distance(one) for one in means]).min(0)
        every = exam.evidence(trial, trial.fit(means[nearest, samples, steps]))
        some = exam.explains(trial.explained_by([trial.means, *means]))
        evidence = max((one for one in (every, some) if one), key=lambda one: one.share, default=None)
        return Tried(
            candidate=candidate,
            score=torch.minimum(own, left).sum(1),
            left=1.0 if evidence is None else max(1 - evidence.share, EXACT),
            explains=evidence is not None,
            evidence=evidence,
        )

    return search(rows, attempt)


def candidates(exam: Exam, trial: Trial) -> Iterator[Candidate[Means]]:
    """The candidates for the inputs of a trial with one image a prompt.

    Those with references and negative prompts are tried where the gap is larger than precision explains.
    """
    conditioning = dict(trial.rollout.sample_conditioning())
    yield from (_scored(exam, trial, row) for row in _of_prompts(conditioning))
    if exam.trials.base.velocity_gap() > exam.usual_gap:
        yield from (_scored(exam, trial, row) for row in _of_negatives(conditioning))
        if REFERENCES in conditioning:
            yield from _of_references(exam, trial, conditioning)


def _scored(exam: Exam, trial: Trial, row: Candidate[Conditioning]) -> Candidate[Means]:
    """A row of other conditioning `{name: [P, ...]}`, of one image a prompt, as the actor scores it."""
    inputs = tuple(_under(exam, trial, other) for other in row.inputs)
    return Candidate(cause=row.cause, message=row.message, numbers=row.numbers, inputs=inputs)


def _under(exam: Exam, trial: Trial, conditioning: Conditioning) -> Means:
    rows = torch.arange(trial.rollout.num_samples, device=trial.means.device)
    rollout = replace(trial.rollout, conditioning=conditioning, conditioning_rows=rows)
    return partial(score_means, exam.actor, rollout)


def _another_scale(exam: Exam, trial: Trial) -> float:
    """Fraction of `r^2` that another guidance scale explains, which `check_guidance` fits."""
    if not any(name.startswith(NEGATIVE) for name in trial.rollout.conditioning):
        return 0.0
    plain = without(trial.rollout.sample_conditioning(), NEGATIVE)
    fit = trial.fit(_under(exam, trial, plain)())
    # Beyond, guidance would push away from the prompt.
    return fit.share if fit.factor <= 1 + FACTOR_RANGE else 0.0


# Prompts -----------------------------------------------------------------------------------------------------


def _of_prompts(conditioning: Mapping[str, Tensor]) -> Iterator[Candidate[Conditioning]]:
    """Prompts of other samples, and prompts of another length."""
    count = len(next(iter(conditioning.values())))
    if count > 1:
        texts = [name for name in conditioning if name != REFERENCES]
        yield Candidate(
            cause="embeddings",
            message="other prompts of the batch",
            numbers={"fits": "others"},
            inputs=_of_others(conditioning, texts)
            + (_of_others(conditioning, list(conditioning)) if REFERENCES in conditioning else ()),
        )
        for name in texts:
            if len(texts) > 1 and not name.startswith(NEGATIVE):
                yield Candidate(
                    cause="embeddings",
                    message=f"{name} of another prompt",
                    numbers={"fits": "another's", "field": name},
                    inputs=_of_others(conditioning, [name]),
                )
    sequences = [name for name, rows in conditioning.items() if rows.dim() == 3 or name.endswith("_mask")]
    for kept in _lengths(_longest([conditioning[name] for name in sequences])):
        cut = {name: conditioning[name][:, :kept] for name in sequences}
        yield Candidate(
            cause="embeddings",
            message=f"prompts cut after {kept} tokens",
            numbers={"fits": "cut", "tokens": kept},
            inputs=({**conditioning, **cut},),
        )
        blank = {
            name: torch.cat([rows, torch.zeros_like(conditioning[name][:, kept:])], 1)
            for name, rows in cut.items()
            if not name.startswith(NEGATIVE)
        }
        yield Candidate(
            cause="embeddings",
            message=f"prompts blank after {kept} tokens",
            numbers={"fits": "blank", "tokens": kept},
            inputs=({**conditioning, **blank},),
        )


def _of_others(conditioning: Mapping[str, Tensor], names: Sequence[str]) -> tuple[Conditioning, ...]:
    """Conditioning with some tensors of each other prompt in turn."""
    count = len(next(iter(conditioning.values())))
    return tuple(
        {**conditioning, **{name: conditioning[name].roll(shift, 0) for name in names}}
        for shift in range(1, count)
    )


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


def _of_negatives(conditioning: Mapping[str, Tensor]) -> Iterator[Candidate[Conditioning]]:
    """Other negative prompts, and both sides of guidance exchanged."""
    negatives = {name: name.removeprefix(NEGATIVE) for name in conditioning if name.startswith(NEGATIVE)}
    if not negatives:
        return
    exchanged = {
        left: conditioning[right] for pair in negatives.items() for left, right in (pair, pair[::-1])
    }
    yield Candidate(
        cause="guidance",
        message="guidance whose prompt and negative prompt are exchanged",
        numbers={"fits": "exchanged"},
        inputs=({**conditioning, **exchanged},),
    )
    zeros = {
        name: torch.zeros_like(conditioning[name])
        for name in negatives
        if conditioning[name].is_floating_point()
    }
    yield Candidate(
        cause="guidance",
        message="a negative prompt of zeros",
        numbers={"fits": "zeros"},
        inputs=({**conditioning, **zeros},),
    )
    count = len(next(iter(conditioning.values())))
    if count > 1:
        as_negative = {name: conditioning[positive] for name, positive in negatives.items()}
        others = _of_others({**conditioning, **as_negative}, list(negatives))
        yield Candidate(
            cause="guidance",
            message="the negative prompt, or the prompt, of another sample as negative prompt",
            numbers={"fits": "another's negative"},
            inputs=(*_of_others(conditioning, list(negatives)), *others),
        )


# References --------------------------------------------------------------------------------------------------


def _of_references(exam: Exam, trial: Trial, conditioning: Conditioning) -> Iterator[Candidate[Means]]:
    """Reference images that were left out, are those of others, or were prepared or placed otherwise."""
    references, family = conditioning[REFERENCES], exam.actor.family
    prompts, images = references.shape[:2]

    def under(other: Tensor) -> Means:
        return _under(exam, trial, {**conditioning, REFERENCES: other})

    def of(message: str, fits: str, *others: Tensor) -> Candidate[Means]:
        inputs = tuple(under(other) for other in others)
        return Candidate(cause=REFERENCES, message=message, numbers={"fits": fits}, inputs=inputs)

    left_out = _under(exam, trial, without(conditioning, REFERENCES))
    yield replace(of("no reference images", "none"), inputs=(left_out,))
    yield of("reference images of zeros", "zeros", torch.zeros_like(references))
    if prompts > 1:
        others = [references.roll(shift, 0) for shift in range(1, prompts)]
        yield of("reference images of other samples", "others", *others)
    if images > 1:
        orders = [references.roll(shift, 1) for shift in range(1, images)] + [references.flip(1)]
        yield of("reference images in another order", "order", *orders)
        fewer = [references[:, [kept for kept in range(images) if kept != out]] for out in range(images)]
        firsts = [references[:, :kept] for kept in range(1, images - 1)]
        yield of("fewer reference images", "fewer", *fewer, *firsts)
    if isinstance(family, PackedFamily):
        for name, other in prepared(family, exam.prompts, references).items():
            yield of(f"reference images {name}", name, other)
    scale, shift = affine(trial, references, lambda other: under(other)())
    message = f"reference images whose latents are scaled by {scale:.3g} and shifted by {shift:.2g}"
    numbers = {"fits": "scaled", "scale": scale, "shift": shift}
    yield replace(of(message, "scaled", scale * references + shift), numbers=numbers, fitted=True)
    drawn, compute = (
        trial.rollout.latent_shape[0] * trial.rollout.latent_shape[1],
        _under(exam, trial, conditioning),
    )
    for name, place in places(family.transformer).items():
        inputs = (placed(family.transformer, place, drawn)(compute),)
        yield replace(of(f"reference images {name}", name), inputs=inputs)
