"""Field names of other tools in prompt files, and the flowcorr field or key for each."""

from __future__ import annotations

import difflib
import warnings
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from flowcorr.errors import shortened
from flowcorr.records.prompts import Prompt

_ROLES = (
    *(
        "edit",
        "kontext",
        "input",
        "source",
        "src",
        "reference",
        "ref",
        "condition",
        "conditioning",
        "control",
    ),
    *("cond", "init", "original", "origin", "context", "before", "subject", "prompt"),
)
_THINGS = ("image", "img", "picture", "photo", "image_path", "image_file", "image_url")
_IMAGE_NAMES = (
    *(f"{role}_{thing}" for role in _ROLES for thing in _THINGS),
    *(thing for thing in _THINGS if thing != "image"),
    *("img_path", "image_name", "file_name", "image_list"),
)
_IMAGE_FILES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".heic", ".avif")
_SPELLINGS: dict[str, Sequence[str]] = {
    "image": _IMAGE_NAMES,
    "negative_prompt": (
        *(
            "neg_prompt",
            "negative",
            "negative_text",
            "negative_caption",
            "negative_prompts",
            "neg",
            "neg_text",
        ),
        *("prompt_negative", "prompt_neg", "uncond_prompt", "unconditional_prompt", "n_prompt", "negprompt"),
    ),
    "prompt": (
        *("caption", "text", "instruction", "edit_instruction", "edit_prompt", "input_prompt", "description"),
        *("positive_prompt", "prompts", "captions", "sentence", "text_prompt", "txt"),
    ),
    "target": ("target_text", "ocr_text", "gt_text", "ground_truth", "answer", "targets", "words", "label"),
    "tag": ("tags",),
    "sampling.guidance_scale": ("guidance_scale", "cfg", "cfg_scale", "guidance"),
    "sampling.true_cfg_scale": ("true_cfg_scale",),
    "sampling.num_inference_steps": ("num_inference_steps", "num_steps", "sampling_steps"),
    "sampling.height": ("height",),
    "sampling.width": ("width",),
    "sampling.num_frames": ("num_frames",),
    "trainer.seed": ("seed",),
}
_FIELDS = ("prompt", "negative_prompt", "image", "images", "target", "tag")
_ALIKE = 0.9  # of letters that a misspelt name has in common with the right one


def _plain(name: str) -> str:
    """A name without its case and marks between words."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


_MEANT = {
    _plain(name) + end: meaning
    for meaning, names in _SPELLINGS.items()
    for name in names
    for end in ("", "s")
}
_MEANT |= {_plain(name): "image" if name == "images" else name for name in _FIELDS}


def meant(name: str) -> str | None:
    """The field of flowcorr that another tool's field stands for, or the key that names it; None if unknown."""
    plain = _plain(name)
    near = difflib.get_close_matches(plain, _MEANT, n=1, cutoff=_ALIKE) if len(plain) > 4 else ()
    return _MEANT.get(plain) or next((_MEANT[like] for like in near), None)


def unread_images(prompt: Prompt) -> str | None:
    """The field of a prompt without reference images that seems to name some; None if it has none."""
    names = (name for name, value in prompt.metadata.items() if _meaning(name, value) == "image")
    return None if prompt.images else next(names, None)


def warn_of_unread(prompts: Sequence[Prompt], path: Path, *, has_targets: bool) -> None:
    """Warn of fields that are kept as metadata, though their names suggest that flowcorr should read them.

    There is no warning if the prompt has that content from another field.

    Args:
        prompts: those of a file.
        path: the file.
        has_targets: whether targets were read from a field, and not from double quotes.

    Warns:
        UserWarning: one for each such field.
    """
    counts: Counter[tuple[str, str]] = Counter()
    for prompt in prompts:
        for name, value in prompt.metadata.items():
            meaning = _meaning(name, value)
            if meaning is not None and not _has(prompt, meaning, has_targets):
                counts[name, meaning] += 1
    for (name, meaning), count in counts.items():
        remedy = {
            "image": 'if it names reference images, rename it to "image" or "images"',
            "target": f"if rewards look for it, set data.target_field={name}",
            "tag": f"if reward.terms choose prompts by it, set data.tag_field={name}",
            "negative_prompt": 'rename it to "negative_prompt"',
        }.get(meaning, f"all prompts have that of the recipe; set {meaning}")
        warnings.warn(
            f'{path}: the field "{shortened(name)}" of {count} of {len(prompts)} lines is only kept as metadata; '
            f"{remedy}",
            UserWarning,
            stacklevel=1,  # from one place, or Python would show it again
        )


@cache
def _meant(name: str) -> str | None:
    return meant(name)


def _meaning(name: str, value: object) -> str | None:
    if value is None or value == "":
        return None
    if _are_images(value):
        return "image"
    meaning = _meant(name)
    is_text = isinstance(value, str)
    return meaning if is_text or meaning not in ("target", "tag", "negative_prompt") else None


def _are_images(value: object) -> bool:
    """Whether a value is the path or the content of an image, or several of them."""
    if isinstance(value, list):
        return bool(value) and all(map(_are_images, value))
    if isinstance(value, dict):
        return value.keys() == {"bytes", "path"}
    return isinstance(value, str) and value.lower().startswith("data:image") | value.lower().endswith(
        _IMAGE_FILES
    )


def _has(prompt: Prompt, meaning: str, has_targets: bool) -> bool:
    given = {
        "image": bool(prompt.images),
        "target": has_targets,
        "tag": prompt.tag is not None,
        "negative_prompt": prompt.negative_prompt is not None,
    }
    return meaning == "prompt" or given.get(meaning, False)
