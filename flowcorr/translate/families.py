"""Model families by the names of their checkpoints, and how other trainers' configurations speak of them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from flowcorr.config.layers import JOINT_ATTENTION
from flowcorr.errors import ConfigError

_OTHERS = r"edit|kontext|layered|omni|fill|redux|depth|canny|control|inpaint|video|i2v|tts"
_JOINT_LAYERS = (
    *(layer.removeprefix("attn.") for layer in JOINT_ATTENTION),
    *("net.0.proj", "net.2", "linear_1", "linear_2", "norm_out.linear", "proj_out"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Translated:
    """A model family with translated configurations.

    Attributes:
        checkpoint: a regular expression that finds the family in a checkpoint's name in lower case.
        guidance_offset: the scale of guidance here, minus the same scale as the pipeline counts it.
        linear_layers: ends of the names of all linear layers of the transformer, and of nothing else.
    """

    checkpoint: str
    guidance_offset: float = 0.0
    linear_layers: tuple[str, ...] = ()


TRANSLATED = {
    "sd3": Translated(
        checkpoint=r"stable-diffusion-3|(^|[^a-z])sd-?3",
        linear_layers=(*_JOINT_LAYERS, "norm1.linear", "norm1_context.linear", "context_embedder"),
    ),
    "qwen_image": Translated(
        checkpoint=r"qwen-?image",
        linear_layers=(*_JOINT_LAYERS, "img_mod.1", "txt_mod.1", "img_in", "txt_in"),
    ),
    "flux": Translated(checkpoint=r"flux[.\-_]?1|flux-?(dev|schnell)|(^|[^a-z])flux$"),
    "flux2_klein": Translated(checkpoint=r"flux[.\-_]?2.*klein"),
    "z_image": Translated(checkpoint=r"z-?image", guidance_offset=1.0),
}

_STARTS = {
    r"(^|[^a-z])wan.*ti?2v": ("makes videos", "wan_ocr_lora"),
    r"kontext": ("edits images", "flux_kontext_edit_lora"),
    r"qwen-?image-?edit": ("edits images", "qwen_image_edit_plus_lora"),
}
"""Models whose configurations are not translated, by names in lower case: their task, and the recipe to start from."""


def family_of(path: str) -> str | None:
    """The family that a hub name or path tells; None if it tells none, or a model of another kind."""
    for name in reversed(path.lower().split("/")):
        if re.search(_OTHERS, name):
            return None
        for family, facts in TRANSLATED.items():
            if re.search(facts.checkpoint, name):
                return family
    return None


def untranslated(name: str) -> str:
    """Why configurations of a model of this name are not translated, and the recipe to start from; empty if none is."""
    for pattern, (task, recipe) in _STARTS.items():
        if re.search(pattern, name.lower()):
            return (
                f"{task}, but only configurations that make images from text are translated; start from the recipe "
                f"{recipe}, whose header names its source"
            )
    return ""


def require_family(key: str, path: str, known: tuple[str, ...]) -> str:
    """The family of a checkpoint.

    Raises:
        ConfigError: its name tells none of the `known` ones.
    """
    family = family_of(path)
    if family is None and (reason := untranslated(path)):
        raise ConfigError(f"{key}={path} {reason}")
    if family is None or family not in known:
        raise ConfigError(
            f"{key}={path} names no model of the families that are translated: {', '.join(known)}; if it is one under "
            "another name, give the name of its base model as an override, and set model.path in the recipe"
        )
    return family
