"""Trackers, which take a run's numbers and images."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from flowcorr.errors import BackendError

if TYPE_CHECKING:
    from PIL.Image import Image

Ending: TypeAlias = Literal["finished", "interrupted", "failed"]
"""How a run ended: at its last step, by a signal, or by an error."""


class Tracker(Protocol):
    """Start once, give the configuration, log each step once, finish."""

    def start(self, run_name: str, out_dir: Path, *, resume_step: int | None = None) -> None:
        """Open the tracker for a run.

        Args:
            run_name: the run's name in the tracker's list of runs.
            out_dir: the run's folder; nothing is written outside of it.
            resume_step: the last valid step of a resumed run; records of later steps are dropped. None for a new
                run, which replaces the records of an earlier one.

        Raises:
            MissingExtraError: the tracker needs a package that is not installed.
        """

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Show the run's configuration, without its secrets."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log a training step's metrics; call it once a step."""

    def log_images(self, images: Mapping[str, Sequence[Image]], step: int) -> None:
        """Log named lists of images."""

    def log_videos(self, videos: Mapping[str, bytes], step: int) -> None:
        """Log named videos, each an animated GIF."""

    def finish(self, ending: Ending) -> None:
        """Flush, record the run's ending and close; does nothing if the tracker was not started."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Write to `path`, a file or a folder of a run; the folder that holds it is made.

    Raises:
        BackendError: it cannot be written to, such as when the disk is full.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise BackendError(
            f"{path} cannot be written ({error.strerror or error}); make room and continue with --resume, or choose "
            "another folder"
        ) from error


def kept_id(file: Path) -> str | None:
    """The run id that a tracker stored in a file; None without a file, or with one that a crash left empty."""
    return (file.read_text(encoding="utf-8").strip() or None) if file.exists() else None


def keep_id(file: Path, run_id: str) -> None:
    """Leave the id of a tracker's run in the folder.

    Raises:
        BackendError: it cannot be written to, such as when the disk is full.
    """
    with writing(file):
        file.write_text(f"{run_id}\n", encoding="utf-8")
