"""Questions about what an engine returned: the largest healthy answer to each, and what to do about a larger one.

A training step asks them of its batch, a replay of single images, and the doctor of an engine at hand or of captured
samples. The numbers are those of `witnesses`, `outside` and the decoder. Where the doctor has numbers that a training
step lacks (the engine's own means, medians over many samples), its checks hold a narrower limit; remedies are the same.
"""

from __future__ import annotations

from dataclasses import dataclass

ERRORS = 6.0  # standard errors; chance exceeds this twice in 1e9 times


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What may be asked of a rollout.

    Attributes:
        limit: the largest healthy answer.
        remedy: what to do about a larger one.
    """

    limit: float
    remedy: str


_SEEDS = "(seed, training step, group, member)"

SIGMAS = Question(
    limit=1e-5,  # float32 tables agree within 6e-8; bfloat16 sigmas differ by 1e-3
    remedy="give both stacks one scheduler config (shift, dynamic shift) and one sampling.num_inference_steps, and "
    "take sigmas from the table by step index, in float32",
)
WINDOWS = Question(
    limit=0.0,  # samples
    remedy="pass sampling.sde_window_size, sde_window_range (half-open), sde_window_layout and window_per with every "
    "request and read them per request, or take the steps that flowcorr.sde.draw_windows gives",
)
LATENTS = Question(
    limit=0.0,  # samples
    remedy="draw, keep and return latents in float32, the initial noise included, and leave them as they are between "
    "the steps",
)
TRAJECTORIES = Question(
    limit=0.0,  # samples
    remedy=f"draw the initial noise by flowcorr.sde.initial_noise of {_SEEDS}, and return the latents before and after "
    "each step of the window as they were",
)
STDS = Question(
    limit=1e-4,  # relative; float32 agrees within 1e-7, a noise level of .8 instead of .7 gives .14
    remedy="sample with sampling.sde_type and sampling.noise_level, and return the full std of a step",
)
LOG_PROBS = Question(
    limit=1e-5,  # nats; float32 gives 1e-6, rounding to bfloat16 2e-3, and noise rounded to bfloat16 1e-4
    remedy="score with flowcorr.sde.log_prob: the mean over the elements, with its normaliser, in float32; return the "
    "latents, means and stds that were scored",
)
STEP_NOISE = Question(
    limit=ERRORS,
    remedy=f"add s times flowcorr.sde.step_noise of {_SEEDS} and step index to the mean, in float32, and leave the "
    "latents as they are",
)
_NO_LOG_PROB = "no log-prob sees these steps: compare"
BEFORE = Question(
    limit=4.0,  # errors of the window; clean runs (bf16, fp8, int8, int4, guidance) give at most 1.8
    remedy=f"{_NO_LOG_PROB} initial noise, prompt embeddings, guidance, timesteps and schedule before the window in "
    "both stacks",
)
BETWEEN = Question(
    limit=4.0,
    remedy=f"{_NO_LOG_PROB} embeddings, guidance and schedule of the steps between those of the window in both stacks, "
    "and return the latents before and after each SDE step",
)
AFTER = Question(
    limit=4.0,
    remedy=f"{_NO_LOG_PROB} prompt embeddings, guidance, timesteps and schedule after the window in both stacks, and "
    "leave latents as they are between the steps",
)
# Its limit follows from both decoders, see `precision.image_limit`.
IMAGES_REMEDY = (
    "compare the VAEs, their scaling, shift and tiling, the order of channels, that of the images in a batch, and what "
    "encodes or resizes images on their way; rewards score the engine's images"
)
REWARD = Question(
    limit=0.1,  # standard deviations of the scores
    remedy="compare the order of images, their channels and size, and the unit of the reward; the scores of a judge "
    "that samples its answers are not repeatable",
)
