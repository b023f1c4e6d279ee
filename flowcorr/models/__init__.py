"""Model families: one small adapter each."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from flowcorr.errors import ConfigError, unknown_choice
from flowcorr.models.base import Conditioning, Guidance, ModelFamily, Schedule
from flowcorr.models.sd3 import SD3

FAMILIES: dict[str, type[ModelFamily]] = {"sd3": SD3}
EMBEDDED = {"tiny_ocr": Path(__file__).parent / "tiny_ocr"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

__all__ = [
    "DTYPES",
    "EMBEDDED",
    "FAMILIES",
    "Conditioning",
    "Guidance",
    "ModelFamily",
    "Schedule",
    "load_family",
    "resolve_path",
]


def resolve_path(path: str) -> str:
    """The folder of an embedded model, or `path` itself."""
    return str(EMBEDDED[path]) if path in EMBEDDED else path


def load_family(
    path: str,
    *,
    family: str = "auto",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    max_sequence_length: int | None = None,
) -> ModelFamily:
    """Load a diffusers pipeline and wrap it in its family's adapter, frozen and in evaluation mode.

    Raises:
        ConfigError: the folder is no pipeline, or its family is not known.
    """
    import diffusers

    location = resolve_path(path)
    class_name = _pipeline_class(location, path)
    known = {cls.pipeline_class: name for name, cls in FAMILIES.items()}
    if family == "auto":
        if class_name not in known:
            raise ConfigError(
                f"model.path={path!r}: " + unknown_choice("its pipeline class", class_name, known)
            )
        family = known[class_name]
    if family not in FAMILIES:
        raise ConfigError(unknown_choice("model.family", family, ("auto", *FAMILIES)))
    try:
        with _quiet():
            pipeline = getattr(diffusers, FAMILIES[family].pipeline_class).from_pretrained(
                location, torch_dtype=dtype
            )
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path={path!r} cannot be loaded as a {family} pipeline: {error}") from error
    pipeline.set_progress_bar_config(disable=True)
    pipeline.to(device)
    for component in pipeline.components.values():
        if isinstance(component, torch.nn.Module):
            component.requires_grad_(False).eval()
    return FAMILIES[family](pipeline, dtype=dtype, max_sequence_length=max_sequence_length)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the progress bars of the loaders, and diffusers' wish for a keyword that older versions lack."""
    import diffusers.utils.logging as diffusers_logging
    import transformers.utils.logging as transformers_logging

    logs = [log for log in (diffusers_logging, transformers_logging) if log.is_progress_bar_enabled()]
    for log in logs:
        log.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*torch_dtype.*", category=FutureWarning)
            yield
    finally:
        for log in logs:
            log.enable_progress_bar()


def _pipeline_class(location: str, path: str) -> str:
    from diffusers import DiffusionPipeline

    index = Path(location) / "model_index.json"
    if Path(location).is_dir() and not index.is_file():
        raise ConfigError(f"model.path={path!r} is no diffusers pipeline: {index} is missing")
    try:
        if index.is_file():
            return json.loads(index.read_text())["_class_name"]
        return DiffusionPipeline.load_config(location)["_class_name"]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"model.path={path!r} is neither a pipeline folder, nor a pipeline on the hub, nor one of "
            f"{', '.join(EMBEDDED)}: {error}"
        ) from error
