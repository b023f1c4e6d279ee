"""Known faults of rollout engines, one row each, which `python -m tests.planted` plants in an engine.

A size says how large a fault is; of a fault without one there is only all or nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from flowcorr.config.schema import Config
from flowcorr.errors import ConfigError, unknown_choice
from flowcorr.instruments.doctor.examination import first_prompts
from flowcorr.rollout.emulate import round_weight
from tests.planted import mistakes, plants
from tests.planted.plants import Plant


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault.

    Attributes:
        name: its name.
        stands_for: the mistake in words.
        plant: a size -> what plants a fault of that size in an engine.
        size: a large size, at which the fault does harm; None if it has none.
        applies: whether a run can have it.
    """

    name: str
    stands_for: str
    plant: Callable[[float], Plant]
    size: float | None = None
    applies: Callable[[Config], bool]


def parse_fault(text: str, config: Config) -> tuple[Fault, float]:
    """The row of `FAULTS` and the size that `NAME` or `NAME=SIZE` stands for.

    Raises:
        ConfigError: there is no such fault, it has no size, or a run of this configuration cannot have it.
    """
    name, _, number = text.partition("=")
    found = next((fault for fault in FAULTS if fault.name == name), None)
    if found is None:
        raise ConfigError(unknown_choice("--fault", name, [fault.name for fault in FAULTS]))
    if not found.applies(config):
        raise ConfigError(
            f"--fault {name} has nothing to change in this run ({found.stands_for}); choose another fault, or override "
            "the keys that it concerns"
        )
    if not number:
        return found, found.size or 0.0
    try:
        size = float(number)
    except ValueError:
        size = math.nan
    if found.size is None or not 0 < size < math.inf:
        allowed = (
            "it has no size: leave it away"
            if found.size is None
            else f"give a number, such as {found.size:g}"
        )
        raise ConfigError(f"--fault {text}: {allowed}")
    return found, size


def _whole(
    name: str, stands_for: str, plant: Plant, *, applies: Callable[[Config], bool] = lambda config: True
) -> Fault:
    """A fault without a size."""
    return Fault(name=name, stands_for=stands_for, plant=lambda size: plant, applies=applies)


def _sized(
    name: str,
    stands_for: str,
    plant: Callable[[float], Plant],
    size: float,
    *,
    applies: Callable[[Config], bool] = lambda config: True,
) -> Fault:
    """A fault that `size` makes larger or smaller."""
    return Fault(name=name, stands_for=stands_for, plant=plant, size=size, applies=applies)


def _guided(config: Config) -> bool:
    return max(config.sampling.guidance_scale, config.sampling.true_cfg_scale) > 1


def _edits(config: Config) -> bool:
    return bool(first_prompts(config, 2)[0].images)


def _adapted(config: Config) -> bool:
    return config.model.lora.rank > 0


def _several_steps(config: Config) -> bool:
    return config.sampling.sde_window_size > 1


def _free_layout(config: Config) -> bool:
    low, high = config.sampling.sde_window_range
    return 1 < config.sampling.sde_window_size < high - low


def _free_windows(config: Config) -> bool:
    low, high = config.sampling.sde_window_range
    return config.sampling.sde_window_size < high - low


def _has_tail(config: Config) -> bool:
    return config.sampling.sde_window_range[1] < config.sampling.num_inference_steps - 1


FAULTS: Sequence[Fault] = (
    _whole("latents_nan", "a latent that is not finite", plants.returning(latents=mistakes.spoiled)),
    _whole(
        "latents_bfloat16",
        "latents are rounded to bfloat16 when they are returned",
        plants.returning(latents=lambda rollout: plants.rounded(rollout.window.latents)),
    ),
    _whole(
        "next_latents_bfloat16",
        "latents are rounded to bfloat16 after they were scored",
        plants.returning(next_latents=lambda rollout: plants.rounded(rollout.window.next_latents)),
    ),
    _sized("latents_nudged", "latents move by so many units after they were scored", mistakes.nudged, 0.1),
    _sized("latents_clamped", "latents are clamped to 2.5 / size after a step", mistakes.clamped, 1.0),
    _whole(
        "indices_from_one",
        "steps are counted from 1",
        plants.returning(step_indices=lambda rollout: rollout.window.step_indices + 1),
    ),
    _whole(
        "log_probs_summed",
        "log-probs are sums over the latent",
        plants.returning(log_probs=lambda rollout: rollout.log_probs * rollout.num_elements),
    ),
    _whole(
        "log_probs_unnormalised",
        "log-probs lack their normaliser",
        plants.returning(log_probs=mistakes.without_normaliser),
    ),
    _whole(
        "log_probs_shuffled",
        "log-probs of another sample",
        plants.returning(log_probs=lambda rollout: rollout.log_probs.roll(1, 0)),
    ),
    _whole(
        "log_probs_bfloat16",
        "log-probs are rounded to bfloat16",
        plants.returning(log_probs=lambda rollout: plants.rounded(rollout.log_probs)),
    ),
    _sized(
        "log_probs_shifted",
        "log-probs are off by so many nats",
        lambda size: plants.returning(log_probs=lambda rollout: rollout.log_probs + size),
        0.05,
    ),
    _whole(
        "version_plus_one",
        "the engine counts the versions of its weights itself",
        plants.returning(policy_versions=lambda rollout: rollout.policy_versions + 1),
    ),
    _sized("schedule_shifted", "another shift of the sigmas", mistakes.shifted, 0.5),
    _whole(
        "sigmas_bfloat16",
        "sigmas are rounded to bfloat16",
        plants.scheduled(plants.with_sigmas(plants.rounded)),
    ),
    _whole(
        "tail_of_equal_steps", "another schedule after the windows", mistakes.equal_tail, applies=_has_tail
    ),
    _whole("layout_ignored", "sde_window_layout is ignored", mistakes.other_layout, applies=_free_layout),
    _whole("window_per_ignored", "window_per is ignored", mistakes.other_owner, applies=_free_windows),
    _whole(
        "window_late",
        "sde_window_range is read as if it began one later",
        mistakes.window_late,
        applies=_free_windows,
    ),
    _sized("noise_level", "noise_level is too large by this share", mistakes.noise_level, 0.2),
    _whole("sde_type_ignored", "another sde_type", mistakes.other_kind),
    _sized(
        "noise_large",
        "step noise is too large by this share",
        lambda size: plants.noisy(lambda noise: (1 + size) * noise),
        0.2,
    ),
    _sized(
        "noise_shifted",
        "step noise is off its mean",
        lambda size: plants.noisy(lambda noise: noise + size),
        0.2,
    ),
    _sized(
        "noise_uniform", "this share of the noise is uniform, of unit variance", mistakes.partly_uniform, 1.0
    ),
    _sized(
        "noise_clipped",
        "step noise is clipped to 2 / size",
        lambda size: plants.noisy(lambda noise: noise.clamp(-2 / size, 2 / size)),
        1.0,
    ),
    _whole(
        "noise_per_sample",
        "one noise for all steps of a sample",
        plants.seeded(lambda ids: {**ids, "step_index": 0}),
        applies=_several_steps,
    ),
    _whole(
        "noise_per_prompt",
        "one noise for all images of a prompt",
        plants.seeded(lambda ids: {**ids, "members": [0] * len(ids["members"])}),
    ),
    _whole("noise_for_two_prompts", "two ranks draw the same noise", plants.seeded(mistakes.half_of_groups)),
    _whole(
        "noise_every_step",
        "one noise for all training steps",
        plants.seeded(lambda ids: {**ids, "training_step": 0}),
    ),
    _sized(
        "noise_correlated",
        "the noise of a batch is correlated by the square of this number",
        lambda size: plants.noisy(lambda noise: mistakes.rows_alike(noise, size)),
        0.8,
    ),
    _whole(
        "other_seed",
        "another seed of the step noise",
        plants.seeded(lambda ids: {**ids, "seed": ids["seed"] + 1}),
    ),
    _whole("unseeded", "noise of a global generator", plants.forgets_the_seed),
    _whole("seeded_by_place", "noise belongs to places of the batch", plants.seeds_by_place),
    _whole("initial_noise", "same_initial_noise is ignored", mistakes.own_initial_noise),
    _whole(
        "timesteps_truncated",
        "the model gets whole timesteps, and others are returned",
        plants.feeding(torch.trunc),
    ),
    _whole(
        "timesteps_returned_truncated",
        "whole timesteps",
        plants.scheduled(plants.with_timesteps(torch.trunc)),
    ),
    _whole(
        "timesteps_divided",
        "the model gets timesteps up to 1",
        plants.feeding(lambda timesteps: timesteps / 1000),
    ),
    _sized(
        "timesteps_late",
        "the model gets timesteps that are too small by this share",
        lambda size: plants.feeding(lambda timesteps: (1 - size) * timesteps),
        0.1,
    ),
    _whole(
        "prompts_swapped", "the prompts of other samples", plants.conditioned(mistakes.rolled, told=False)
    ),
    _whole(
        "pooled_swapped",
        "the pooled embeddings of other prompts",
        plants.conditioned(mistakes.pooled_of_another, told=False),
    ),
    _sized("prompts_blank", "this share of a prompt's tokens is blank", mistakes.blank, 1.0),
    _sized("embeddings_noisy", "embeddings are off by this share", mistakes.noisy_embeddings, 0.5),
    _whole(
        "negative_blank",
        "no negative prompt",
        plants.conditioned(mistakes.no_negative, told=False),
        applies=_guided,
    ),
    _whole(
        "negative_of_another",
        "another prompt as negative prompt",
        plants.conditioned(mistakes.negative_of_another, told=False),
        applies=_guided,
    ),
    _whole(
        "guidance_exchanged",
        "prompt and negative prompt are exchanged",
        plants.conditioned(mistakes.sides_exchanged, told=False),
        applies=_guided,
    ),
    _whole("one_image_of_another", "one image has the prompt of another", mistakes.one_image_of_another),
    _whole("first_repeated", "the first sample again in place of the last", mistakes.first_repeated),
    _sized(
        "velocity_of_members",
        "velocities of each prompt's second image are too large by this share",
        lambda size: plants.in_some_images(
            lambda group, member: member == 1, lambda velocity, *arguments: (1 + size) * velocity(*arguments)
        ),
        0.05,
    ),
    _whole(
        "references_missing",
        "no reference images",
        plants.conditioned(mistakes.no_references, told=False),
        applies=_edits,
    ),
    _whole(
        "references_of_another",
        "reference images of other prompts",
        plants.on_references(lambda references: references.roll(1, 0)),
        applies=_edits,
    ),
    _sized(
        "references_scaled",
        "latents of reference images are too large by this share",
        lambda size: plants.on_references(lambda references: (1 + size) * references),
        0.5,
        applies=_edits,
    ),
    _whole(
        "references_bgr",
        "red and blue of reference images are exchanged",
        mistakes.references_reversed,
        applies=_edits,
    ),
    _whole(
        "references_misplaced",
        "other places of the reference images",
        plants.seeing(plants.misplaced),
        applies=_edits,
    ),
    _sized(
        "references_noisy",
        "latents of reference images are off by this share",
        lambda size: plants.on_references(
            lambda references: plants.perturbed(references, size, torch.Generator().manual_seed(6))
        ),
        0.5,
        applies=_edits,
    ),
    _whole(
        "prompts_blank_after",
        "prompts are blank after the windows",
        plants.at_steps(mistakes.steps_after_windows, plants.blanked),
        applies=_has_tail,
    ),
    _whole(
        "prompts_blank_first",
        "prompts are blank in the first step",
        plants.at_steps(lambda engine: range(1), plants.blanked),
    ),
    _sized(
        "guidance_larger",
        "guidance is stronger by this share",
        mistakes.guidance_larger,
        0.5,
        applies=_guided,
    ),
    _whole("guidance_off", "no guidance", mistakes.guidance_larger(-1.0), applies=_guided),
    _sized("guidance_rescaled", "guidance_rescale", plants.rescaled_guidance, 0.7, applies=_guided),
    _whole(
        "guidance_off_after",
        "no guidance after the windows",
        plants.at_steps(mistakes.steps_after_windows, plants.unguided),
        applies=lambda config: _guided(config) and _has_tail(config),
    ),
    _sized(
        "velocity_clamped",
        "velocities are clamped to 2 / size",
        lambda size: plants.seeing(
            lambda velocity, *arguments: velocity(*arguments).clamp(-2 / size, 2 / size)
        ),
        1.0,
    ),
    _whole("one_sync_behind", "weights of one sync ago", plants.one_sync_behind),
    _whole("sync_ignored", "new weights never arrive", plants.deaf_after_the_first_sync),
    _sized(
        "adapter_scaled",
        "the adapter acts too strongly by this share",
        lambda size: plants.merging(plants.scaled_up(1 + size)),
        1.0,
        applies=_adapted,
    ),
    _whole(
        "adapter_missing",
        "the adapter binds to no layer",
        plants.merging(plants.without_adapters(lambda name: False)),
        applies=_adapted,
    ),
    _whole(
        "adapter_on_half",
        "the adapter binds to every other block",
        plants.merging(plants.without_adapters(mistakes.in_even_block)),
        applies=_adapted,
    ),
    _whole(
        "adapter_not_on_text",
        "the adapter misses the projections of the text stream",
        plants.merging(plants.without_adapters(lambda name: "add_" not in name)),
        applies=_adapted,
    ),
    _whole(
        "adapters_swapped",
        "the adapters of two blocks are exchanged",
        plants.merging(mistakes.adapters_swapped),
        applies=_adapted,
    ),
    _sized("checkpoint", "another checkpoint, whose matrices differ by this share", mistakes.moved, 0.5),
    _sized("biases", "vectors of the model differ by this share", mistakes.moved_biases, 0.5),
    _whole("head_missing", "an attention head gives 0", plants.merging(mistakes.head_missing)),
    _whole("block_missing", "a feed-forward block gives 0", plants.merging(mistakes.block_missing)),
    _whole(
        "quantised",
        "weights are int8 without being asked",
        plants.merging(plants.matrices(lambda name, value: round_weight(value, "int8"))),
    ),
    _whole(
        "positions_rolled",
        "position embeddings are one place off",
        plants.merging(mistakes.positions_rolled),
        applies=lambda config: config.model.family in ("auto", "sd3"),
    ),
    _sized("other_vae", "another decoder, whose weights differ by this share", plants.another_vae, 0.5),
    _sized("vae_scaling", "the VAE's scaling factor is too large by this share", mistakes.vae_scaled, 0.5),
    _whole(
        "images_exchanged", "images of two samples are exchanged", plants.returning(images=mistakes.exchanged)
    ),
    _whole("images_bgr", "channels of images in reverse order", mistakes.decoded_flipped),
    _sized("images_brighter", "images are brighter by so many grey levels", mistakes.brighter, 16.0),
)
"""The table, in the order of the checks that name its rows."""
