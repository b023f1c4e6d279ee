"""The images and films of a run, as they stand in its page: files that lie in the run's own folder."""

from __future__ import annotations

import base64
import io
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup
from PIL import Image, UnidentifiedImageError

from flowcorr.health.image_drift import ImageDrift, largest_drift
from flowcorr.health.rules import is_step
from flowcorr.instruments.report.runs import Run
from flowcorr.instruments.thinning import spread_out
from flowcorr.trackers import IMAGES_FOLDER

MAX_GRIDS = 4
# Larger images are shown smaller and compressed, so that the page of three runs stays below 2 MB.
MAX_IMAGE_BYTES = 100_000
MAX_FILM_BYTES = 1_000_000
_MAX_FILE_BYTES = 2**26
_ODD = (OSError, SyntaxError, ValueError, Image.DecompressionBombError, Image.DecompressionBombWarning)
_FILMS = {".mp4": "video/mp4", ".webp": "image/webp"}
_ROLLOUT = re.compile(r"rollout_([0-9]{1,12})_[0-9]+\.png")


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """An image or a film in a page.

    Attributes:
        title: what it shows.
        source: its data.
        full: whether it takes a whole row.
    """

    title: str
    source: str
    full: bool = False

    def html(self) -> Markup:
        """The picture as an element of a page."""
        return Markup(
            '<figure class="card{}"><figcaption>{}</figcaption><div class="scroll">{}</div></figure>'
        ).format(" full" if self.full else "", self.title, self._element())

    def _element(self) -> Markup:
        if self.source.startswith("data:video/"):
            return Markup('<video controls loop muted src="{}"></video>').format(self.source)
        return Markup('<img alt="{}" src="{}">').format(self.title, self.source)

    def numbers(self) -> None:
        """None: an image has no numbers."""

    def png(self, note: str = "") -> None:
        """None: the picture has a file already."""


def pictures(run: Run) -> list[Picture]:
    """Held-out images before and after, images of some training steps, and the last films of videos.

    Warns:
        UserWarning: a file is no image, or lies outside the run's folder; it is left out.
    """
    shown = []
    try:
        chosen = list(_chosen(run))
    except OSError as error:
        warnings.warn(
            f"{run.folder / IMAGES_FOLDER} is not shown: {error.strerror}", UserWarning, stacklevel=2
        )
        return []
    for caption, path, full in chosen:
        try:
            shown.append(Picture(title=caption, source=_source(path, run.folder), full=full))
        except _ODD as error:
            warnings.warn(f"{path} is not shown: {error}", UserWarning, stacklevel=2)
    return shown


def _chosen(run: Run) -> Iterator[tuple[str, Path, bool]]:
    """Caption and file of the images to show, and whether they take a whole row."""
    folder = run.folder / IMAGES_FOLDER
    pair = folder / "before_after.png"
    if pair.is_file():
        yield "held out, before and after", pair, True
    else:
        for path in spread_out(sorted(folder.glob("eval_*.png")), MAX_GRIDS):
            yield f"held out, {path.stem[5:]}", path, False
    names = ((_ROLLOUT.fullmatch(path.name), path) for path in sorted(folder.glob("rollout_*.png")))
    grids = {int(match[1]): path for match, path in names if match}
    drifts = _drifts(run)
    furthest = max(grids.keys() & drifts.keys(), key=lambda step: drifts[step].size, default=None)
    shown = {*spread_out(sorted(grids), MAX_GRIDS), *([] if furthest is None else [furthest])}
    for step in sorted(shown):
        caption = f"rollouts at step {step}"
        if step == furthest:
            drift = drifts[step]
            caption += f", the furthest from the start: {drift.metric} {drift.start:.3g} → {drift.now:.3g}"
        yield caption, grids[step], False
    for kind, caption in (("eval_*", "held out, moving"), ("rollout_*", "rollouts, moving")):
        films = [path for suffix in _FILMS for path in folder.glob(f"{kind}{suffix}")]
        if films:
            yield caption, max(films, key=_age), False


def _age(path: Path) -> tuple[bool, str]:
    """Films in the order in which they were made: `eval_after` comes after `eval_before`."""
    return "before" not in path.stem, path.name


def _drifts(run: Run) -> dict[int, ImageDrift]:
    """For each training step, the statistic of its images that is furthest from the start."""
    steps = [record for record in run.records if is_step(record)]
    drifts = {int(record["step"]): largest_drift(record, steps[0]) for record in steps}
    return {step: drift for step, drift in drifts.items() if drift is not None}


def _source(path: Path, folder: Path) -> str:
    """The image as the `src` of an `<img>`; raises one of `_ODD` if it is no image inside the folder."""
    if not path.resolve(strict=True).is_relative_to(folder.resolve()):
        raise ValueError("it is a link that leads out of the run's folder")
    if not path.is_file() or path.stat().st_size > _MAX_FILE_BYTES:
        raise ValueError(f"it must be a file of at most {_MAX_FILE_BYTES} bytes")
    if path.suffix in _FILMS:
        return _film(path)
    data, kind = path.read_bytes(), "png"
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            with Image.open(io.BytesIO(data), formats=["PNG"]) as image:  # other formats may start programs
                image.verify()
        except UnidentifiedImageError:
            raise ValueError("it is no PNG") from None
    side = 1200
    while len(data) > MAX_IMAGE_BYTES and side > 200:
        with Image.open(path, formats=["PNG"]) as image:
            small = image.convert("RGB")
        small.thumbnail((side, side))
        buffer = io.BytesIO()
        small.save(buffer, format="WEBP", quality=80)
        data, kind, side = buffer.getvalue(), "webp", side * 3 // 4
    return f"data:image/{kind};base64,{base64.b64encode(data).decode('ascii')}"


def _film(path: Path) -> str:
    """A film as the `src` of its element; raises one of `_ODD` if it is no film, or too large for a page."""
    if path.stat().st_size > MAX_FILM_BYTES:
        raise ValueError(f"a page holds films of at most {MAX_FILM_BYTES} bytes; open the file itself")
    data = path.read_bytes()
    if data[4:8] != b"ftyp" and (data[:4], data[8:12]) != (b"RIFF", b"WEBP"):
        raise ValueError("it is no film")
    return f"data:{_FILMS[path.suffix]};base64,{base64.b64encode(data).decode('ascii')}"
