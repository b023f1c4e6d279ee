"""SwanLab; keys come from its own login or environment, never from a recipe."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowcorr.private import redact
from flowcorr.trackers.base import Ending, ServiceTracker

if TYPE_CHECKING:
    from PIL.Image import Image

STATES: Mapping[Ending, str] = {"finished": "success", "interrupted": "aborted", "failed": "crashed"}


class SwanLabTracker(ServiceTracker):
    """One SwanLab run a training run; `SWANLAB_MODE`, `SWANLAB_PROJ_NAME` and its other variables are respected.

    A continued run goes on under the id that it left in the run folder.
    """

    package = "swanlab"

    def start(self, run_name: str, out_dir: Path, *, resume_step: int | None = None) -> None:
        """Start a SwanLab run, or go on with the one that the run folder names."""
        self._start(
            out_dir,
            resume_step,
            RuntimeError,  # swanlab raises no narrower one
            project=os.environ.get("SWANLAB_PROJ_NAME", "flowcorr"),
            name=run_name,
            log_dir=str(out_dir / "swanlog"),
        )

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Set the run's configuration."""
        self._run.config.update(redact(config))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log metrics."""
        self._run.log(dict(metrics), step=step)

    def log_images(self, images: Mapping[str, Sequence[Image]], step: int) -> None:
        """Log images."""
        pictures = {
            name: [self._service.Image(picture) for picture in group] for name, group in images.items()
        }
        self._run.log(pictures, step=step)

    def log_videos(self, videos: Mapping[str, bytes], step: int) -> None:
        """Log videos."""
        self._run.log({name: self._service.Video(video) for name, video in videos.items()}, step=step)

    def finish(self, ending: Ending) -> None:
        """Flush and end the run in the state of `STATES`."""
        if self._run is not None:
            error = "see failure.txt in the run's folder" if ending == "failed" else None
            self._run.finish(state=STATES[ending], error=error)
            self._run = None
