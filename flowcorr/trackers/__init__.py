"""Trackers: the run folder always, TensorBoard and Weights & Biases where asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from flowcorr.errors import ConfigError, unknown_choice
from flowcorr.trackers.base import Tracker
from flowcorr.trackers.jsonl import IMAGES_FOLDER, METRICS_FILE, JsonlTracker, checked_metrics, read_metrics
from flowcorr.trackers.tensorboard import TensorBoardTracker
from flowcorr.trackers.wandb import WandbTracker

TRACKERS: Mapping[str, Callable[[], Tracker]] = {
    "jsonl": JsonlTracker,
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
}

__all__ = [
    "IMAGES_FOLDER",
    "METRICS_FILE",
    "TRACKERS",
    "JsonlTracker",
    "TensorBoardTracker",
    "Tracker",
    "WandbTracker",
    "build_trackers",
    "check_trackers",
    "checked_metrics",
    "read_metrics",
]


def check_trackers(names: Sequence[str]) -> None:
    """Raise `ConfigError` if a name of `trainer.trackers` is unknown."""
    for name in names:
        if name not in TRACKERS:
            raise ConfigError(unknown_choice("trainer.trackers", name, TRACKERS))


def build_trackers(names: Sequence[str]) -> list[Tracker]:
    """The trackers of a run: `jsonl` first, whether it is named or not, then the others in their order.

    Raises:
        ConfigError: a name is unknown.
    """
    check_trackers(names)
    return [TRACKERS[name]() for name in dict.fromkeys(["jsonl", *names])]
