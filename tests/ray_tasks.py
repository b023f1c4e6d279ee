"""What workers do in tests, and how a test follows them. Ray's workers import this module, as pytest does."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from flowcorr.errors import BatchError, ConfigError, MissingExtraError

# Overrides that let a run sample and score in workers.
WORKERS = (
    "rollout.placement=ray",
    "rollout.num_workers=2",
    "rollout.timeout=600",
    "reward.placement=ray",
    "reward.timeout=600",
)


class Events(list[dict[str, Any]]):
    """Notes what happens to workers."""

    def __call__(self, kind: str, /, **fields: Any) -> None:
        self.append({"kind": kind, **fields})

    def kinds(self) -> list[str]:
        return [event["kind"] for event in self]


def wait_for(condition: Callable[[], object], seconds: float = 600.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "this did not happen in time"
        time.sleep(0.01)


class Tasks:
    """A worker without a model, which starts in no time."""

    def __init__(self, flag: str | None = None) -> None:
        if flag is not None and Path(flag).exists():
            raise ConfigError(Path(flag).read_text())

    def pid(self, seconds: float = 0.0) -> int:
        time.sleep(seconds)
        return os.getpid()

    def wait_for(self, flag: str) -> int:
        """Wait until a file is there."""
        while not Path(flag).exists():
            time.sleep(0.01)
        return os.getpid()

    def threads(self) -> int:
        import torch

        return torch.get_num_threads()

    def pair(self, value: object) -> tuple[object, object]:
        return value, [value]

    def die(self, flag: str | None = None) -> int:
        """Die, or only if nobody has before."""
        if flag is None or not Path(flag).exists():
            if flag is not None:
                Path(flag).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return os.getpid()

    def hang(self, flag: str) -> int:
        """Take for ever, or only if nobody has before."""
        if not Path(flag).exists():
            Path(flag).touch()
            time.sleep(600)
        return os.getpid()

    def fail(self, kind: str) -> None:
        if kind == "config":
            raise ConfigError("this cannot work")
        if kind == "extra":
            raise MissingExtraError("reward ocr", "rapidocr", "ocr")
        raise RuntimeError("out of memory")


def broken() -> None:
    raise RuntimeError("no such model")


def brightness(images: np.ndarray, prompts: list, dark: float = -1.0, api_key: str = "") -> np.ndarray:
    """A reward that raises where an image is darker than `dark`, and for prompts without a target."""
    if any(prompt.target is None for prompt in prompts):
        raise BatchError("there is no target")
    scores = images.mean(axis=(1, 2, 3))
    if (scores < dark).any():
        raise ValueError(f"an image of brightness {scores.min():.1f}")
    return scores
