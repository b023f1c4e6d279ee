"""Model families by name: the facts that checks need before a model is loaded, and which are read without torch."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

from flowcorr.config.schema import SamplingConfig
from flowcorr.errors import ConfigError, unknown_choice

GUIDANCE_KEYS = ("guidance_scale", "true_cfg_scale")
"""Keys of `sampling` that turn guidance on; a family reads one of them."""
GUIDE = "examples/new_model.py shows how to add a family of your own, given as 'package.module:Class'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model family of flowcorr, one row of `FAMILIES`; its adapter reads its facts here.

    Attributes:
        adapter: `package.module:Class` of its `ModelFamily`, which states all other facts.
        pipeline_class: the pipeline's class in diffusers.
        guidance_key: the key of `sampling` that turns guidance on, one of `GUIDANCE_KEYS`.
        makes_videos: whether its samples are videos.
    """

    adapter: str
    pipeline_class: str
    guidance_key: str = "guidance_scale"
    makes_videos: bool = False


FAMILIES: Mapping[str, Family] = {
    "sd3": Family(adapter="flowcorr.models.sd3:SD3", pipeline_class="StableDiffusion3Pipeline"),
    "qwen_image": Family(
        adapter="flowcorr.models.qwen_image:QwenImage",
        pipeline_class="QwenImagePipeline",
        guidance_key="true_cfg_scale",
    ),
    "qwen_image_edit": Family(
        adapter="flowcorr.models.qwen_image_edit:QwenImageEdit",
        pipeline_class="QwenImageEditPipeline",
        guidance_key="true_cfg_scale",
    ),
    "qwen_image_edit_plus": Family(
        adapter="flowcorr.models.qwen_image_edit:QwenImageEditPlus",
        pipeline_class="QwenImageEditPlusPipeline",
        guidance_key="true_cfg_scale",
    ),
    "flux": Family(adapter="flowcorr.models.flux:Flux", pipeline_class="FluxPipeline"),
    "flux_kontext": Family(
        adapter="flowcorr.models.flux_kontext:FluxKontext", pipeline_class="FluxKontextPipeline"
    ),
    "flux2_klein": Family(
        adapter="flowcorr.models.flux2_klein:Flux2Klein", pipeline_class="Flux2KleinPipeline"
    ),
    "z_image": Family(adapter="flowcorr.models.z_image:ZImage", pipeline_class="ZImagePipeline"),
    "ovis_image": Family(adapter="flowcorr.models.ovis_image:OvisImage", pipeline_class="OvisImagePipeline"),
    "wan": Family(adapter="flowcorr.models.wan:Wan", pipeline_class="WanPipeline", makes_videos=True),
}
PIPELINES: Mapping[str, str] = {family.pipeline_class: name for name, family in FAMILIES.items()}
"""The name of the family of each class of pipelines."""


def find_family(name: str) -> Family:
    """The row of `model.family`, which is no `package.module:Class`.

    Raises:
        ConfigError: the name is unknown.
    """
    if name not in FAMILIES:
        raise ConfigError(f"{unknown_choice('model.family', name, ('auto', *FAMILIES))}; {GUIDE}")
    return FAMILIES[name]


def check_sampling(sampling: SamplingConfig, family: str, *, guidance_key: str, makes_videos: bool) -> None:
    """Check that a family reads the keys that are set.

    Args:
        sampling: the section `sampling`.
        family: the name of the family.
        guidance_key: the key that turns its guidance on.
        makes_videos: whether its samples are videos.

    Raises:
        ConfigError: it makes no videos, and several frames are asked for.

    Warns:
        UserWarning: guidance is set by another key, which has no effect. Python shows it once.
    """
    check_frames(sampling.num_frames, family, makes_videos=makes_videos)
    for key in GUIDANCE_KEYS:
        value = getattr(sampling, key)
        if key != guidance_key and value != getattr(SamplingConfig(), key):
            warnings.warn(
                f"sampling.{key}={value} has no effect: a model of the family {family} reads sampling.{guidance_key}",
                UserWarning,
                stacklevel=1,  # from one place, or Python would show it again
            )


def check_frames(num_frames: int | None, family: str, *, makes_videos: bool) -> None:
    """Check that several frames are asked of a family that makes videos only.

    Raises:
        ConfigError: it makes images.
    """
    if num_frames not in (None, 1) and not makes_videos:
        raise ConfigError(
            f"sampling.num_frames={num_frames} asks for videos, and a model of the family {family} makes images; "
            "leave the key out, or take a model that makes videos, such as Wan"
        )
