"""Collectives over the ranks of a run: sums, gathered values, the main rank's choices, and failures.

Every rank must call the same functions in the same order. With one rank each function returns its argument at once.
If another rank dies or hangs, a `RankError` names the collective and the rank at fault: before each collective, a rank
writes the collective's label to the store that all ranks share.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import time
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from flowcorr.errors import BackendError, as_utf8

_POLL = 0.05  # seconds
T = TypeVar("T")
Group = dist.ProcessGroup | None


class RankError(BackendError):
    """Another rank failed, or did not reach a collective in time."""


def rank(group: Group = None) -> int:
    """The index of this process among the ranks."""
    return dist.get_rank(group) if _several(group) else 0


def world_size(group: Group = None) -> int:
    """The number of ranks."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def ranks_here() -> int:
    """The number of ranks on this machine, as their launcher says it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size())) if world_size() > 1 else 1


def is_main() -> bool:
    """Whether this is the main rank, which writes files, prints, and counts events that all ranks share."""
    return rank() == 0


def local_indices(count: int) -> range:
    """The indices below `count` that this rank works on: consecutive, and as many as on any other rank, within one."""
    each, more = divmod(count, world_size())
    begin = rank() * each + min(rank(), more)
    return range(begin, begin + each + (rank() < more))


def add_up(values: Tensor, label: str, group: Group = None) -> Tensor:
    """Replace `values` by their sums over all ranks and return them; every rank gets the same bits."""
    if _several(group):
        if values.is_cuda:
            # Wait on the host first, where a missing rank raises an error after the timeout.
            gather(None, label, group)
        with _labelled(label):
            dist.all_reduce(values, group=group)
    return values


def gather_rows(values: Tensor, label: str, group: Group = None) -> Tensor:
    """`values` of all ranks joined along the first axis, in rank order; ranks may have different numbers of rows."""
    if not _several(group):
        return values
    sizes = gather(len(values), label, group)
    with _labelled(label):
        padded = values.new_zeros(max(sizes), *values.shape[1:])
        padded[: len(values)] = values
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def gather(value: T, label: str, group: Group = None) -> list[T]:
    """`value` of each rank in rank order, sent by pickle: for small objects other than tensors."""
    if not _several(group):
        return [value]
    values: list[Any] = [None] * world_size(group)
    with _labelled(label):
        dist.all_gather_object(values, value, group=group)
    return values


def gather_on_main(value: T, label: str) -> list[T] | None:
    """`value` of each rank in rank order on the main rank; None on the others."""
    if not _several(None):
        return [value]
    values: list[Any] | None = [None] * world_size() if is_main() else None
    with _labelled(label):
        dist.gather_object(value, values)
    return values


def from_main(value: T, label: str) -> T:
    """The main rank's `value`, on every rank."""
    if not _several(None):
        return value
    values = [value]
    with _labelled(label):
        dist.broadcast_object_list(values)
    return values[0]


@contextlib.contextmanager
def fail_together(label: str, *, has_collectives: bool = False) -> Iterator[None]:
    """Run a block on all ranks; if it fails on one of them, the others raise a `RankError` that names that rank.

    All ranks have then left the block and can go on. Not so with `has_collectives`: other ranks may be waiting inside
    the block for the failed one, which therefore raises its exception at once. They raise theirs when it has exited.

    Args:
        label: the name of the block in errors.
        has_collectives: whether the block contains collectives, such as forward passes of sharded weights.
    """
    if not _several(None):
        yield
        return
    _withdraw_report()
    try:
        yield
    except Exception as error:
        if has_collectives and (failures := _failures()):
            raise RankError(f"rank {rank()} of {world_size()} gave up {label}: {failures}") from error
        report_failure(error)  # before the gather, which fails if another rank hangs
        if not has_collectives:
            with contextlib.suppress(RankError):  # this rank raises its own failure
                gather(_describe(error), label)
                _withdraw_report()
        raise
    for index, reason in enumerate(gather(None, label)):
        if reason is not None:
            raise RankError(f"rank {index} failed during {label}: {reason}")


def report_failure(error: Exception) -> None:
    """Tell the other ranks that this rank is exiting and why; an error caused by another rank is not reported again."""
    if _several(None) and not isinstance(error, RankError):
        with contextlib.suppress(RuntimeError):
            _store().set(_failure_key(rank()), _describe(error))


def publish(key: str, value: Any) -> None:
    """Leave a small value for the other ranks under a key of its own; unlike a collective, this waits for nobody."""
    _store().set(f"flowcorr/published/{key}", pickle.dumps(value))


def published(key: str) -> Any:
    """The value that a rank leaves under `key`.

    Raises:
        RankError: it does not come within `trainer.collective_timeout`, a rank has reported a failure, or the store has
            ended with the main rank.
    """
    name, timeout = f"flowcorr/published/{key}", _store().timeout.total_seconds()
    waiting = f"rank {rank()} of {world_size()} gave up waiting for the {key}"
    end = time.monotonic() + timeout
    try:
        while not _store().check([name]):
            if failures := _failures():
                raise RankError(f"{waiting}: {failures}")
            if time.monotonic() > end:
                raise RankError(f"{waiting}: it did not come within trainer.collective_timeout={timeout:g} s")
            time.sleep(_POLL)
        return pickle.loads(_store().get(name))
    except dist.DistError as error:
        raise RankError(f"{waiting}: {str(error).partition(chr(10))[0]}") from error


def _several(group: Group) -> bool:
    return world_size(group) > 1


@contextlib.contextmanager
def _labelled(label: str) -> Iterator[None]:
    """Announce a collective to the other ranks before it begins, and name it in the error if it fails here."""
    this = rank()
    with contextlib.suppress(RuntimeError):  # without a store, the collective itself fails below
        _store().add(f"flowcorr/calls/{this}", 1)
        _store().set(f"flowcorr/label/{this}", label)
    try:
        yield
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        with contextlib.suppress(RuntimeError):
            reason = _blame() or reason
        raise RankError(f"rank {this} of {world_size()} gave up waiting for {label}: {reason}") from error


def _blame() -> str:
    """The ranks that reported a failure; if none did, the ranks that made fewer collectives, and their last one."""
    if failures := _failures():
        return failures
    store, ranks = _store(), range(world_size())
    calls = {index: store.add(f"flowcorr/calls/{index}", 0) for index in ranks}
    late = [index for index in ranks if calls[index] < calls[rank()]]
    return "; ".join(f"rank {index} {_last_collective(store, index)}" for index in late)


def _failures() -> str:
    """The failures that other ranks have reported; none if the store ended with the main rank."""
    store, others = _store(), [index for index in range(world_size()) if index != rank()]
    with contextlib.suppress(RuntimeError):
        failed = [index for index in others if store.check([_failure_key(index)])]
        return "; ".join(
            f"rank {index} failed: {store.get(_failure_key(index)).decode()}" for index in failed
        )
    return ""


def _withdraw_report() -> None:
    """Delete this rank's reported failure: it goes on, and must not be blamed for the next failure."""
    with contextlib.suppress(RuntimeError):
        _store().delete_key(_failure_key(rank()))


def _failure_key(index: int) -> str:
    return f"flowcorr/failed/{index}"


def _last_collective(store: Any, index: int) -> str:
    key = f"flowcorr/label/{index}"
    if not store.check([key]):
        return "has not reached any collective yet"
    return f"ended or hangs after {store.get(key).decode()}"


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _describe(error: Exception) -> str:
    return as_utf8(f"{type(error).__name__}: {error}")
