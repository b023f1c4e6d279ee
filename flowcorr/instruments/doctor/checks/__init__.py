"""All checks in order: of trials of the engine at hand, of captured samples of another trainer, or of both.

Each tests one explanation of the gap between rollout engine and actor. An explanation is accepted if most of the gap
disappears under it. So a check does not fail for the fault of another part. A gap that no check explains fails the
check `weights`; of captured samples, it warns at the legs that have it.

This table is read without torch; `checks.run` has the functions that answer its questions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A check of the doctor, about trials, about captured samples, or about both.

    Attributes:
        name: of the check, and the cause of its findings unless they name another.
        trials: the question about trials of the engine at hand; empty if there is none.
        captured: the question about captured samples; empty if there is none.
        blockers: checks whose failure makes the result on trials meaningless. Checks of captured samples have none,
            because each replays its own captured values.
        causes: the meaning of each cause that its findings on captured samples name.
    """

    name: str
    trials: str = ""
    captured: str = ""
    blockers: Sequence[str] = ()
    causes: Mapping[str, str] = field(default_factory=dict)


_TRAJECTORY = ("finite", "schedule", "samples", "latent_dtype", "transition", "log_probs", "bookkeeping")
_INPUTS = (*_TRAJECTORY, "timesteps", "embeddings", "references", "guidance")
CHECKS: Sequence[Check] = (
    Check(
        name="adapter",
        trials=(
            "Whether the model family does what its diffusers pipeline's own call does: schedule, transformer's "
            "inputs, guidance and decoding."
        ),
    ),
    Check(
        name="finite",
        trials="Whether all numbers of both sides are finite, the pixels before they became integers among them.",
    ),
    Check(
        name="schedule",
        trials="Whether the sigmas are those of the actor's schedule.",
        captured="Whether the captured sigmas and timesteps are those of the model's own scheduler, and were used.",
        blockers=("finite",),
        causes={
            "wrong_shift": "the sigmas, captured or used, are those of the model's scheduler with another shift",
            "other_schedule": "the sigmas are not those of the model's own scheduler",
            "timesteps": "the timesteps are not those of the model's own scheduler, or not those of their step",
            "rounded_sigmas": "the table of sigmas is in half precision",
            "rounded_timesteps": "the transformer was fed timesteps in half precision",
            "step_indices": "the captured steps of the window lie one place off, as where they are counted from 1",
        },
    ),
    Check(
        name="samples",
        trials="Whether each sample is returned once.",
        blockers=("finite",),
    ),
    Check(
        name="window",
        trials="Whether the SDE steps are those of the configured windows.",
        blockers=("finite", "schedule", "samples"),
    ),
    Check(
        name="latent_dtype",
        trials="Whether the latents are float32, and were not clamped.",
        captured="Whether the captured latents were not clamped.",
        blockers=("finite",),
        causes={"latents_clamped": "latents were clamped after a step"},
    ),
    Check(
        name="transition",
        trials="Whether the steps' stds are those of the configuration.",
        captured=(
            "Whether the window's steps are those of the captured noise level and sde_type, and would not be "
            "those of others."
        ),
        blockers=("finite", "schedule"),
        causes={
            "noise_level": "the engine sampled at another noise level; the message has it",
            "sde_type": "the engine's steps are of another sde_type",
            "sigma_max": "the first step takes another number for the noise level 1",
        },
    ),
    Check(
        name="before",
        captured="Whether the replay goes from the initial noise to the latents before the window.",
        causes={"initial_noise_scale": "the engine began at another multiple of the initial noise"},
    ),
    Check(
        name="log_probs",
        trials="Whether log-probs follow from the engine's own step means, stds and latents.",
        captured="Whether captured log-probs are those of the replay, as means of a density.",
        blockers=("finite", "latent_dtype"),
        causes={
            "log_probs_summed": "log-probs are sums over the latent or its channels, where means are expected",
            "log_probs_std": "log-probs are scored with a std that lacks the root of the step",
            "log_probs_order": "log-probs are those of other steps or samples",
            "log_probs_normaliser": "log-probs lack `- log s` or `- log(2 pi) / 2`, and the trainer's have it",
            "log_probs_unscaled": "log-probs lack the factor `1 / (2 s^2)`",
        },
    ),
    Check(
        name="between",
        captured="Whether the replay goes from the latents after a step of the window to those before its next one.",
    ),
    Check(
        name="after",
        captured="Whether the replay goes from the latents after the window to the final ones.",
    ),
    Check(
        name="bookkeeping",
        trials=(
            "Whether `z = (delta + r^2/2) sqrt(D) / r` is standard normal, as it is if only the step means "
            "differ."
        ),
        blockers=("finite", "schedule", "latent_dtype", "transition", "log_probs"),
    ),
    Check(
        name="trajectory",
        trials=(
            "Whether latents fit together where they leave no choice, and begin at the initial noise of their "
            "seeds."
        ),
        blockers=("finite", "samples", "window", "latent_dtype", "log_probs", "bookkeeping"),
    ),
    Check(
        name="noise",
        trials=(
            "Whether whitened step noise `(x' - mean) / s` is standard normal, and independent between any two "
            "steps."
        ),
        captured="Whether initial noise, and the noise of the steps, is standard normal and not drawn twice.",
        blockers=("finite", "samples", "latent_dtype", "log_probs", "bookkeeping"),
        causes={
            "noise_reused": "noise was drawn twice",
            "noise_scale": "noise is not standard normal",
            "noise_outside": "a step outside the window has noise, too, which no log-prob sees",
        },
    ),
    Check(
        name="determinism",
        trials="Whether the same seeds give the same latents.",
        blockers=("finite",),
    ),
    Check(
        name="seeds",
        trials="Whether the step noise is that of its seeds, element by element.",
        blockers=(
            *("finite", "samples", "window", "latent_dtype", "transition"),
            *("log_probs", "bookkeeping", "noise", "determinism"),
        ),
    ),
    Check(
        name="timesteps",
        trials="Whether the engine's model gets the schedule's timesteps, and returns them.",
        blockers=_TRAJECTORY,
    ),
    Check(
        name="embeddings",
        trials="Whether both sides use the same prompts: by the returned embeddings, then by the engine's steps.",
        captured="Whether the replay agrees with the captured prompts, and would not with others.",
        blockers=(*_TRAJECTORY, "timesteps"),
        causes={
            "wrong_prompt": "the engine took the embeddings of other samples, or of an earlier batch",
            "sequence_length": "prompts are cut or padded to another length",
            "references": "the reference images are those of other samples, mirrored, or have red and blue exchanged",
        },
    ),
    Check(
        name="references",
        trials="Whether the engine's transformer sees the reference images as the actor's does, by its steps.",
        blockers=(*_TRAJECTORY, "timesteps", "embeddings"),
    ),
    Check(
        name="guidance",
        trials="Whether the engine samples with the configured guidance.",
        captured="Whether the replay agrees with the captured guidance, and would not without it.",
        blockers=(*_TRAJECTORY, "timesteps", "embeddings", "references"),
        causes={
            "guidance_off": "the engine took no guidance",
            "guidance_scale": "the engine took another guidance scale; the message has it",
            "guidance_steps": "some steps of the schedule had no guidance",
            "guidance_swapped": "the two halves of guidance are exchanged",
            "guidance_rescaled": "the engine rescales the guided velocity; the message has the share",
            "negative_prompt": "the engine took an empty negative prompt, another one, or zeros",
        },
    ),
    Check(
        name="batch_shape",
        trials="Whether a prompt gives the same latents alone and in a batch.",
        blockers=("finite", "samples", "determinism", "embeddings", "references", "guidance"),
    ),
    Check(
        name="sync",
        trials="Whether the engine samples with the newest weights, or with older ones.",
        blockers=_INPUTS,
    ),
    Check(
        name="weights",
        trials="Whether both models are the same: whether precision explains the gap.",
        blockers=(*_INPUTS, "sync"),
    ),
    Check(
        name="lora",
        trials="Whether the adapter has the same effect in the engine as in the actor.",
        captured="Whether the replay agrees with the captured adapter, and would not without it.",
        blockers=(*_INPUTS, "sync", "weights"),
        causes={
            "adapter_not_applied": "the engine sampled with the base model",
            "adapter_partial": "the adapter is missing from the layers of one name",
            "adapter_scale": "the engine applied the adapter twice, or at another scale; the message has it",
        },
    ),
    Check(
        name="attention",
        trials="Which attention each side uses, if the gap is large.",
        blockers=(*_INPUTS, "sync", "weights", "lora"),
    ),
    Check(
        name="path",
        trials="Whether the steps outside the window lead where the actor's do, from the engine's own latents.",
        blockers=(*_INPUTS, "window", "trajectory", "noise", "sync", "weights", "lora"),
    ),
    Check(
        name="images",
        trials="Whether each image is that of its own final latents, as the actor decodes them.",
        captured="Whether captured images are what the training stack decodes of their final latents.",
        blockers=("finite",),
        causes={
            "swapped_images": "images and latents of different samples are paired",
            "images_of_step_before": "images and latents of different training steps are paired",
            "decoder_unscaled": "the decoder lacks its scaling factor or its shift, applies them twice, or has another",
            "decoded_early": "the latents before the last step were decoded",
            "images_changed": "the images are brighter than the decoder's, or were stored as JPEG",
            "frames": "the frames of a video are reversed, repeated or left out",
            "channels_reversed": "red and blue of the images are exchanged",
            "flipped_images": "the images are upside down",
        },
    ),
    Check(
        name="trainer",
        captured="Whether the trainer's log-probs of the captured samples are those of the replay.",
    ),
    Check(
        name="reward",
        captured=(
            "Whether the recipe's reward gives the captured images the captured scores, where it failed neither "
            "time."
        ),
    ),
    Check(
        name="advantages",
        captured="Whether advantages are centred, and follow the rewards of a prompt's images, over all dumped steps.",
        causes={
            "advantages_not_centred": "advantages have a mean far from 0, so all samples are pushed one way",
            "advantages_reversed": "advantages fall where rewards rise, so the worse images are learned",
        },
    ),
    Check(
        name="clip",
        trials="Whether the clip range is wider than the noise floor, in modes where that matters.",
        blockers=(*_INPUTS, "sync", "weights", "lora"),
    ),
)
"""In the order of execution."""
CAUSES = {cause: meaning for check in CHECKS for cause, meaning in check.causes.items()}
"""What each cause means that a check of captured samples names; that of another finding is its check."""
CHECK_OF = {cause: check.name for check in CHECKS for cause in check.causes}
"""The check of captured samples that names a cause."""
