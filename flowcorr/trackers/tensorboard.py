"""TensorBoard event files under `tensorboard/` of the run folder."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowcorr.errors import MissingExtraError
from flowcorr.private import redact
from flowcorr.trackers.base import Ending, writing

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch.utils.tensorboard import SummaryWriter

EVENTS_FOLDER = "tensorboard"


class TensorBoardTracker:
    """Scalars, images and the configuration for `tensorboard --logdir OUT_DIR`.

    Raises:
        MissingExtraError: tensorboard is not installed.
        BackendError: the folder cannot be written to, such as when the disk is full.
    """

    def __init__(self) -> None:
        self._writer_class = _import_writer()
        self._writer: SummaryWriter | None = None
        self._folder = Path()

    def start(self, run_name: str, out_dir: Path, *, resume_step: int | None = None) -> None:
        """Open an event file: alone in its folder, or one that overrules all after `resume_step`."""
        self._folder = out_dir / EVENTS_FOLDER
        purge_step = None if resume_step is None else resume_step + 1
        with writing(self._folder):
            if resume_step is None:
                _remove_events(self._folder)
            self._writer = self._writer_class(str(self._folder), purge_step=purge_step)

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Show the configuration as a text."""
        text = json.dumps(redact(config), indent=2, default=str)
        with writing(self._folder):
            self._started.add_text("config", "\n".join(f"    {line}" for line in text.splitlines()))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write the finite metrics as scalars."""
        with writing(self._folder):
            for name, value in metrics.items():
                if math.isfinite(value):
                    self._started.add_scalar(name, value, step)
            self._started.flush()

    def log_images(self, images: Mapping[str, Sequence[Image]], step: int) -> None:
        """Write the images."""
        import numpy as np

        for name, pictures in images.items():
            for number, picture in enumerate(pictures):
                pixels = np.asarray(picture.convert("RGB"))
                with writing(self._folder):
                    self._started.add_image(f"{name}/{number}", pixels, step, dataformats="HWC")

    def log_videos(self, videos: Mapping[str, bytes], step: int) -> None:
        """Write the videos as images, which a browser animates."""
        from PIL import Image
        from tensorboard.compat.proto.summary_pb2 import Summary

        file: Any = self._started.file_writer  # torch declares None
        for name, video in videos.items():
            with Image.open(io.BytesIO(video)) as first:
                width, height = first.size
            image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=video)
            with writing(self._folder):
                file.add_summary(Summary(value=[Summary.Value(tag=name, image=image)]), step)

    def finish(self, ending: Ending) -> None:
        """Close the event file."""
        if self._writer is None:
            return
        writer, self._writer = self._writer, None
        with writing(self._folder):
            writer.close()

    @property
    def _started(self) -> SummaryWriter:
        assert self._writer is not None, "log before start"
        return self._writer


def _remove_events(folder: Path) -> None:
    for path in folder.glob("events.out.tfevents.*"):
        path.unlink()


def _import_writer() -> type[SummaryWriter]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingExtraError("tracker tensorboard", "tensorboard", "tensorboard", error) from error
    return SummaryWriter
