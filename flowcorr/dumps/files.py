"""Safetensors files of a dump: written completely or not at all, and read as a stranger's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from flowcorr.dumps import checks
from flowcorr.errors import BackendError, ConfigError

FORMAT_VERSION = "1"
_PARTIAL = ".partial_"


def write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], otherwise: str) -> Path:
    """Write a file and return its path; `otherwise` is the remedy for the message of a failure.

    Raises:
        BackendError: the folder cannot be written to.
    """
    partial = path.with_name(f"{_PARTIAL}{path.name}")
    # safetensors needs tensors that share no memory; in bypass mode, old log-probs are the rollout's.
    layout = torch.contiguous_format
    owned = {name: value.clone(memory_format=layout) for name, value in tensors.items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(owned, partial, {"format_version": FORMAT_VERSION, **metadata})
        partial.replace(path)
    except (OSError, SafetensorError) as error:
        raise BackendError(f"{path} cannot be written ({error}); free space, or {otherwise}") from error
    return path


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tuple[Any, dict[str, str]]]:
    """A file and its metadata, of this format.

    Raises:
        ConfigError: it cannot be read, or it is no such file.
    """
    try:
        if not path.is_file():  # reading a pipe would wait for its writer
            raise damaged(path, "it is a folder, a pipe or a device, or a link to nothing")
        if path.stat().st_size > checks.MAX_BYTES:
            raise damaged(path, f"it holds more than {checks.MAX_BYTES} bytes")
        str(path).encode()  # safetensors reads no path that is not UTF-8
        path.open("rb").close()  # safetensors calls a file that may not be read one that is not there
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            version = metadata.get("format_version", "")
            if version != FORMAT_VERSION:
                raise ConfigError(
                    f"{path} has format_version={checks.shown(version)}, and this flowcorr reads {FORMAT_VERSION!r}; "
                    "use the flowcorr that wrote it, if one did"
                )
            yield file, metadata
    except UnicodeEncodeError as error:
        raise ConfigError(f"{path} cannot be read: its path is not UTF-8; rename it") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except (SafetensorError, RuntimeError) as error:
        raise damaged(path, checks.shown(str(error))) from error


def damaged(path: Path, problem: str) -> ConfigError:
    """The error for a damaged file."""
    return ConfigError(f"{path} is damaged: {problem}; delete it, or write it again with flowcorr.dump")
