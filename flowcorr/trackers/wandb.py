"""Weights & Biases; keys come from its own login or environment, never from a recipe."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowcorr.private import redact
from flowcorr.trackers.base import Ending, ServiceTracker

if TYPE_CHECKING:
    from PIL.Image import Image

STEP = "step"


class WandbTracker(ServiceTracker):
    """One wandb run a training run; `WANDB_PROJECT`, `WANDB_MODE` and wandb's other variables are respected.

    A continued run goes on under the id that it left in the run folder. Metrics carry `step` as their own
    axis: wandb would drop steps that are logged a second time after a resume.
    """

    package = "wandb"

    def start(self, run_name: str, out_dir: Path, *, resume_step: int | None = None) -> None:
        """Start a wandb run, or go on with the one that the run folder names."""
        self._start(
            out_dir,
            resume_step,
            self._service.Error,
            project=os.environ.get("WANDB_PROJECT", "flowcorr"),
            name=run_name,
            dir=str(out_dir),
        )
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Set the run's configuration."""
        self._run.config.update(redact(config), allow_val_change=True)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log metrics."""
        self._run.log({STEP: step, **metrics})

    def log_images(self, images: Mapping[str, Sequence[Image]], step: int) -> None:
        """Log images."""
        pictures = {
            name: [self._service.Image(picture) for picture in group] for name, group in images.items()
        }
        self._run.log({STEP: step, **pictures})

    def log_videos(self, videos: Mapping[str, bytes], step: int) -> None:
        """Log videos."""
        films = {name: self._service.Video(io.BytesIO(video), format="gif") for name, video in videos.items()}
        self._run.log({STEP: step, **films})

    def finish(self, ending: Ending) -> None:
        """Flush and end the run, as failed unless it finished: wandb has no state for a signal."""
        if self._run is not None:
            self._run.finish(exit_code=int(ending != "finished"))
            self._run = None
