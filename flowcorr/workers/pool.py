"""One pool of Ray workers for all ranks: each rank sends its tasks to the dispatcher that owns the workers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any, Protocol

from flowcorr import distributed
from flowcorr.errors import BackendError, ConfigError
from flowcorr.workers.cluster import Cluster, one_line
from flowcorr.workers.dispatcher import CLOSE_TIMEOUT, FlowcorrDispatcher, WorkerOptions

logger = logging.getLogger(__name__)

_NUMBERS = itertools.count()  # every rank opens the same pools in the same order
_MAX_CALLS = 100_000  # of the dispatcher at once: each waiting task is one


class OnEvent(Protocol):
    """Gets a record of each event, such as the loss of a worker."""

    def __call__(self, kind: str, /, **fields: Any) -> None: ...


def ignore_event(kind: str, /, **fields: Any) -> None:
    """Keep no record."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    """The result of a task.

    Attributes:
        values: the values.
        references: to them in Ray's object store, for other workers.
        worker: the number of the worker that did it.
    """

    values: Sequence[Any]
    references: Sequence[Any]
    worker: int


class WorkerPool:
    """Workers that each hold an object and call its methods, for the tasks of all ranks.

    Tasks start in the order of their submission, each in the first worker that is idle, so a slow worker gets fewer. A
    worker that dies, takes longer than `timeout`, or fails by an error that is not one of `own_errors`, is killed and
    replaced. Its task runs again in the next idle worker, `ATTEMPTS` times in all. (Ray's `ActorPool` gives the next
    task to a worker that died, and waits for one that hangs.)

    The main rank joins or starts the cluster and starts the dispatcher on its own node; every other rank joins that
    cluster. If the dispatcher ends, as it does with its node, all tasks fail within about two seconds.

    Args:
        build: makes the object; it is pickled to each worker, together with Python's module search path.
        options: of the workers.
        address: see `flowcorr.workers.cluster.Cluster`; the main rank alone reads it.
        on_event: gets records of `worker_lost`, `worker_restarted`, `worker_faulty`, `shard_retried` and
            `workers_lost`, in a thread of the main rank.

    Raises:
        ConfigError: the workers cannot be built, or the cluster has no room for them.
        MissingExtraError: Ray, or a package that `build` needs, is not installed.
        BackendError: a worker does not start, or this rank's node is none of the cluster.
    """

    def __init__(
        self, build: Callable[[], Any], options: WorkerOptions, *, address: str | None, on_event: OnEvent
    ) -> None:
        section = self._section = options.section
        self._on_event = on_event
        self._closed: BackendError | None = None  # the reason why the pool takes no more tasks
        self._cluster: Cluster | None = None
        self._dispatcher: Any = None
        self._shares = itertools.count()
        name = f"{section} pool {next(_NUMBERS)}"
        # Ray's own callbacks must not block, as those of a task may; so they run in a thread of this pool.
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()
        feature = f"{section}.placement=ray"
        try:
            if not distributed.is_main():
                self._cluster, self._dispatcher = _join(name, feature)
                self._in_thread(self._watch())
                return
            self._cluster = Cluster(address, feature=feature)
            actor_options = _actor_options(options)
            if self._cluster.local:
                _check_resources(options)
            self._dispatcher = _start_dispatcher(name, options, actor_options)
            if distributed.world_size() > 1:
                distributed.publish(name, self._cluster.invitation())
            self._in_thread(self._watch())
            logger.info("starting %s workers: %d", section, options.num_workers)
            begin = time.monotonic()
            self._ask("start", [_put(build)])
            logger.info("the %s workers are ready after %.0f s", section, time.monotonic() - begin)
        except BaseException:
            self.close()
            raise

    @property
    def places(self) -> list[Mapping[str, Any]]:
        """Node and process of each worker."""
        return self._ask("places")

    @property
    def num_busy(self) -> int:
        """How many workers have a task."""
        return self._ask("num_busy")

    def submit(self, label: str, method: str, *arguments: Any, num_returns: int = 1) -> Future[Answer]:
        """Call a method of a worker's object; references among the arguments are replaced by their objects.

        Args:
            label: the task's name in messages and events.
            method: the method's name.
            arguments: its arguments.
            num_returns: number of values that it returns; several get one reference each.
        """
        return self._in_thread(self._run(label, method, arguments, num_returns))

    def submit_after(
        self, before: Future[Answer], label: str, method: str, arguments: Callable[[Answer], Sequence[Any]]
    ) -> Future[Answer]:
        """Submit a task as soon as another has its answer; without an answer, the task is cancelled.

        Args:
            before: the other task, perhaps of another pool.
            label: see `submit`.
            method: see `submit`.
            arguments: makes the arguments of the answer.
        """

        async def run() -> Answer:
            try:
                answer = await asyncio.wrap_future(before)
            except Exception:
                raise asyncio.CancelledError from None
            return await self._run(label, method, arguments(answer), 1)

        return self._in_thread(run())

    def retire(self, reasons: Mapping[int, str]) -> bool:
        """See `FlowcorrDispatcher.retire`."""
        return bool(self._ask("retire", reasons))

    def share(self, value: Any) -> Any:
        """A reference to the main rank's `value` in the object store; every rank has to call."""
        self.check()  # without a cluster, `ray.put` would end this process or start another cluster
        number = next(self._shares)
        if not distributed.is_main():
            return self._ask("shared", number, distributed.rank())[0]
        reference = _put(value)
        if distributed.world_size() > 1:
            self._ask("share", number, distributed.world_size(), [reference])
        return reference

    def check(self) -> None:
        """Raise the `BackendError` that closed the pool, if one has."""
        if self._closed is not None:
            raise self._closed

    def close(self) -> None:
        """Cancel this rank's tasks; the main rank also stops the workers, and the cluster if it started it.

        May be called again.
        """
        if not self._thread.is_alive():
            return
        lost = self._closed is not None
        self._closed = self._closed or BackendError(f"the {self._section} workers are closed")
        asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result()
        if self._dispatcher is not None and distributed.is_main() and not lost:
            import ray

            with contextlib.suppress(ray.exceptions.RayError):
                ray.get(self._dispatcher.close.remote(), timeout=2 * CLOSE_TIMEOUT)
            ray.kill(self._dispatcher)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        if self._cluster is not None:
            self._cluster.close()

    def _in_thread(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run a coroutine in the pool's thread; in the order of these calls, until each first waits."""
        if self._thread.is_alive():
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        coroutine.close()
        closed: Future[Any] = Future()
        closed.set_exception(self._closed)
        return closed

    def _ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the dispatcher and wait for its value."""
        try:
            return self._in_thread(self._call(method, *arguments)).result()
        except CancelledError:
            assert self._closed is not None
            raise self._closed from None

    async def _call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the dispatcher."""
        from ray.exceptions import RayError, RayTaskError

        self.check()
        try:
            return await getattr(self._dispatcher, method).remote(*arguments)
        except RayTaskError as error:
            raise error.cause from error  # whose text holds the traceback
        except RayError as error:
            raise self._lose(error) from error

    async def _run(self, label: str, method: str, arguments: Sequence[Any], num_returns: int) -> Answer:
        from ray.exceptions import ObjectLostError, RayTaskError

        self.check()
        sent = [_put(arguments)]
        while True:
            references, worker = await self._call("run", label, method, sent, num_returns)
            try:
                values = await asyncio.gather(*references)
            except RayTaskError as error:
                raise error.cause from error
            except ObjectLostError as error:
                logger.warning(
                    "the values of %s are lost with their node and computed again: %s", label, error
                )
            else:
                return Answer(values=values, references=references, worker=worker)

    async def _watch(self) -> None:
        """Notice at once that the dispatcher ends; until then the main rank reports its events."""
        reported = 0
        with contextlib.suppress(BackendError):  # `_lose` has reported it
            if not distributed.is_main():
                await self._call("closing")
                self._closed = BackendError(f"the main rank has closed the {self._section} workers")
                return
            while True:
                for event in await self._call("events", reported):
                    reported += 1
                    logger.warning("%s", event.message)
                    if event.kind:
                        self._record(event.kind, **event.fields)

    def _lose(self, error: Exception) -> BackendError:
        """Take no more tasks, since the dispatcher has ended: Ray ends this process some seconds after its node."""
        if self._closed is None:
            reason = (
                f"the {self._section} workers are lost, since their dispatcher has ended, or its Ray node"
            )
            self._closed = BackendError(f"{reason}; continue with --resume ({one_line(error)})")
            logger.error("%s", self._closed)
            if distributed.is_main():
                self._record("workers_lost", error=str(self._closed))
        return self._closed

    def _record(self, kind: str, **fields: Any) -> None:
        """Call `on_event`; workers wait for that, so its failure is logged and does not stop them."""
        try:
            self._on_event(kind, **fields)
        except Exception:
            logger.exception("the event %s of the %s workers could not be recorded", kind, self._section)


def _start_dispatcher(name: str, options: WorkerOptions, actor_options: Mapping[str, Any]) -> Any:
    """Start the dispatcher on the node of this process."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(FlowcorrDispatcher).options(
        name=name, num_cpus=0, max_concurrency=_MAX_CALLS, scheduling_strategy=here
    )
    return actor.remote(options, actor_options, sys.path)


def _join(name: str, feature: str) -> tuple[Cluster, Any]:
    """Join the main rank's cluster; returns the connection and the dispatcher."""
    address, namespace, secrets = distributed.published(name)
    os.environ.update(secrets)
    cluster = Cluster(address, feature=feature)
    try:
        import ray

        return cluster, ray.get_actor(name, namespace)
    except ValueError as error:
        cluster.close()
        raise BackendError(f"the main rank has closed the workers: {one_line(error)}") from error


async def _cancel_all() -> None:
    """Cancel all tasks of this thread's loop but this one."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _put(value: Any) -> Any:
    import ray

    return ray.put(value)


def _actor_options(options: WorkerOptions) -> dict[str, Any]:
    """The options of Ray's actors."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    own, scheduling = ("num_cpus", "num_gpus", "memory"), options.scheduling
    of_actor: dict[str, Any] = {name: amount for name, amount in options.resources.items() if name in own}
    of_actor["resources"] = {name: amount for name, amount in options.resources.items() if name not in own}
    if scheduling in ("default", "spread"):
        return of_actor | {"scheduling_strategy": scheduling.upper()}
    alive = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    if scheduling not in alive:
        raise ConfigError(
            f"{options.section}.scheduling={scheduling!r} is not a node of the cluster; its nodes are "
            f"{', '.join(alive)}"
        )
    return of_actor | {"scheduling_strategy": NodeAffinitySchedulingStrategy(scheduling, soft=False)}


def _check_resources(options: WorkerOptions) -> None:
    """Raise `ConfigError` if a cluster that cannot grow has no room for all workers."""
    import ray

    section, num_workers, resources = options.section, options.num_workers, options.resources
    ranks = distributed.ranks_here()
    if ranks > 1 and resources.get("num_gpus"):
        raise ConfigError(
            f"{section}.worker_resources.num_gpus={resources['num_gpus']:g} would take the GPUs on which {ranks} ranks "
            "train, since the Ray cluster that flowcorr starts hands out GPUs from index 0 on; start a cluster by "
            "`CUDA_VISIBLE_DEVICES=... ray start --head`, on GPUs that no rank trains on, and name it in RAY_ADDRESS"
        )
    names = {"num_cpus": "CPU", "num_gpus": "GPU"}
    available = ray.cluster_resources()
    for name, amount in resources.items():
        if num_workers * amount > (most := available.get(names.get(name, name), 0.0)):
            raise ConfigError(
                f"{section}.worker_resources.{name}={amount:g} for {section}.num_workers={num_workers} is more than "
                f"the {most:g} of this machine; ask for less, or join a cluster with rollout.ray_address"
            )
