"""Pools of workers for a module's tests, and what happens to them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from ray_tasks import Events


@pytest.fixture(scope="module")
def events() -> Events:
    """What happened to the workers of the module's shared pool."""
    return Events()


@pytest.fixture(scope="module")
def opened(ray_cluster: Any) -> Iterator[Callable[[Any], Any]]:
    """`opened(pool)` is the pool, which is closed at the end of the module."""
    with contextlib.ExitStack() as pools:

        def opened(pool: Any) -> Any:
            pools.callback(pool.close)
            return pool

        yield opened
