"""What ranks say to each other: sums, gathered values, and agreement on how to go on.

Every rank has to make the same calls in the same order. With one rank each of them hands back what it was given, and
costs nothing. Where an answer does not come, because a rank died or hangs, the others get a `RankError` that says at
what they waited, and which rank is to blame: before each call a rank leaves word in the store that all of them share.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from flowcorr.errors import BackendError

T = TypeVar("T")
Group = dist.ProcessGroup | None


class RankError(BackendError):
    """Another rank failed, or did not answer in time."""


def rank(group: Group = None) -> int:
    """The place of this process among the ranks."""
    return dist.get_rank(group) if _several(group) else 0


def world_size(group: Group = None) -> int:
    """The number of ranks."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def is_main() -> bool:
    """Whether this is the rank that writes, shows, and counts what all ranks do together."""
    return rank() == 0


def share(count: int) -> range:
    """The places among `count` that this rank owns: consecutive, and with others' equally many to within one."""
    each, more = divmod(count, world_size())
    begin = rank() * each + min(rank(), more)
    return range(begin, begin + each + (rank() < more))


def add_up(values: Tensor, what: str, group: Group = None) -> Tensor:
    """Replace `values` by their sums over all ranks, which are the same bits on each, and return them."""
    if _several(group):
        if values.is_cuda:
            # Meet on the host: NCCL waits on the device, where nobody tells who it is that does not come.
            gather(None, what, group)
        with _named(what):
            dist.all_reduce(values, group=group)
    return values


def gather_rows(values: Tensor, what: str, group: Group = None) -> Tensor:
    """`values` of all ranks along their first axis, in rank order; ranks may bring different numbers of rows."""
    if not _several(group):
        return values
    sizes = gather(len(values), what, group)
    with _named(what):
        padded = values.new_zeros(max(sizes), *values.shape[1:])
        padded[: len(values)] = values
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def gather(value: T, what: str, group: Group = None) -> list[T]:
    """`value` of each rank, by pickle: for what is small and no tensor."""
    if not _several(group):
        return [value]
    values: list[Any] = [None] * world_size(group)
    with _named(what):
        dist.all_gather_object(values, value, group=group)
    return values


def gather_on_main(value: T, what: str) -> list[T] | None:
    """`value` of each rank on the main one, and None elsewhere."""
    if not _several(None):
        return [value]
    values: list[Any] | None = [None] * world_size() if is_main() else None
    with _named(what):
        dist.gather_object(value, values)
    return values


def decide(value: T, what: str) -> T:
    """`value` of the main rank."""
    if not _several(None):
        return value
    values = [value]
    with _named(what):
        dist.broadcast_object_list(values)
    return values[0]


@contextlib.contextmanager
def together(what: str) -> Iterator[None]:
    """Let all ranks leave a part of the work alike: where one fails, the others raise a `RankError` that names it.

    The part itself must not wait for other ranks, as one that failed would not come.
    """
    if not _several(None):
        yield
        return
    failure = None
    try:
        yield
    except Exception as error:
        failure = error
    reasons = gather(None if failure is None else _describe(failure), what)
    if failure is not None:
        raise failure
    for place, reason in enumerate(reasons):
        if reason is not None:
            raise RankError(f"rank {place} failed at {what}: {reason}")


def report_failure(error: Exception) -> None:
    """Leave word for the other ranks that this one ends, and why; what another rank is to blame for is left out."""
    if _several(None) and not isinstance(error, RankError):
        with contextlib.suppress(RuntimeError):
            _store().set(f"flowcorr/failed/{rank()}", _describe(error))


def _several(group: Group) -> bool:
    return world_size(group) > 1


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    """Name a collective, before it begins for the other ranks, and where it fails for this one."""
    place = rank()
    with contextlib.suppress(
        RuntimeError
    ):  # a store that has gone tells nobody; the collective itself will fail
        _store().add(f"flowcorr/calls/{place}", 1)
        _store().set(f"flowcorr/at/{place}", what)
    try:
        yield
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        with contextlib.suppress(RuntimeError):
            reason = _blame() or reason
        raise RankError(f"rank {place} of {world_size()} waited in vain at {what}: {reason}") from error


def _blame() -> str:
    """The ranks that left word of a failure; without one, those that lag behind, and where they are."""
    store, ranks = _store(), range(world_size())
    failed = {place: f"flowcorr/failed/{place}" for place in ranks}
    found = {place: store.get(key).decode() for place, key in failed.items() if store.check([key])}
    if found:
        return "; ".join(f"rank {place} failed: {reason}" for place, reason in found.items())
    calls = {place: store.add(f"flowcorr/calls/{place}", 0) for place in ranks}
    late = [place for place in ranks if calls[place] < calls[rank()]]
    return "; ".join(f"rank {place} {_last_word(store, place)}" for place in late)


def _last_word(store: Any, place: int) -> str:
    key = f"flowcorr/at/{place}"
    if not store.check([key]):
        return "has not come to anything yet"
    return f"ended or hangs after {store.get(key).decode()}"


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
