"""Checks of a recipe without model and GPU, for errors that would end a run after minutes of loading."""

from __future__ import annotations

from flowcorr.config.families import check_sampling, find_family
from flowcorr.config.schema import Config
from flowcorr.data import load_prompts
from flowcorr.device_names import check_device_name
from flowcorr.health.table import rows_of
from flowcorr.instruments.plan.architecture import Architecture, local_architecture
from flowcorr.models.sizes import check_frame_count, check_size
from flowcorr.rewards import check_prompts as check_prompts_of
from flowcorr.rewards import check_terms
from flowcorr.trackers import resolve_tracker

_PATCH = 2  # latents a side of a patch, for all families but sd3, whose transformer names it


def check_settings(config: Config) -> None:
    """Check names of trackers, metrics, devices, rewards and families, and image sizes, on any machine.

    Image sizes are only checked if the pipeline's configuration files are on this machine or ship with flowcorr. A
    family of the user's own is not imported, and checks its sizes when it is loaded.

    Raises:
        ConfigError: one of them cannot be used.

    Warns:
        UserWarning: guidance is set by a key that the model's family does not read.
    """
    for name in config.trainer.trackers:
        resolve_tracker(name)
    rows_of(config)
    check_device_name("trainer.device", config.trainer.device)
    check_terms(config.reward.terms, config.reward.gold)
    if ":" in config.model.family:
        return
    architecture = local_architecture(config.model.path)
    name = config.model.family
    if name == "auto" and architecture is not None:
        name = architecture.family
    if name != "auto":
        family = find_family(name)
        check_sampling(
            config.sampling, name, guidance_key=family.guidance_key, makes_videos=family.makes_videos
        )
    if architecture is not None:
        _check_sizes(config, architecture)


def check_prompts(config: Config) -> None:
    """Check that the files of prompts can be read, and fit the rewards.

    Raises:
        ConfigError: they do not; the message names file and line.
    """
    prompts = load_prompts(config.data)
    check_prompts_of(config.reward, prompts.train, prompts.heldout)


def size_limits(architecture: Architecture) -> tuple[int, int | None]:
    """The number that heights and widths in pixels must be multiples of, and the largest, if there is one."""
    vae, transformer = architecture.configs["vae"], architecture.configs["transformer"]
    if "temperal_downsample" in vae:
        factor = 2 ** len(vae["temperal_downsample"]) * (vae.get("patch_size") or 1)
    else:
        factor = 2 ** (len(vae["block_out_channels"]) - 1)
    positions = transformer.get("pos_embed_max_size")
    multiple = factor * (_PATCH if positions is None else transformer["patch_size"])
    return multiple, None if positions is None else multiple * positions


def _check_sizes(config: Config, architecture: Architecture) -> None:
    multiple, largest = size_limits(architecture)
    sampling, trainer = config.sampling, config.trainer
    check_size(sampling.height, sampling.width, multiple, largest=largest)
    if sampling.num_frames is not None:
        check_frame_count(
            sampling.num_frames, 2 ** sum(architecture.configs["vae"].get("temperal_downsample", ()))
        )
    check_size(trainer.eval_height, trainer.eval_width, multiple, largest=largest, section="trainer.eval_")
