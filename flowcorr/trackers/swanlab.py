"""SwanLab; keys come from its own login or environment, never from a recipe."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowcorr.errors import BackendError, MissingExtraError
from flowcorr.private import redact
from flowcorr.trackers.base import Ending, keep_id, kept_id

if TYPE_CHECKING:
    from PIL.Image import Image

ID_FILE = "swanlab_run_id.txt"
STATES: Mapping[Ending, str] = {"finished": "success", "interrupted": "aborted", "failed": "crashed"}


class SwanLabTracker:
    """One SwanLab run a training run; `SWANLAB_MODE`, `SWANLAB_PROJ_NAME` and its other variables are respected.

    A continued run goes on under the id that it left in the run folder.

    Raises:
        MissingExtraError: swanlab is not installed.
    """

    def __init__(self) -> None:
        self._swanlab = _import_swanlab()
        self._run: Any = None

    def start(self, run_name: str, out_dir: Path, *, resume_step: int | None = None) -> None:
        """Start a SwanLab run, or go on with the one that the run folder names."""
        out_dir.mkdir(parents=True, exist_ok=True)
        id_file = out_dir / ID_FILE
        earlier = None if resume_step is None else kept_id(id_file)
        try:
            self._run = self._swanlab.init(
                project=os.environ.get("SWANLAB_PROJ_NAME", "flowcorr"),
                name=run_name,
                log_dir=str(out_dir / "swanlog"),
                id=earlier,
                resume="allow" if earlier else None,
            )
        except RuntimeError as error:  # swanlab raises no narrower one
            raise BackendError(
                f"tracker swanlab cannot start ({error}); run `swanlab login`, set SWANLAB_MODE=offline, "
                "or take swanlab out of trainer.trackers"
            ) from error
        if self._run.id != earlier:
            keep_id(id_file, self._run.id)

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Set the run's configuration."""
        self._run.config.update(redact(config))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log metrics."""
        self._run.log(dict(metrics), step=step)

    def log_images(self, images: Mapping[str, Sequence[Image]], step: int) -> None:
        """Log images."""
        pictures = {
            name: [self._swanlab.Image(picture) for picture in group] for name, group in images.items()
        }
        self._run.log(pictures, step=step)

    def log_videos(self, videos: Mapping[str, bytes], step: int) -> None:
        """Log videos."""
        self._run.log({name: self._swanlab.Video(video) for name, video in videos.items()}, step=step)

    def finish(self, ending: Ending) -> None:
        """Flush and end the run in the state of `STATES`."""
        if self._run is not None:
            error = "see failure.txt in the run's folder" if ending == "failed" else None
            self._run.finish(state=STATES[ending], error=error)
            self._run = None


def _import_swanlab() -> Any:
    try:
        import swanlab
    except ImportError as error:
        raise MissingExtraError("tracker swanlab", "swanlab", "swanlab", error) from error
    return swanlab
