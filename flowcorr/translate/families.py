"""Model families by the names of their checkpoints, as far as a name tells them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from flowcorr.models import FAMILIES

_NAMES = {
    "sd3": r"stable-diffusion-3|(^|[^a-z])sd-?3",
    "qwen_image": r"qwen-?image",
    "flux2_klein": r"flux[.\-_]?2.*klein",
    "flux": r"flux[.\-_]?1|flux-?(dev|schnell)|(^|[^a-z])flux$",
    "z_image": r"z-?image",
}
_OTHERS = r"edit|kontext|layered|omni|fill|redux|depth|canny|control|inpaint|video|i2v|tts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What other trainers' settings become in a family.

    Attributes:
        name: its name here.
        guidance: the key of `sampling` that holds the scale of guidance.
        guidance_offset: what is added to a scale as its pipeline counts it.
        linear: ends of the names of all linear layers of its transformer, and of nothing else; empty if not known.
    """

    name: str
    guidance: str = "guidance_scale"
    guidance_offset: float = 0.0
    linear: tuple[str, ...] = ()


_LINEAR = (
    *("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
    *("net.0.proj", "net.2", "linear_1", "linear_2", "norm_out.linear", "proj_out"),
)
_FAMILIES = {
    "sd3": Family(name="sd3", linear=(*_LINEAR, "norm1.linear", "norm1_context.linear", "context_embedder")),
    "qwen_image": Family(
        name="qwen_image",
        guidance="true_cfg_scale",
        linear=(*_LINEAR, "img_mod.1", "txt_mod.1", "img_in", "txt_in"),
    ),
    "flux": Family(name="flux"),
    "flux2_klein": Family(name="flux2_klein"),
    "z_image": Family(name="z_image", guidance_offset=1.0),
}


def family_named(name: str) -> Family:
    """The family by its name here."""
    return _FAMILIES[name]


def family_of(path: str) -> Family | None:
    """The family that a hub name or path tells; None if it tells none, or a model of another kind."""
    for name in reversed(path.lower().split("/")):
        if re.search(_OTHERS, name):
            return None
        for family, pattern in _NAMES.items():
            if re.search(pattern, name):
                return _FAMILIES[family]
    return None


def not_known(key: str, path: str) -> str:
    """Message for a model whose name tells no family."""
    return (
        f"{key}={path} names no model of the families that flowcorr knows: {', '.join(FAMILIES)}; if it is one under "
        "another name, give the name of its base model as an override, and set model.path in the recipe"
    )
