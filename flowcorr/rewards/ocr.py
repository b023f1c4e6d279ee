"""Does an image show the words that it should? Read by RapidOCR (PP-OCRv6); its wheel holds the models."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowcorr.errors import ConfigError, MissingExtraError
from flowcorr.records import Prompt
from flowcorr.rewards.base import RewardOutput
from flowcorr.rewards.options import check_whole, is_number
from flowcorr.rewards.reading_order import reading_order
from flowcorr.rewards.targets import targets_of
from flowcorr.texts import letters

# The recogniser scales every image to this height, and pads narrower ones to this width; its own width of 320 takes
# three times as long for a word.
_INPUT_SHAPE = [3, 48, 96]


@dataclass(frozen=True, slots=True, kw_only=True)
class OcrReward:
    """A mix of edit similarity and exact match between the text in an image and the prompt's target, in 0..1.

    `score = (1 - exact_weight) * similarity + exact_weight * exact`, where the similarity is 1 minus the
    Levenshtein distance over the longer length, so that surplus characters cost as well as missing ones. Case,
    white space and how Unicode spells a text do not count, see `texts.letters`. Logs `exact_match` and
    `edit_similarity`.

    Attributes:
        exact_weight: weight of the exact match, 0..1.
        detect: find the words first, then read them line by line, see `reading_order`: for images that are more than
            one line of text. Without it the whole image is read as one line, which is tens of times as fast. Two
            columns whose lines have equal heights are read across.
        threads: threads of the OCR engine.

    Raises:
        MissingExtraError: at construction, so that a run fails before its first rollout.
    """

    exact_weight: float = 0.5
    detect: bool = False
    threads: int = 1

    name = "ocr"
    extras = ("exact_match", "edit_similarity")
    overlaps = True

    def __post_init__(self) -> None:
        _check_options(self)
        import_engine()

    def __call__(self, images: np.ndarray, prompts: list[Prompt]) -> RewardOutput:
        """Score images `[B, H, W, 3]` uint8 against the targets of their prompts."""
        targets = targets_of(prompts, self.name)
        exact, similarity = compare(self.read(images), targets)
        scores = (1 - self.exact_weight) * similarity + self.exact_weight * exact
        return RewardOutput(scores=scores, extra={"exact_match": exact, "edit_similarity": similarity})

    @staticmethod
    def needs_target(options: Mapping[str, Any]) -> bool:
        """Whether every prompt must have a target: always."""
        return True

    def read(self, images: np.ndarray) -> list[str]:
        """Read the text in each image of `[B, H, W, 3]` uint8; it does not depend on the other images."""
        read = _read_lines if self.detect else _read_whole
        # The models were trained on blue-green-red images.
        return [read(np.ascontiguousarray(image[..., ::-1]), self.threads) for image in images]


def compare(readings: Sequence[str], targets: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Exact match (0 or 1) and edit similarity (0..1) of readings and targets, both `[B]` float64.

    Similarity is `1 - Levenshtein distance / longer length`, on `texts.letters`.
    """
    from rapidfuzz.distance import Levenshtein

    pairs = [(letters(reading), letters(target)) for reading, target in zip(readings, targets, strict=True)]
    exact = np.array([reading == target for reading, target in pairs], dtype=np.float64)
    similarity = np.array([Levenshtein.normalized_similarity(*pair) for pair in pairs], dtype=np.float64)
    return exact, similarity


def import_engine() -> Any:
    """The module of the OCR engine.

    Raises:
        MissingExtraError: a package is absent, or OpenCV lacks a library of the system; the message says
            which system packages bring it.
    """
    try:
        import onnxruntime  # noqa: F401
        import rapidfuzz  # noqa: F401
        import rapidocr
        from rapidocr import RapidOCR  # noqa: F401
    except ImportError as error:
        raise engine_error(error) from error
    return rapidocr


def engine_error(cause: ImportError) -> MissingExtraError:
    """Why the OCR engine cannot be imported, and how to fix it."""
    if "cannot open shared object file" in str(cause):
        cause = ImportError(
            f"{cause}: another package installed OpenCV with a window system, whose libraries this machine lacks; "
            "either pip uninstall opencv-python and pip install --force-reinstall opencv-python-headless, "
            "or apt-get install libgl1 libglib2.0-0"
        )
    package = cause.name if cause.name in ("rapidfuzz", "onnxruntime") else "rapidocr"
    return MissingExtraError("reward ocr", package, "ocr", cause)


def _check_options(options: OcrReward) -> None:
    if not is_number(options.exact_weight) or not 0 <= options.exact_weight <= 1:
        raise ConfigError(f"reward ocr: exact_weight={options.exact_weight!r} must lie in 0..1")
    if not isinstance(options.detect, bool):
        raise ConfigError(f"reward ocr: detect={options.detect!r} must be true or false")
    check_whole(options.name, "threads", options.threads, 1)


def _read_whole(picture: np.ndarray, threads: int) -> str:
    return "".join(_engine(threads, detect=False)(picture).txts or [])


def _read_lines(picture: np.ndarray, threads: int) -> str:
    detected = _engine(threads, detect=True)(picture)
    return (
        ""
        if detected.boxes is None
        else " ".join(detected.txts[place] for place in reading_order(detected.boxes))
    )


# One engine a process and thread count: building it costs more than a batch, and it cannot be pickled.
@functools.cache
def _engine(threads: int, *, detect: bool) -> Any:
    """RapidOCR without its classifier of upside-down lines; without `detect` it reads an image as one line."""
    options: dict[str, Any] = {
        "Global.log_level": "critical",  # it logs each model that it opens, and each image without text
        "Global.use_cls": False,
        "Global.use_det": detect,
        "Global.use_preprocess_img": detect,  # it enlarges small images for the detector
        "EngineConfig.onnxruntime.intra_op_num_threads": threads,
        "EngineConfig.onnxruntime.inter_op_num_threads": 1,
    }
    if not detect:
        options["Rec.rec_img_shape"] = _INPUT_SHAPE
    return import_engine().RapidOCR(params=options)
