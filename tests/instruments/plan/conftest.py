"""Predictions are compared with what is allocated for images of the embedded model's own size."""

from collections.abc import Callable
from typing import Any

import pytest

from flowcorr.config import load
from flowcorr.instruments.plan.traces import Traces, trace

SIZE = {"height": 32, "width": 64}


@pytest.fixture(scope="session")
def traces() -> Traces:
    """Of `tiny_jpeg_lora`, which trains an adapter on 8 prompts of 12 images."""
    return trace(load("tiny_jpeg_lora"))


@pytest.fixture(scope="session")
def make_config(make_config: Callable[..., Any]) -> Callable[..., Any]:
    return of_own_size(make_config)


@pytest.fixture(scope="session")
def make_run(make_run: Callable[..., Any]) -> Callable[..., Any]:
    return of_own_size(make_run)


def of_own_size(make: Callable[..., Any]) -> Callable[..., Any]:
    return lambda **sections: make(**{**sections, "sampling": {**SIZE, **sections.get("sampling", {})}})
