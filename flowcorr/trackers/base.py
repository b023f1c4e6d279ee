"""Trackers, which take a run's numbers and images."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeAlias

from flowcorr.errors import BackendError, MissingExtraError

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


class ServiceTracker:
    """A run of a service with a Python package; a continued run goes on under the id that it left in the run folder.

    Attributes:
        package: the package, the extra that installs it, and the tracker's name.

    Raises:
        MissingExtraError: the package is not installed.
    """

    package: ClassVar[str]

    def __init__(self) -> None:
        try:
            self._service: Any = importlib.import_module(self.package)
        except ImportError as error:
            raise MissingExtraError(f"tracker {self.package}", self.package, self.package, error) from error
        self._run: Any = None

    def _start(
        self, out_dir: Path, resume_step: int | None, failure: type[Exception], **options: Any
    ) -> None:
        """Start a run of the service, or go on with the one that the run folder names.

        Args:
            out_dir: the run folder.
            resume_step: see `Tracker.start`.
            failure: the error of the service for a run that cannot start.
            options: of its `init`.

        Raises:
            BackendError: the service cannot start, or the run folder cannot be written to.
        """
        out_dir.mkdir(parents=True, exist_ok=True)
        file = out_dir / f"{self.package}_run_id.txt"
        earlier = None
        if resume_step is not None and file.exists():
            earlier = file.read_text(encoding="utf-8").strip() or None  # a crash may leave it empty
        try:
            self._run = self._service.init(id=earlier, resume="allow" if earlier else None, **options)
        except failure as error:
            raise BackendError(
                f"tracker {self.package} cannot start ({error}); run `{self.package} login`, set "
                f"{self.package.upper()}_MODE=offline, or take {self.package} out of trainer.trackers"
            ) from error
        if self._run.id != earlier:
            with writing(file):
                file.write_text(f"{self._run.id}\n", encoding="utf-8")
