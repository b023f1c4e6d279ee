"""Known faults of rollout engines, one row each, which `python -m tests.planted` plants in an engine in process.

A size says how large a fault is; of a fault without one there is only all or nothing.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flowcorr.config.schema import Config, SamplingConfig
from flowcorr.instruments.doctor.examination import first_prompts
from flowcorr.models import Conditioning, Guidance, Schedule
from flowcorr.records import Rollout
from flowcorr.rollout import InProcessEngine
from flowcorr.rollout.emulate import round_weight
from tests.planted import mistakes, plants
from tests.planted.fault import Fault, sized, whole
from tests.planted.plants import Merged, Plant


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


def _nudged(rollout: Rollout, size: float) -> Tensor:
    after = rollout.window.next_latents
    return after + size * torch.randn(after.shape, generator=torch.Generator().manual_seed(3)).to(after)


def _resampled(change: Callable[[SamplingConfig], dict[str, Any]]) -> Plant:
    """Other values of `sampling`: `change` gets the run's."""
    return lambda engine: plants.sampling_with(**change(engine.plan.sampling))(engine)


def _shifted(engine: InProcessEngine, size: float) -> Schedule:
    """Sigmas shifted by `1 + size`."""
    sigmas = torch.tensor(engine.plan.schedule.sigmas, dtype=torch.float64)
    moved = (1 + size) * sigmas / (1 + size * sigmas)
    largest = max(engine.plan.schedule.timesteps)
    return Schedule(sigmas=tuple(moved.tolist()), timesteps=tuple((largest * moved[:-1]).tolist()))


def _after_windows(engine: InProcessEngine) -> range:
    """The steps behind the last that a window can hold."""
    return range(engine.plan.sampling.sde_window_range[1], len(engine.plan.schedule.timesteps))


def equal_tail(engine: InProcessEngine) -> Schedule:
    """Steps of equal size after the windows."""
    first, sigmas = _after_windows(engine).start, list(engine.plan.schedule.sigmas)
    sigmas[first:] = torch.linspace(sigmas[first], 0, len(sigmas) - first).tolist()
    largest = max(engine.plan.schedule.timesteps)
    tail = [largest * sigma for sigma in sigmas[first:-1]]
    return Schedule(sigmas=tuple(sigmas), timesteps=(*engine.plan.schedule.timesteps[:first], *tail))


def _own_initial_noise(engine: InProcessEngine) -> None:
    engine.config = replace(engine.config, same_initial_noise=not engine.config.same_initial_noise)


def _partly_uniform(noise: Tensor, size: float) -> Tensor:
    chosen = torch.rand(noise.shape, generator=torch.Generator().manual_seed(7)) < size
    return torch.where(chosen.to(noise.device), plants.uniform(noise), noise)


def _blank(conditioning: Mapping[str, Tensor], size: float) -> Conditioning:
    blank = dict(conditioning)
    for name, rows in conditioning.items():
        if rows.dim() == 3 and not name.startswith("negative_"):
            kept = min(rows.shape[1] - 1, round((1 - size) * rows.shape[1]))
            blank[name] = torch.cat([rows[:, :kept], torch.zeros_like(rows[:, kept:])], 1)
    return blank


def _noisy_embeddings(conditioning: Mapping[str, Tensor], size: float) -> Conditioning:
    """Move embeddings at random, alike for all prompts."""
    draw = torch.Generator().manual_seed(6)
    moved = {}
    for name, rows in conditioning.items():
        same_for_all = torch.randn(rows[:1].shape, generator=draw).to(rows.device)
        moved[name] = (
            (rows + size * rows.float().std(correction=0) * same_for_all).to(rows.dtype)
            if rows.is_floating_point()
            else rows
        )
    return moved


def _stronger(guidance: Guidance, size: float) -> Guidance:
    return replace(
        guidance,
        guidance_scale=1 + (guidance.guidance_scale - 1) * (1 + size),
        true_cfg_scale=1 + (guidance.true_cfg_scale - 1) * (1 + size),
    )


def _in_even_block(name: str) -> bool:
    """Whether a parameter is in the blocks 0, 2, ..., or in none."""
    block = re.search(r"blocks\.(\d+)\.", name)
    return block is None or int(block[1]) % 2 == 0


def _block_missing(tensors: Mapping[str, Tensor], merge: Merged) -> Mapping[str, Tensor]:
    """The last block but one."""
    state = merge(tensors)
    block = sorted({name.split(".")[1] for name in state if "blocks." in name}, key=int)[-2]
    return {
        name: torch.zeros_like(value) if f"blocks.{block}.ff." in name else value
        for name, value in state.items()
    }


def _positions_rolled(tensors: Mapping[str, Tensor], merge: Merged) -> Mapping[str, Tensor]:
    state = merge(tensors)
    name = next(name for name in state if name.endswith("pos_embed.pos_embed"))
    return {**state, name: state[name].roll(1, 1)}


def _moved(size: float, chosen: Callable[[Tensor], bool]) -> Plant:
    """The `chosen` parameters moved at random by `size` of their spread."""

    def change(tensors: Mapping[str, Tensor], merge: Merged) -> Mapping[str, Tensor]:
        draw = torch.Generator().manual_seed(5)
        return {
            name: plants.perturbed(value, size, draw) if chosen(value) else value
            for name, value in merge(tensors).items()
        }

    return plants.merging(change)


def _decoded_flipped(engine: InProcessEngine) -> None:
    engine.family.pipeline.vae = copy.copy(engine.family.pipeline.vae)
    decode = engine.family.decode
    engine.family.decode = lambda latents: decode(latents).flip(1)  # type: ignore[method-assign]


FAULTS: Sequence[Fault] = (
    whole("latents_nan", "a latent that is not finite", plants.returning(latents=mistakes.spoiled)),
    whole(
        "latents_bfloat16",
        "latents are rounded to bfloat16 when they are returned",
        plants.returning(latents=lambda rollout: plants.rounded(rollout.window.latents)),
    ),
    whole(
        "next_latents_bfloat16",
        "latents are rounded to bfloat16 after they were scored",
        plants.returning(next_latents=lambda rollout: plants.rounded(rollout.window.next_latents)),
    ),
    sized(
        "latents_nudged",
        "latents move by so many units after they were scored",
        lambda size: plants.returning(next_latents=lambda rollout: _nudged(rollout, size)),
        0.1,
    ),
    sized(
        "latents_clamped",
        "latents are clamped to 2.5 / size after a step",
        lambda size: plants.returning(
            next_latents=lambda rollout: rollout.window.next_latents.clamp(-2.5 / size, 2.5 / size)
        ),
        1.0,
    ),
    whole(
        "indices_from_one",
        "steps are counted from 1",
        plants.returning(step_indices=lambda rollout: rollout.window.step_indices + 1),
    ),
    whole(
        "log_probs_summed",
        "log-probs are sums over the latent",
        plants.returning(log_probs=lambda rollout: rollout.log_probs * rollout.num_elements),
    ),
    whole(
        "log_probs_unnormalised",
        "log-probs lack their normaliser",
        plants.returning(log_probs=mistakes.without_normaliser),
    ),
    whole(
        "log_probs_shuffled",
        "log-probs of another sample",
        plants.returning(log_probs=lambda rollout: rollout.log_probs.roll(1, 0)),
    ),
    whole(
        "log_probs_bfloat16",
        "log-probs are rounded to bfloat16",
        plants.returning(log_probs=lambda rollout: plants.rounded(rollout.log_probs)),
    ),
    sized(
        "log_probs_shifted",
        "log-probs are off by so many nats",
        lambda size: plants.returning(log_probs=lambda rollout: rollout.log_probs + size),
        0.05,
    ),
    whole(
        "version_plus_one",
        "the engine counts the versions of its weights itself",
        plants.returning(policy_versions=lambda rollout: rollout.policy_versions + 1),
    ),
    sized(
        "schedule_shifted",
        "another shift of the sigmas",
        lambda size: plants.scheduled(lambda engine: _shifted(engine, size)),
        0.5,
    ),
    whole(
        "sigmas_bfloat16",
        "sigmas are rounded to bfloat16",
        plants.scheduled(plants.with_sigmas(plants.rounded)),
    ),
    whole(
        "tail_of_equal_steps",
        "another schedule after the windows",
        plants.scheduled(equal_tail),
        applies=_has_tail,
    ),
    whole(
        "layout_ignored",
        "sde_window_layout is ignored",
        _resampled(
            lambda own: {
                "sde_window_layout": "consecutive" if own.sde_window_layout == "scattered" else "scattered"
            }
        ),
        applies=_free_layout,
    ),
    whole(
        "window_per_ignored",
        "window_per is ignored",
        _resampled(lambda own: {"window_per": "sample" if own.window_per == "group" else "group"}),
        applies=_free_windows,
    ),
    whole(
        "window_late",
        "sde_window_range is read as if it began one later",
        _resampled(lambda own: {"sde_window_range": (own.sde_window_range[0] + 1, own.sde_window_range[1])}),
        applies=_free_windows,
    ),
    sized(
        "noise_level",
        "noise_level is too large by this share",
        lambda size: _resampled(lambda own: {"noise_level": own.noise_level * (1 + size)}),
        0.2,
    ),
    whole(
        "sde_type_ignored",
        "another sde_type",
        _resampled(lambda own: {"sde_type": "sde" if own.sde_type == "dance_sde" else "dance_sde"}),
    ),
    sized(
        "noise_large",
        "step noise is too large by this share",
        lambda size: plants.noisy(lambda noise: (1 + size) * noise),
        0.2,
    ),
    sized(
        "noise_shifted",
        "step noise is off its mean",
        lambda size: plants.noisy(lambda noise: noise + size),
        0.2,
    ),
    sized(
        "noise_uniform",
        "this share of the noise is uniform, of unit variance",
        lambda size: plants.noisy(lambda noise: _partly_uniform(noise, size)),
        1.0,
    ),
    sized(
        "noise_clipped",
        "step noise is clipped to 2 / size",
        lambda size: plants.noisy(lambda noise: noise.clamp(-2 / size, 2 / size)),
        1.0,
    ),
    whole(
        "noise_per_sample",
        "one noise for all steps of a sample",
        plants.seeded(lambda ids: {**ids, "step_index": 0}),
        applies=_several_steps,
    ),
    whole(
        "noise_per_prompt",
        "one noise for all images of a prompt",
        plants.seeded(lambda ids: {**ids, "members": [0] * len(ids["members"])}),
    ),
    whole(
        "noise_for_two_prompts",
        "two ranks draw the same noise",
        plants.seeded(lambda ids: {**ids, "groups": [group // 2 for group in ids["groups"]]}),
    ),
    whole(
        "noise_every_step",
        "one noise for all training steps",
        plants.seeded(lambda ids: {**ids, "training_step": 0}),
    ),
    sized(
        "noise_correlated",
        "the noise of a batch is correlated by the square of this number",
        lambda size: plants.noisy(lambda noise: math.sqrt(1 - size**2) * noise + size * noise[:1]),
        0.8,
    ),
    whole(
        "other_seed",
        "another seed of the step noise",
        plants.seeded(lambda ids: {**ids, "seed": ids["seed"] + 1}),
    ),
    whole("unseeded", "noise of a global generator", plants.forgets_the_seed),
    whole("seeded_by_place", "noise belongs to places of the batch", plants.seeds_by_place),
    whole("initial_noise", "same_initial_noise is ignored", _own_initial_noise),
    whole(
        "timesteps_truncated",
        "the model gets whole timesteps, and others are returned",
        plants.feeding(torch.trunc),
    ),
    whole(
        "timesteps_returned_truncated",
        "whole timesteps",
        plants.scheduled(plants.with_timesteps(torch.trunc)),
    ),
    whole(
        "timesteps_divided",
        "the model gets timesteps up to 1",
        plants.feeding(lambda timesteps: timesteps / 1000),
    ),
    sized(
        "timesteps_late",
        "the model gets timesteps that are too small by this share",
        lambda size: plants.feeding(lambda timesteps: (1 - size) * timesteps),
        0.1,
    ),
    whole("prompts_swapped", "the prompts of other samples", plants.conditioned(mistakes.rolled, told=False)),
    whole(
        "pooled_swapped",
        "the pooled embeddings of other prompts",
        plants.conditioned(mistakes.pooled_of_another, told=False),
    ),
    sized(
        "prompts_blank",
        "this share of a prompt's tokens is blank",
        lambda size: plants.conditioned(lambda engine, conditioning: _blank(conditioning, size), told=False),
        1.0,
    ),
    sized(
        "embeddings_noisy",
        "embeddings are off by this share",
        lambda size: plants.conditioned(
            lambda engine, conditioning: _noisy_embeddings(conditioning, size), told=False
        ),
        0.5,
    ),
    whole(
        "negative_blank",
        "no negative prompt",
        plants.conditioned(mistakes.no_negative, told=False),
        applies=_guided,
    ),
    whole(
        "negative_of_another",
        "another prompt as negative prompt",
        plants.conditioned(mistakes.negative_of_another, told=False),
        applies=_guided,
    ),
    whole(
        "guidance_exchanged",
        "prompt and negative prompt are exchanged",
        plants.conditioned(mistakes.sides_exchanged, told=False),
        applies=_guided,
    ),
    whole("one_image_of_another", "one image has the prompt of another", mistakes.one_image_of_another),
    whole("first_repeated", "the first sample again in place of the last", mistakes.first_repeated),
    sized(
        "velocity_of_members",
        "velocities of each prompt's second image are too large by this share",
        lambda size: plants.in_some_images(
            lambda group, member: member == 1, lambda velocity, *arguments: (1 + size) * velocity(*arguments)
        ),
        0.05,
    ),
    whole(
        "references_missing",
        "no reference images",
        plants.conditioned(mistakes.no_references, told=False),
        applies=_edits,
    ),
    whole(
        "references_of_another",
        "reference images of other prompts",
        plants.on_references(lambda references: references.roll(1, 0)),
        applies=_edits,
    ),
    sized(
        "references_scaled",
        "latents of reference images are too large by this share",
        lambda size: plants.on_references(lambda references: (1 + size) * references),
        0.5,
        applies=_edits,
    ),
    whole(
        "references_bgr",
        "red and blue of reference images are exchanged",
        mistakes.references_reversed,
        applies=_edits,
    ),
    whole(
        "references_misplaced",
        "other places of the reference images",
        plants.seeing(plants.misplaced),
        applies=_edits,
    ),
    sized(
        "references_noisy",
        "latents of reference images are off by this share",
        lambda size: plants.on_references(
            lambda references: plants.perturbed(references, size, torch.Generator().manual_seed(6))
        ),
        0.5,
        applies=_edits,
    ),
    whole(
        "prompts_blank_after",
        "prompts are blank after the windows",
        plants.at_steps(_after_windows, plants.blanked),
        applies=_has_tail,
    ),
    whole(
        "prompts_blank_first",
        "prompts are blank in the first step",
        plants.at_steps(lambda engine: range(1), plants.blanked),
    ),
    sized(
        "guidance_larger",
        "guidance is stronger by this share",
        lambda size: plants.guided_by(lambda guidance: _stronger(guidance, size)),
        0.5,
        applies=_guided,
    ),
    whole(
        "guidance_off",
        "no guidance",
        plants.guided_by(lambda guidance: _stronger(guidance, -1.0)),
        applies=_guided,
    ),
    sized("guidance_rescaled", "guidance_rescale", plants.rescaled_guidance, 0.7, applies=_guided),
    whole(
        "guidance_off_after",
        "no guidance after the windows",
        plants.at_steps(_after_windows, plants.unguided),
        applies=lambda config: _guided(config) and _has_tail(config),
    ),
    sized(
        "velocity_clamped",
        "velocities are clamped to 2 / size",
        lambda size: plants.seeing(
            lambda velocity, *arguments: velocity(*arguments).clamp(-2 / size, 2 / size)
        ),
        1.0,
    ),
    whole("one_sync_behind", "weights of one sync ago", plants.one_sync_behind),
    whole("sync_ignored", "new weights never arrive", plants.deaf_after_the_first_sync),
    sized(
        "adapter_scaled",
        "the adapter acts too strongly by this share",
        lambda size: plants.merging(plants.scaled_up(1 + size)),
        1.0,
        applies=_adapted,
    ),
    whole(
        "adapter_missing",
        "the adapter binds to no layer",
        plants.merging(plants.without_adapters(lambda name: False)),
        applies=_adapted,
    ),
    whole(
        "adapter_on_half",
        "the adapter binds to every other block",
        plants.merging(plants.without_adapters(_in_even_block)),
        applies=_adapted,
    ),
    whole(
        "adapter_not_on_text",
        "the adapter misses the projections of the text stream",
        plants.merging(plants.without_adapters(lambda name: "add_" not in name)),
        applies=_adapted,
    ),
    whole(
        "adapters_swapped",
        "the adapters of two blocks are exchanged",
        plants.merging(mistakes.adapters_swapped),
        applies=_adapted,
    ),
    sized(
        "checkpoint",
        "another checkpoint, whose matrices differ by this share",
        lambda size: _moved(size, lambda value: value.dim() == 2),
        0.5,
    ),
    sized(
        "biases",
        "vectors of the model differ by this share",
        lambda size: _moved(size, lambda value: value.dim() == 1 and len(value) > 1),
        0.5,
    ),
    whole("head_missing", "an attention head gives 0", plants.merging(mistakes.head_missing)),
    whole("block_missing", "a feed-forward block gives 0", plants.merging(_block_missing)),
    whole(
        "quantised",
        "weights are int8 without being asked",
        plants.merging(plants.matrices(lambda name, value: round_weight(value, "int8"))),
    ),
    whole(
        "positions_rolled",
        "position embeddings are one place off",
        plants.merging(_positions_rolled),
        applies=lambda config: config.model.family in ("auto", "sd3"),
    ),
    sized("other_vae", "another decoder, whose weights differ by this share", plants.another_vae, 0.5),
    sized(
        "vae_scaling",
        "the VAE's scaling factor is too large by this share",
        lambda size: plants.vae_configured(
            lambda vae: {"scaling_factor": vae["scaling_factor"] * (1 + size)}
        ),
        0.5,
    ),
    whole(
        "images_exchanged", "images of two samples are exchanged", plants.returning(images=mistakes.exchanged)
    ),
    whole("images_bgr", "channels of images in reverse order", _decoded_flipped),
    sized(
        "images_brighter",
        "images are brighter by so many grey levels",
        lambda size: plants.returning(
            images=lambda rollout: (rollout.decoded.float() + size).clamp(0, 255).to(torch.uint8)
        ),
        16.0,
    ),
)
"""The table, in the order of the checks that name its rows."""
