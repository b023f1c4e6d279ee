"""The trackers of a run as one: the failure of one costs that tracker alone."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowcorr.processes import CHILDREN_IGNORE, own_signal_handlers, signal_mask
from flowcorr.trackers.base import Ending, Tracker

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger(__name__)

FOLDER = "jsonl"
"""The name of the tracker that writes the run folder."""


class Trackers:
    """Calls every tracker of a run; their processes and handlers keep no signal from the run.

    A tracker that raises, other than the one that writes the run folder, is left out from then on, and the run goes
    on. Without the folder's `metrics.jsonl` a run cannot be resumed, so its errors are raised, after the other trackers
    were called.

    Args:
        trackers: by the names that messages give them; empty on all ranks but the main one.
        on_failure: called with a message when a tracker is left out.
    """

    def __init__(self, trackers: Mapping[str, Tracker], on_failure: Callable[[str], None]) -> None:
        self._trackers, self._on_failure = dict(trackers), on_failure
        self._left_out: set[str] = set()

    def __bool__(self) -> bool:
        """Whether there is any tracker."""
        return bool(self._trackers)

    @property
    def beside_folder(self) -> list[str]:
        """Names of the trackers that get pictures; the run folder gets its pictures from the trainer."""
        return [name for name in self._trackers if name != FOLDER and name not in self._left_out]

    def start(self, run_name: str, out_dir: Path, config: Mapping[str, Any], resume_step: int | None) -> None:
        """Open every tracker and give it the configuration; an error is raised, as nothing has been computed yet."""
        for tracker in self._trackers.values():
            with own_signal_handlers(), signal_mask(signal.SIG_BLOCK, CHILDREN_IGNORE):
                tracker.start(run_name, out_dir, resume_step=resume_step)
                tracker.log_config(config)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the metrics of a training step.

        Raises:
            BackendError: the run folder cannot be written to.
        """
        self._each("log", [name for name in self._trackers if name not in self._left_out], metrics, step)

    def log_images(self, images: Mapping[str, Sequence[Image]], step: int) -> None:
        """Log named lists of images to trackers other than the run folder."""
        self._each("log_images", self.beside_folder, images, step)

    def log_videos(self, videos: Mapping[str, bytes], step: int) -> None:
        """Log named videos, each an animated GIF, to trackers other than the run folder."""
        self._each("log_videos", self.beside_folder, videos, step)

    def finish(self, ending: Ending) -> None:
        """Finish every tracker, including trackers that were left out after an error.

        Raises:
            BackendError: the run folder cannot be written to.
        """
        self._each("finish", list(self._trackers), ending)

    def _each(self, method: str, names: Sequence[str], *arguments: Any) -> None:
        raised: BaseException | None = None
        for name in names:
            try:
                with own_signal_handlers(), signal_mask(signal.SIG_BLOCK, CHILDREN_IGNORE):
                    getattr(self._trackers[name], method)(*arguments)
            except (Exception, SystemExit) as error:
                if name == FOLDER:
                    raised = error
                else:
                    self._leave_out(name, method, error)
        if raised is not None:
            raise raised

    def _leave_out(self, name: str, method: str, error: BaseException) -> None:
        if name in self._left_out:
            return
        self._left_out.add(name)
        logger.debug("tracker %s failed", name, exc_info=error)
        self._on_failure(
            f"warning: tracker {name} failed in {method} ({type(error).__name__}: {error}); the run goes on without "
            "it, and metrics.jsonl in the run's folder has all metrics"
        )
