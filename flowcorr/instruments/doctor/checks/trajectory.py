"""Checks of the trajectory without the model: schedule, window, latents and stds."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from flowcorr.instruments.doctor.exam import Exam
from flowcorr.instruments.doctor.findings import failed, judged, passed
from flowcorr.instruments.doctor.trials import TRAINING_STEP, asked_windows
from flowcorr.instruments.finding import Finding
from flowcorr.instruments.gap_words import percent
from flowcorr.rollout import witnesses
from flowcorr.rollout.broken import decoder_dtype, overflow

STD_TOLERANCE = 1e-4  # float32 stds agree within 1e-7; a noise level of 0.8 instead of 0.7 gives 0.14


def check_finite(exam: Exam) -> Finding:
    trials = exam.trials
    for trial in (trials.base, trials.bare, trials.moved):
        for who, tensors in (
            (
                "engine",
                (
                    trial.rollout.window.latents,
                    trial.rollout.window.next_latents,
                    *([] if trial.rollout.final_latents is None else [trial.rollout.final_latents]),
                    trial.engine_means,
                    trial.rollout.log_probs,
                ),
            ),
            ("actor", (trial.means, trial.log_probs)),
        ):
            if not all(bool(tensor.isfinite().all()) for tensor in tensors):
                config = exam.config
                dtype = (
                    f"rollout.dtype={config.rollout.dtype}"
                    if who == "engine"
                    else f"model.dtype={config.model.dtype}"
                )
                return failed(
                    f"the {who} returns values that are not finite",
                    remedy=f"{overflow('its weights are damaged', dtype)}: check the model's files and the "
                    "adapter",
                    side=who,
                )
        undecoded = trial.rollout.finite_images
        if undecoded is not None and not bool(undecoded.all()):
            bad = (~undecoded).nonzero().flatten().tolist()
            return failed(
                f"the engine's latents are finite, and the pixels decoded from them are not: {len(bad)} of "
                f"{len(undecoded)} images, the first is that of sample {bad[0]}",
                remedy=overflow("the weights of its VAE are damaged", decoder_dtype(exam.config))
                + ": check the model's files",
                images=len(undecoded),
                not_finite=len(bad),
                first_sample=bad[0],
            )
    return passed("latents, means, log-probs and decoded pixels are finite")


def check_schedule(exam: Exam) -> Finding:
    rollout, schedule = exam.trials.base.rollout, exam.trials.schedule
    sigmas, after = _table(exam)[:-1], _table(exam)[1:]
    rows = places(exam)
    gaps = (rollout.window.sigmas - sigmas[rows]).abs(), (rollout.window.sigmas_next - after[rows]).abs()
    gap = float(torch.stack(gaps).max())
    steps = len(schedule.timesteps)
    rounded = sigmas.to(torch.bfloat16).float()[rows]
    halves = torch.equal(rollout.window.sigmas, rounded)
    why = ": they are rounded to bfloat16" if halves else ""
    return judged(
        gap,
        witnesses.SIGMA_TOLERANCE,
        f"the sigmas are those of the actor's {steps} steps",
        f"sigmas differ from the actor's schedule of {steps} steps by up to {gap:.2g}{why}",
        "give both stacks one scheduler config (shift, dynamic shift) and one sampling.num_inference_steps, and "
        "take sigmas from the table by step index",
        dtype="bfloat16" if halves else None,
    )


def check_window(exam: Exam) -> Finding:
    rollout, sampling = exam.trials.base.rollout, exam.config.sampling
    low, high = sampling.sde_window_range
    found, size = rollout.window.step_indices, sampling.sde_window_size
    remedy = (
        "pass sampling.sde_window_size, sde_window_range (half-open), sde_window_layout and window_per with every "
        "request, and read them per request"
    )
    wrong = found != (rows := places(exam))
    if bool(wrong.any()):
        step_index, sigma_of = int(found[wrong][0]), int(rows[wrong][0])
        return failed(
            f"a step has index {step_index}, but the sigma of step {sigma_of}",
            remedy=remedy,
            step_index=step_index,
            sigma_of=sigma_of,
        )
    consecutive = sampling.sde_window_layout == "consecutive"
    kind = "consecutive" if consecutive else "ascending"
    gaps = found.diff(dim=1)
    fits = found.shape[1] == size and bool(((gaps == 1) if consecutive else (gaps > 0)).all())
    if not fits or int(found.min()) < low or int(found.max()) >= high:
        windows = sorted({tuple(row) for row in found.tolist()})
        return failed(
            f"the SDE windows {windows} are not {size} {kind} steps within [{low}, {high})",
            remedy=remedy,
            windows=windows,
            range=[low, high],
        )
    of_prompts = found.unflatten(0, (exam.trials.num_prompts, -1))
    if sampling.window_per == "group" and bool((of_prompts != of_prompts[:, :1]).any()):
        return failed("the images of one prompt have different windows", remedy=remedy)
    trials = exam.trials
    for window, training_step in (
        (found, TRAINING_STEP),
        (trials.moved.rollout.window.step_indices, trials.moved_step),
    ):
        asked = asked_windows(exam.config, trials.num_prompts, training_step).to(window.device)
        others = (window != asked).any(1).nonzero().flatten().tolist()
        if others:
            return failed(
                f"{len(others)} of {len(asked)} samples have other SDE windows than their seeds give: sample "
                f"{others[0]} has the steps {window[others[0]].tolist()} instead of {asked[others[0]].tolist()}",
                remedy=f"{remedy}, or take the steps that flowcorr.sde.draw_windows gives",
                samples_off=len(others),
            )
    return passed(f"windows are {size} {kind} steps within [{low}, {high})")


def check_latent_dtype(exam: Exam) -> Finding:
    rollout = exam.trials.base.rollout
    remedy = "draw, keep and return the latents in float32, the initial noise included"
    for when, latents in (("before", rollout.window.latents), ("after", rollout.window.next_latents)):
        for place, states in enumerate(latents.unbind(1)):
            for dtype in (torch.bfloat16, torch.float16):
                if torch.equal(states, states.to(dtype).float()):
                    return failed(
                        f"the latents {when} step {place} of the window are all {str(dtype)[6:]} numbers: they were "
                        "rounded",
                        remedy=remedy,
                    )
    coarse = int(witnesses.coarse_latents(rollout).sum())
    if coarse:
        return failed(
            f"{coarse} of {rollout.num_samples} samples have latents that were rounded to half precision, or of which "
            "several elements have exactly the largest size: they were clamped",
            remedy=f"{remedy}, and leave them as they are",
        )
    return passed("the trajectory is float32")


def check_trajectory(exam: Exam) -> Finding:
    for trial, training_step in (
        (exam.trials.base, TRAINING_STEP),
        (exam.trials.moved, exam.trials.moved_step),
    ):
        start = witnesses.seeded_start(
            trial.rollout,
            seed=exam.config.trainer.seed,
            training_step=training_step,
            same_in_group=exam.config.rollout.same_initial_noise,
        )
        broken = witnesses.broken_trajectories(trial.rollout, start, exam.config.sampling.num_inference_steps)
        if bool(broken.any()):
            return failed(
                f"the latents of {int(broken.sum())} of {len(broken)} samples do not fit together, or do not begin at "
                f"the initial noise of their seeds: sample {int(broken.nonzero()[0])} is the first",
                remedy="draw the initial noise by flowcorr.sde.initial_noise of (seed, training step, group, member), "
                "and return the latents before and after each step of the window as they were",
            )
    return passed("latents fit together from the initial noise of their seeds")


def check_samples(exam: Exam) -> Finding:
    """Whether the engine returns each sample once; noise that several samples share is judged by `check_noise`."""
    rollout = exam.trials.base.rollout
    start = witnesses.seeded_start(
        rollout,
        seed=exam.config.trainer.seed,
        training_step=TRAINING_STEP,
        same_in_group=exam.config.rollout.same_initial_noise,
    )
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


def check_transition(exam: Exam) -> Finding:
    trial, sampling = exam.trials.base, exam.config.sampling
    gap = float((trial.engine_stds / trial.stds - 1).abs().max())
    return judged(
        gap,
        STD_TOLERANCE,
        "the steps' stds agree",
        f"the engine's step stds differ by up to {percent(gap)}",
        f"sample with sampling.sde_type={sampling.sde_type} and sampling.noise_level={sampling.noise_level}; "
        "return the full std of a step",
    )


def _table(exam: Exam) -> Tensor:
    return torch.tensor(exam.trials.schedule.sigmas, device=exam.trials.base.rollout.window.sigmas.device)


def places(exam: Exam) -> Tensor:
    """Step indices `[B, T]` of the actor's schedule with the sigmas closest to the trajectory's."""
    return (exam.trials.base.rollout.window.sigmas[..., None] - _table(exam)[:-1]).abs().argmin(-1)
