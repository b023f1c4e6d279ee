"""Checks of the trajectory without the model: schedule, window, latents and stds."""

from __future__ import annotations

import itertools

import torch

from flowcorr.health.finding import Finding
from flowcorr.instruments.doctor.exam import Exam
from flowcorr.instruments.doctor.findings import failed, judged, passed
from flowcorr.questions.question import SIGMAS, WINDOWS
from flowcorr.rollout.broken import overflow
from flowcorr.rollout.precision import decoder_dtype


def check_finite(exam: Exam) -> Finding:
    config, trials = exam.config, exam.trials
    for trial in (trials.base, trials.bare, trials.moved):
        window, final = trial.rollout.window, trial.rollout.final_latents
        of_engine = [window.latents, window.next_latents, trial.engine_means, trial.rollout.log_probs]
        of_engine += [] if final is None else [final]
        for side, tensors, dtype in (
            ("engine", of_engine, f"rollout.dtype={config.rollout.dtype}"),
            ("actor", [trial.means, trial.log_probs], f"model.dtype={config.model.dtype}"),
        ):
            if not all(bool(tensor.isfinite().all()) for tensor in tensors):
                return failed(
                    f"the {side} returns values that are not finite",
                    f"{overflow('its weights are damaged', dtype)}: check the model's files and the adapter",
                    side=side,
                )
        undecoded = trial.rollout.finite_images
        if undecoded is not None and not bool(undecoded.all()):
            bad = (~undecoded).nonzero().flatten().tolist()
            return failed(
                f"the engine's latents are finite, and the pixels decoded from them are not: {len(bad)} of "
                f"{len(undecoded)} images, the first is that of sample {bad[0]}",
                remedy=overflow("the weights of its VAE are damaged", decoder_dtype(config))
                + ": check the model's files",
                images=len(undecoded),
                not_finite=len(bad),
                first_sample=bad[0],
            )
    return passed("latents, means, log-probs and decoded pixels are finite")


def check_schedule(exam: Exam) -> Finding:
    trial = exam.trials.base
    steps, gap = len(trial.schedule.timesteps), float(trial.sigma_errors.max())
    table = trial.rollout.window.sigmas.new_tensor(trial.schedule.sigmas)
    halves = torch.equal(trial.rollout.window.sigmas, table.to(torch.bfloat16).float()[trial.places])
    why = ": they are rounded to bfloat16" if halves else ""
    return judged(
        gap,
        SIGMAS.limit,
        f"the sigmas are those of the actor's {steps} steps",
        f"sigmas differ from the actor's schedule of {steps} steps by up to {gap:.2g}{why}",
        SIGMAS.remedy,
        dtype="bfloat16" if halves else None,
    )


def check_window(exam: Exam) -> Finding:
    rollout, sampling = exam.trials.base.rollout, exam.config.sampling
    low, high = sampling.sde_window_range
    indices, size = rollout.window.step_indices, sampling.sde_window_size
    wrong = indices != (rows := exam.trials.base.places)
    if bool(wrong.any()):
        step_index, sigma_of = int(indices[wrong][0]), int(rows[wrong][0])
        return failed(
            f"a step has index {step_index}, but the sigma of step {sigma_of}",
            WINDOWS.remedy,
            step_index=step_index,
            sigma_of=sigma_of,
        )
    kind = "consecutive" if sampling.sde_window_layout == "consecutive" else "ascending"
    steps = f"{size} {kind} steps within [{low}, {high})"
    for compared in (exam.trials.base, exam.trials.moved):
        window, asked = compared.rollout.window.step_indices.tolist(), compared.windows.tolist()
        others = compared.other_windows.nonzero().flatten().tolist()
        if others:
            return failed(
                f"{len(others)} of {len(asked)} samples have other SDE windows than their seeds give, {steps}: sample "
                f"{others[0]} has the steps {window[others[0]]} instead of {asked[others[0]]}",
                WINDOWS.remedy,
                samples_off=len(others),
                range=[low, high],
            )
    return passed(f"windows are {steps}")


def check_samples(exam: Exam) -> Finding:
    """Whether the engine returns each sample once; noise that several samples share is judged by `check_noise`."""
    rollout, start = exam.trials.base.rollout, exam.trials.base.start
    window = rollout.window
    for first, second in itertools.combinations(range(rollout.num_samples), 2):
        twins = all(torch.equal(rows[first], rows[second]) for rows in (window.latents, window.next_latents))
        if twins and not torch.equal(start[first], start[second]):
            return failed(
                f"sample {second} has the trajectory of sample {first}, to the bit, though their noise differs: one of "
                "them is missing",
                remedy="return each sample of a batch once, in the order of the requests",
                sample=second,
                has_trajectory_of=first,
            )
    return passed("each sample is returned once")
