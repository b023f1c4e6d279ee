"""Checks of the noise: its distribution, and its seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from flowcorr.health.finding import Finding
from flowcorr.instruments.doctor.captured import Captured
from flowcorr.instruments.doctor.conventions import Convention
from flowcorr.instruments.doctor.exam import Exam
from flowcorr.instruments.doctor.findings import failed, judged, passed, skipped
from flowcorr.instruments.doctor.legs import Window
from flowcorr.instruments.doctor.stack import Stack
from flowcorr.instruments.doctor.trials import Trial
from flowcorr.instruments.stored import stored_in
from flowcorr.metrics import Metrics
from flowcorr.questions.compared import at_bound, beside_seeds, standard_errors
from flowcorr.questions.noise import moments
from flowcorr.questions.normal import Moment, beyond, ranges
from flowcorr.questions.question import ERRORS, LATENTS, LOG_PROBS, STEP_NOISE
from flowcorr.records import Rollout
from flowcorr.rollout.precision import LARGEST_DISTANCE

FALSE_ALARMS = 1e-6  # probability that `check_noise` fails by chance
NOISE_GAP = 0.05  # rms; latents have unit scale, and different noise gives 0.9 or more
SHAPE_GAP = 1e-3  # rms; 3e-7 in float32 (2e-6 under guidance), .002 in bfloat16; lower precision allows more
SHARED = 0.5  # correlation above which two captured draws are one
_SEEDED = "seed the noise by training step, prompt and member"


def check_noise(exam: Exam) -> Finding:
    """Judge the moments of the noise as training steps do, and each correlation of two steps.

    For independent directions, `P(|correlation| > c) <= (1 - c^2)^((D - 1) / 2)`; the limit holds for all pairs.
    """
    trials = exam.trials
    noise = torch.cat([_rows(trials.base.engine_noise), _rows(trials.moved.engine_noise)])
    values = Metrics(moments(noise)).compute()
    correlation, pair = largest_correlation(noise)
    limit = math.sqrt(2 * math.log(len(noise) * (len(noise) - 1) / 2 / FALSE_ALARMS))
    of_pair = math.sqrt(-(noise.shape[1] - 1) * math.log(max(1 - correlation**2, 1e-300)))
    over = _difference(trials.base, *pair)
    errors, fault, text = _worst_moment(values, noise.numel())
    if of_pair / limit > errors / ERRORS:
        errors, fault, text = (
            of_pair,
            f"correlation over {over}",
            f"is correlated by {correlation:.2f} over {over}",
        )
    else:
        limit = ERRORS
    chance = ranges(noise.numel())
    seen, seen_tails = chance["std"][1] - 1, -chance["tails"][0]
    return judged(
        errors,
        limit,
        f"step noise is standard normal and independent (an error of {100 * seen:.1g} % in the std would be found, and "
        f"a fourth moment off by {seen_tails:.1g}: that of uniform noise is off by 1.2)",
        f"step noise {text}, {errors:.3g} standard errors off",
        "add s times standard normal noise to the step's mean, seeded by (seed, training step, group, member) and step "
        "index; sampling.same_initial_noise concerns the initial noise only",
        std=values["std"],
        mean=values["mean"],
        correlation=correlation,
        least_std_error=seen,
        fault=fault if errors > limit else None,
    )


def _worst_moment(values: Mapping[str, float], count: int, gap: float = 0.0) -> tuple[float, str, str]:
    """The moment farthest from that of standard normal noise: in standard errors, by name and in words.

    Args:
        values: see `moments`.
        count: elements of the noise.
        gap: see `ranges`.
    """
    words: Mapping[Moment, tuple[str, str]] = {
        "mean": ("mean", f"has mean {values['mean']:.3g} instead of 0"),
        "std": ("std", f"has std {values['std']:.4g} instead of 1"),
        "tails": ("fourth moment", f"is not normal: its fourth moment is off by {values['tails']:.2g}"),
    }

    shares = beyond({moment: values[moment] for moment in words}, count, gap)
    worst = max(shares, key=lambda moment: shares[moment])
    return ERRORS * shares[worst], *words[worst]


def check_seeds(exam: Exam) -> Finding:
    """Judge the noise as training steps do, by the engine's own means, which leave no gap of two policies."""
    trials = exam.trials.base, exam.trials.moved
    sums = torch.cat([beside_seeds(_rows(trial.engine_noise), _rows(trial.noise)) for trial in trials], dim=1)
    errors = float(standard_errors(torch.cat([sums, sums.sum(1, keepdim=True)], dim=1)).max())
    nats = max(float(trial.log_prob_errors.max()) for trial in trials)
    if nats > LOG_PROBS.limit:
        return failed(
            f"the size of the step noise is not that of its seeds: log-probs are {nats:.2g} nats off",
            STEP_NOISE.remedy,
            value=nats,
            limit=LOG_PROBS.limit,
        )
    return judged(
        errors,
        STEP_NOISE.limit,
        "step noise is that of its seeds",
        f"step noise differs from that of its seeds by {errors:.3g} standard errors",
        STEP_NOISE.remedy,
    )


def check_determinism(exam: Exam) -> Finding:
    gap = _trajectory_gap(exam.trials.base.rollout, exam.trials.again)
    unseeded = gap > NOISE_GAP
    return judged(
        gap,
        0.0,
        "the same seeds give the same bits",
        f"the same seeds gave latents that differ by {gap:.2g} (rms)",
        "seed each sample's noise by (seed, training step, group, member), never by a global generator"
        if unseeded
        else "some kernels add numbers in no fixed order, so runs cannot be repeated exactly",
        fails_above=NOISE_GAP,
    )


def check_batch_shape(exam: Exam) -> Finding:
    if exam.trials.num_prompts == 1:
        return skipped(
            "there is one prompt only, which shows neither whether the engine mixes prompts up nor whether a batch "
            "changes the latents"
        )
    alone, limit = exam.trials.alone, max(SHAPE_GAP, exam.usual_gap)
    gap = _trajectory_gap(exam.trials.base.rollout.select(slice(-alone.num_samples, None)), alone)
    return judged(
        gap,
        limit,
        "a prompt gives the same latents alone and in a batch",
        f"a prompt sampled alone differs by {gap:.2g} (rms) from the same prompt in a batch",
        "seed each sample's noise by its ids, not by its place in the batch, and give each sample its own prompt"
        if gap > max(NOISE_GAP, limit)
        else "kernels depend on the batch's shape; harmless as long as the noise floor below is small",
        fails_above=max(NOISE_GAP, limit),
    )


def _trajectory_gap(rollout: Rollout, other: Rollout) -> float:
    """Root mean square difference of the latents of both windows."""
    one, two = rollout.window, other.window
    before, after = one.latents - two.latents, one.next_latents - two.next_latents
    return float(torch.stack([before, after]).double().square().mean().sqrt())


def _rows(noise: Tensor) -> Tensor:
    """`[B T, D]`, one row a step."""
    return noise.flatten(2).flatten(0, 1)


def _correlations(rows: Tensor, others: Tensor) -> Tensor:
    """`[N, M]` between rows of noise `[N, D]` and `[M, D]`."""
    unit, other = (noise / noise.norm(dim=1, keepdim=True).clamp(min=1e-30) for noise in (rows, others))
    return unit @ other.T


def largest_correlation(noise: Tensor) -> tuple[float, tuple[int, int]]:
    """The correlation farthest from 0 between two rows of `noise` `[N, D]`, and these rows."""
    correlations = _correlations(noise, noise).fill_diagonal_(0)
    first, second = divmod(int(correlations.abs().argmax()), len(noise))
    return float(correlations[first, second].clamp(-1, 1)), (first, second)


def _difference(trial: Trial, first: int, second: int) -> str:
    """The level at which two rows of noise differ; later rows are from a second rollout of the same size."""
    samples, steps = trial.rollout.window.step_indices.shape
    owners = trial.rollout.group_ids.tolist()
    samples_of = [row // steps for row in (first, second)]
    if samples_of[0] // samples != samples_of[1] // samples:
        return "training steps"
    if samples_of[0] == samples_of[1]:
        return "the steps of a sample"
    groups = {owners[sample % samples] for sample in samples_of}
    return "the images of a prompt" if len(groups) == 1 else "prompts"


def check_captured_noise(captured: Captured) -> Finding:
    stack = captured.stack
    noise = stack.tensor("initial_noise")
    assert noise is not None, "`Stack` has checked it"
    flat = noise.flatten(1).cpu().double()
    prompts = stack.samples.prompts
    for number, samples in captured.earlier.items():
        past = samples.tensors()["initial_noise"].flatten(1).double()
        if past.shape[1] == flat.shape[1] and (again := _alike(flat, past).any(1)).any():
            return failed(
                f"the initial noise is that of training step {number}; of {int(again.sum())} of {len(flat)} samples",
                _SEEDED,
                cause="noise_reused",
                drawn_at_step=number,
            )
    twins = _alike(flat, flat).triu(1)
    strange = [(left, right) for left, right in twins.nonzero().tolist() if prompts[left] != prompts[right]]
    if strange:
        pairs = ", ".join(f"{left} and {right}" for left, right in strange)
        return failed(
            f"samples of different prompts begin with the same noise; samples {pairs}",
            _SEEDED,
            cause="noise_reused",
        )
    drawn = flat[~twins.any(0)]  # the noise of an earlier sample tells nothing more
    values = Metrics(moments(drawn)).compute()
    errors, _, text = _worst_moment(values, drawn.numel())
    if not errors <= ERRORS:
        return failed(
            f"the initial noise {text}, {errors:.3g} standard errors off; mean {values['mean']:.3g}, std "
            f"{values['std']:.4g}",
            _SEEDED,
            cause="noise_scale",
        )
    message = "standard normal, and drawn once"
    if twins.any():
        message += "; samples of one prompt begin with the same noise"
    window = captured.legs.window
    if window is None or not captured.legs.agrees or _num_at_bound(stack):  # what was clamped is no noise
        message += (
            "; noise of the window's steps is not judged, since its replay differs or was not made, or its "
        )
        message += "latents were clamped"
    elif (finding := _of_steps(window, captured.legs.convention)) is not None:
        return finding
    return passed(f"{message}; initial noise: mean {values['mean']:.2g}, std {values['std']:.4g}")


def _of_steps(window: Window, convention: Convention | None) -> Finding | None:
    """The finding on the noise of the window's steps; None where it is standard normal, or not known well enough."""
    flat = window.noise.flatten(2).flatten(0, 1).cpu()
    shared = _alike(flat, flat).triu(1).nonzero().tolist()
    if shared:
        left, right = shared[0]
        return failed(
            f"steps of the window share their noise; terms {left} and {right}",
            _SEEDED,
            cause="noise_reused",
        )
    told = window.distance <= LARGEST_DISTANCE  # rounding does not hide its noise
    if convention is None or not told.any():  # without log-probs its spread is that of the noise level
        return None
    noise, gap = window.noise[told], float(window.distance[told].square().mean().sqrt())
    errors, _, text = _worst_moment(Metrics(moments(noise)).compute(), noise.numel(), gap)
    if errors <= ERRORS:
        return None
    return failed(
        f"the noise of the window's steps {text}, {errors:.3g} standard errors off; log-probs agree with the replay, "
        "so that their mean and std are right",
        "add s times standard normal noise to the step's mean",
        cause="noise_scale",
    )


def check_captured_latents(captured: Captured) -> Finding | None:
    values, count = captured.stack.samples.tensors().get("next_latents"), _num_at_bound(captured.stack)
    if values is None or count is None:
        return None
    largest = float(values.abs().max())
    if count:
        return failed(
            f"latents after the window's steps were clamped to {largest:.4g}: {count} elements have exactly this size",
            LATENTS.remedy,
            cause="latents_clamped",
        )
    return passed(f"latents were not clamped; the largest is {largest:.3g}")


def _num_at_bound(stack: Stack) -> int | None:
    """Number of clamped elements in the latents after the window's steps; None if rounding hides it."""
    values = stack.samples.tensors().get("next_latents")
    if values is None or stored_in(values) is not None:
        return None
    return int(at_bound(values.flatten(2).flatten(0, 1)).sum())


def _alike(rows: Tensor, others: Tensor) -> Tensor:
    """`[N, M]` bool, whether two draws are one, or nearly."""
    return _correlations(rows, others) > SHARED
