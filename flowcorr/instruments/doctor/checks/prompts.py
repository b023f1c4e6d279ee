"""The check of the prompts: compares embeddings, and finds the prompts that fit the engine's steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flowcorr.instruments.doctor.exam import Exam
from flowcorr.instruments.doctor.findings import failed, judged
from flowcorr.instruments.doctor.trials import Fit, Trial, score_means
from flowcorr.instruments.finding import Finding
from flowcorr.instruments.gap_words import percent
from flowcorr.models import Conditioning
from flowcorr.rollout.precision import NO_GAP

EMBEDDING_TOLERANCE = 2e-2  # relative: rounding to bfloat16 costs at most 4e-3, another word 0.9
SHORT_LENGTHS = 8  # every length up to this one is tried, then powers of two, CLIP's 77 and all but one token


def check_embeddings(exam: Exam) -> Finding:
    found, gaps = exam.trials.base.rollout.sample_conditioning(), {}
    remedy = (
        "use the same text encoders, prompts, negative prompt and model.max_sequence_length on both sides"
    )
    for name, expected in exam.trials.conditioning.items():
        if name not in found or found[name].shape != expected.shape:
            shape = list(found[name].shape) if name in found else None
            return failed(
                f"{name} is {shape or 'no value'} in the engine and {list(expected.shape)} here",
                remedy,
                field=name,
                engine_shape=shape,
                shape=list(expected.shape),
            )
        difference = (found[name].double() - expected.to(found[name].device).double()).norm()
        gaps[name] = float(difference / expected.double().norm().clamp(min=1e-12))
    name, worst = max(gaps.items(), key=lambda item: item[1])
    finding = judged(
        worst,
        EMBEDDING_TOLERANCE,
        "prompt embeddings agree",
        f"the engine's {name} differs by {percent(worst)}",
        remedy,
        field=name,
    )
    return finding if finding.level == "serious" else _unreturned(exam) or finding


def _unreturned(exam: Exam) -> Finding | None:
    """A failure if the engine's steps fit other prompts better than the returned ones."""
    trial = exam.trials.base
    if trial.velocity_gap() <= NO_GAP:
        return None
    members = trial.rollout.num_samples // exam.trials.num_prompts
    device = trial.rollout.window.latents.device
    trial = trial.select(
        torch.arange(0, trial.rollout.num_samples, members, device=device)
    )  # one image a prompt
    found = []
    for message, numbers, alternatives in _mistakes(trial.rollout.sample_conditioning()):
        fit = _nearest(exam, trial, alternatives)
        if (evidence := exam.evidence(trial, fit)) is not None:
            found.append((fit.share, message, numbers, evidence))
    if not found:
        return None
    _, message, numbers, evidence = max(found, key=lambda entry: entry[0])
    return failed(
        f"the steps fit {message}, {evidence.text}",
        "compare the conditioning that enters the engine's transformer with Rollout.conditioning, by value and length",
        value=evidence.value,
        limit=evidence.threshold,
        **numbers,
    )


def _nearest(exam: Exam, trial: Trial, alternatives: Sequence[Conditioning]) -> Fit:
    """The fit of the step means under `alternatives`; each term takes the closest one."""
    rollout = trial.rollout
    own = torch.arange(rollout.num_samples, device=rollout.window.latents.device)
    means = torch.stack(
        [
            score_means(exam.actor, replace(rollout, conditioning=rows, conditioning_rows=own))
            for rows in alternatives
        ]
    )
    distances = torch.stack([trial.squared_distance(alternative) for alternative in means])
    samples, steps = distances.shape[1:]
    nearest = means[distances.argmin(0), torch.arange(samples)[:, None], torch.arange(steps)]
    return trial.fit(nearest)


def _mistakes(
    conditioning: Mapping[str, Tensor],
) -> Iterator[tuple[str, dict[str, Any], list[Conditioning]]]:
    """Usual mistakes with prompts: in words, as data, and the conditioning `[num_prompts, ...]` that they give."""
    count = len(next(iter(conditioning.values())))

    def of_others(names: Sequence[str]) -> list[Conditioning]:
        return [
            {**conditioning, **{name: conditioning[name].roll(shift, 0) for name in names}}
            for shift in range(1, count)
        ]

    if count > 1:
        yield "other prompts of the batch", {"fits": "others"}, of_others(list(conditioning))
        for name in conditioning:
            if len(conditioning) > 1 and not name.startswith("negative_"):
                yield f"{name} of another prompt", {"fits": "another's", "field": name}, of_others([name])
    sequences = [name for name, rows in conditioning.items() if rows.dim() == 3 or name.endswith("_mask")]
    for kept in _lengths(_longest([conditioning[name] for name in sequences])):
        cut = {name: conditioning[name][:, :kept] for name in sequences}
        length = {"tokens": kept}
        yield f"prompts cut after {kept} tokens", {"fits": "cut"} | length, [{**conditioning, **cut}]
        blank = {
            name: torch.cat([rows, torch.zeros_like(conditioning[name][:, kept:])], 1)
            for name, rows in cut.items()
            if not name.startswith("negative_")
        }
        yield f"prompts blank after {kept} tokens", {"fits": "blank"} | length, [{**conditioning, **blank}]


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
