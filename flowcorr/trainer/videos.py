"""Sampled images and films of videos with their prompts, in the run folder and in trackers."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from PIL import Image

from flowcorr.trackers import Trackers
from flowcorr.trackers.base import writing
from flowcorr.trainer.images import Shown, image_grid, labelled, save_image

MAX_VIDEOS = 8
MAX_LOGGED = 16  # held-out images of an evaluation that trackers get
MAX_GIF_VIDEOS = 4  # a GIF is ten times as large as an MP4
_CODEC = "libx264"  # some distributions leave it out of their FFmpeg


def save_film(shown: Shown, path: Path) -> None:
    """Write the first `MAX_VIDEOS` videos side by side: as MP4, or as animated WebP without PyAV and x264.

    Args:
        shown: videos; one frame of all at a time is drawn.
        path: without the suffix, which is `.mp4` or `.webp`.

    Raises:
        BackendError: the folder cannot be written to, such as when the disk is full.
    """
    suffix, write = (".mp4", _write_mp4) if _encodes_mp4() else (".webp", _write_webp)
    path = path.with_name(f"{path.name}{suffix}")
    with writing(path):
        write(_frames(shown.first(MAX_VIDEOS)), path, shown.rate)


def animated_gif(shown: Shown) -> bytes:
    """The first `MAX_GIF_VIDEOS` videos side by side, for trackers."""
    first, *rest = _frames(shown.first(MAX_GIF_VIDEOS))
    film, duration = io.BytesIO(), 1000 // shown.rate
    first.save(film, "GIF", save_all=True, append_images=rest, duration=duration, loop=0, optimize=False)
    return film.getvalue()


def log_samples(trackers: Trackers, where: str, shown: Shown, step: int) -> None:
    """Log the first `MAX_LOGGED` images one by one as `<where>/images`, or a film of videos as `<where>/videos`."""
    if not trackers.beside_folder:
        return
    if shown.images.ndim == 5:
        trackers.log_videos({f"{where}/videos": animated_gif(shown)}, step)
    else:
        trackers.log_images({f"{where}/images": labelled(shown.first(MAX_LOGGED))}, step)


def save_and_log_rollouts(trackers: Trackers, shown: Shown, folder: Path, step: int) -> None:
    """Write a grid of a training step's images, and a film of videos, to `folder`, and give both to trackers.

    Raises:
        BackendError: the folder cannot be written to, such as when the disk is full.
    """
    grid = image_grid(labelled(shown))
    save_image(grid, folder / f"rollout_{step:06d}_00.png")
    trackers.log_images({"rollout": [grid]}, step)
    if shown.images.ndim == 5:
        save_film(shown, folder / f"rollout_{step:06d}")
        log_samples(trackers, "rollout", shown, step)


def save_samples(shown: Shown, path: Path) -> None:
    """Write a grid of images as PNG to `path`, given without a suffix, and a film of videos under the same name.

    Raises:
        BackendError: the folder cannot be written to, such as when the disk is full.
    """
    save_image(image_grid(labelled(shown)), path.with_name(f"{path.name}.png"))
    if shown.images.ndim == 5:
        save_film(shown, path)


def _frames(shown: Shown) -> Iterator[Image.Image]:
    """Yield a grid of all videos for each frame, in order."""
    for frame in range(shown.images.shape[1]):
        yield image_grid(labelled(replace(shown, images=shown.images[:, frame])), columns=4)


def _encodes_mp4() -> bool:
    try:
        import av
    except ImportError:
        return False
    return _CODEC in av.codecs_available


def _write_mp4(frames: Iterator[Image.Image], path: Path, rate: int) -> None:
    import av

    first = next(frames)
    with av.open(str(path), mode="w", format="mp4") as film:
        stream = film.add_stream(_CODEC, rate=rate, options={"crf": "18"})
        stream.pix_fmt = "yuv420p"  # which browsers play; its colours are of 2 x 2 pixels, so sides are even
        stream.width, stream.height = first.width + first.width % 2, first.height + first.height % 2
        for frame in itertools.chain([first], frames):
            even = Image.new("RGB", (stream.width, stream.height), "white")
            even.paste(frame)
            film.mux(stream.encode(av.VideoFrame.from_image(even)))
        film.mux(stream.encode())


def _write_webp(frames: Iterator[Image.Image], path: Path, rate: int) -> None:
    first, *rest = frames
    first.save(path, save_all=True, append_images=rest, duration=1000 // rate, loop=0, quality=80)
