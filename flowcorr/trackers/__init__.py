"""Trackers: the run folder always, and TensorBoard, Weights & Biases and SwanLab on request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from flowcorr.errors import ConfigError, unknown_choice
from flowcorr.imports import import_target
from flowcorr.trackers.base import Ending, Tracker
from flowcorr.trackers.jsonl import IMAGES_FOLDER, METRICS_FILE, JsonlTracker, checked_metrics, read_metrics
from flowcorr.trackers.several import Trackers
from flowcorr.trackers.swanlab import SwanLabTracker
from flowcorr.trackers.tensorboard import TensorBoardTracker
from flowcorr.trackers.wandb import WandbTracker

TRACKERS: Mapping[str, Callable[[], Tracker]] = {
    "jsonl": JsonlTracker,
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "swanlab": SwanLabTracker,
}

__all__ = [
    "IMAGES_FOLDER",
    "METRICS_FILE",
    "TRACKERS",
    "Ending",
    "JsonlTracker",
    "SwanLabTracker",
    "TensorBoardTracker",
    "Tracker",
    "Trackers",
    "WandbTracker",
    "build_trackers",
    "checked_metrics",
    "read_metrics",
    "resolve_tracker",
]


def resolve_tracker(name: str) -> Callable[[], Tracker]:
    """The class or function that builds a tracker: an entry of `TRACKERS`, or of your own at `package.module:name`.

    Raises:
        ConfigError: the name is unknown, or nothing that can be called stands there.
    """
    if name in TRACKERS:
        return TRACKERS[name]
    if ":" not in name:
        message = unknown_choice("trainer.trackers", name, TRACKERS)
        raise ConfigError(f"{message}; a tracker of your own is given as 'package.module:name'")
    build: Callable[[], Tracker] = import_target("trainer.trackers", name, "a class of trackers")
    if not callable(build):
        raise ConfigError(
            f"trainer.trackers={name!r} is of type {type(build).__name__}; name a class with the methods of "
            "flowcorr.trackers.Tracker"
        )
    return build


def build_trackers(names: Sequence[str]) -> dict[str, Tracker]:
    """The trackers of a run by name: `jsonl` first, whether it is named or not, then the others in their order.

    Raises:
        ConfigError: a name is unknown, or nothing that builds a tracker stands there.
    """
    return {name: resolve_tracker(name)() for name in dict.fromkeys(["jsonl", *names])}
