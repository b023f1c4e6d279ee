"""Sampled images and films of videos with their prompts, in the run folder and in trackers."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from flowcorr.records import ImageArray, Prompt
from flowcorr.trackers import Trackers
from flowcorr.trackers.base import writing
from flowcorr.trainer.images import image_grid, labelled, save_image

MAX_VIDEOS = 8
MAX_LOGGED = 16  # held-out images of an evaluation that trackers get
MAX_GIF_VIDEOS = 4  # a GIF is ten times as large as an MP4
_CODEC = "libx264"  # some distributions leave it out of their FFmpeg


def save_film(
    videos: ImageArray, prompts: Sequence[Prompt], scores: np.ndarray | None, path: Path, *, rate: int
) -> None:
    """Write the first `MAX_VIDEOS` videos side by side: as MP4, or as animated WebP without PyAV and x264.

    Args:
        videos: `[B, F, H, W, 3]` uint8; one frame of all at a time is drawn.
        prompts: of the videos.
        scores: `[B]`, shown below them.
        path: without the suffix, which is `.mp4` or `.webp`.
        rate: frames a second, those of the model family.

    Raises:
        BackendError: the folder cannot be written to, such as when the disk is full.
    """
    suffix, write = (".mp4", _write_mp4) if _encodes_mp4() else (".webp", _write_webp)
    path = path.with_name(f"{path.name}{suffix}")
    with writing(path):
        write(_frames(videos[:MAX_VIDEOS], prompts[:MAX_VIDEOS], scores), path, rate)


def animated_gif(
    videos: ImageArray, prompts: Sequence[Prompt], scores: np.ndarray | None, *, rate: int
) -> bytes:
    """The first `MAX_GIF_VIDEOS` videos side by side, for trackers; arguments as of `save_film`."""
    first, *rest = _frames(videos[:MAX_GIF_VIDEOS], prompts[:MAX_GIF_VIDEOS], scores)
    film = io.BytesIO()
    first.save(
        film,
        "GIF",
        save_all=True,
        append_images=rest,
        duration=1000 // rate,
        loop=0,
        optimize=False,
    )
    return film.getvalue()


def log_samples(
    trackers: Trackers,
    where: str,
    images: ImageArray,
    prompts: Sequence[Prompt],
    scores: np.ndarray | None,
    step: int,
    *,
    rate: int,
) -> None:
    """Log the first `MAX_LOGGED` images one by one as `<where>/images`, or a film of videos as `<where>/videos`."""
    if not trackers.beside_folder:
        return
    if images.ndim == 5:
        trackers.log_videos({f"{where}/videos": animated_gif(images, prompts, scores, rate=rate)}, step)
    else:
        first = labelled(images[:MAX_LOGGED], prompts[:MAX_LOGGED], scores)
        trackers.log_images({f"{where}/images": first}, step)


def save_and_log_rollouts(
    trackers: Trackers,
    images: ImageArray,
    prompts: Sequence[Prompt],
    scores: np.ndarray | None,
    folder: Path,
    step: int,
    *,
    rate: int,
) -> None:
    """Write a grid of a training step's images, and a film of videos, to `folder`, and give both to trackers.

    Raises:
        BackendError: the folder cannot be written to, such as when the disk is full.
    """
    grid = image_grid(labelled(images, prompts, scores))
    save_image(grid, folder / f"rollout_{step:06d}_00.png")
    trackers.log_images({"rollout": [grid]}, step)
    if images.ndim == 5:
        save_film(images, prompts, scores, folder / f"rollout_{step:06d}", rate=rate)
        log_samples(trackers, "rollout", images, prompts, scores, step, rate=rate)


def save_samples(
    images: ImageArray, prompts: Sequence[Prompt], scores: np.ndarray | None, path: Path, *, rate: int
) -> None:
    """Write a grid of images as PNG to `path`, given without a suffix, and a film of videos under the same name.

    Raises:
        BackendError: the folder cannot be written to, such as when the disk is full.
    """
    save_image(image_grid(labelled(images, prompts, scores)), path.with_name(f"{path.name}.png"))
    if images.ndim == 5:
        save_film(images, prompts, scores, path, rate=rate)


def _frames(
    videos: ImageArray, prompts: Sequence[Prompt], scores: np.ndarray | None
) -> Iterator[Image.Image]:
    """Yield a grid of all videos for each frame, in order."""
    for frame in range(videos.shape[1]):
        yield image_grid(labelled(videos[:, frame], prompts, scores), columns=4)


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
