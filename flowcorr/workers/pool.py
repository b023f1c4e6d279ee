"""A pool of Ray workers with one task each; a worker that dies or hangs is replaced, and its task runs again."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any, Protocol

from flowcorr.errors import BackendError, ConfigError, FlowcorrError
from flowcorr.workers.cluster import Cluster, NodeLostError, one_line
from flowcorr.workers.process import FlowcorrWorker

logger = logging.getLogger(__name__)

ATTEMPTS = 3  # for a task, and for replacing a lost worker
START_TIMEOUT = 1800.0  # seconds for a worker to load its model
HEARTBEAT = 60.0  # seconds between warnings that a worker has not started
CLOSE_TIMEOUT = 10.0  # seconds for workers to close before they are killed
_POLL = 3.0  # seconds between checks, while a worker starts, that the pool is still open


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


@dataclass(slots=True, kw_only=True, eq=False)
class _Task:
    label: str
    method: str
    arguments: tuple[Any, ...]
    num_returns: int
    future: Future[Answer]
    attempts: int = 0

    def succeed(self, answer: Answer) -> None:
        with contextlib.suppress(InvalidStateError):  # the pool has failed, and with it all of its tasks
            self.future.set_result(answer)

    def fail(self, error: Exception) -> None:
        with contextlib.suppress(InvalidStateError):
            self.future.set_exception(error)


@dataclass(slots=True, kw_only=True, eq=False)
class _Worker:
    name: str
    number: int
    actor: Any = None
    starting: Any = None
    place: dict[str, Any] = field(default_factory=dict)
    task: _Task | None = None

    @property
    def busy(self) -> bool:
        return self.task is not None

    def __str__(self) -> str:
        where = f" (process {self.place['pid']} on node {self.place['node']})" if self.place else ""
        return f"{self.name}{where}"


class WorkerPool:
    """Workers that each hold an object and call its methods.

    Tasks start in the order of their submission, each in the first worker that is idle, so a slow worker gets fewer. A
    worker that dies, takes longer than `timeout`, or fails by an error that is not one of `own_errors`, is killed and
    replaced. Its task runs again in the next idle worker, `ATTEMPTS` times in all. (Ray's `ActorPool` gives the next
    task to a worker that died, and waits for one that hangs.) If this process loses its Ray node, no worker can be
    replaced, and all tasks fail at once.

    Args:
        section: `rollout` or `reward`: the section of the configuration, for messages.
        build: makes the object; it is pickled to each worker, together with Python's module search path.
        num_workers: number of workers.
        resources: what Ray reserves for each worker: `num_cpus`, `num_gpus`, `memory`, or custom resources.
        scheduling: `default`, `spread`, or a node's id.
        timeout: seconds for a task.
        address: see `flowcorr.workers.cluster.Cluster`.
        num_threads: CPU threads of torch in each worker; None keeps torch's default.
        own_errors: errors of the task rather than of the worker; the task is not retried, since it would fail again.
        on_event: gets records of `worker_lost`, `worker_restarted`, `shard_retried` and `node_lost`, in a thread.

    Raises:
        ConfigError: the workers cannot be built, or the cluster has no room for them.
        MissingExtraError: Ray, or a package that `build` needs, is not installed.
        BackendError: a worker does not start.
    """

    def __init__(
        self,
        section: str,
        build: Callable[[], Any],
        *,
        num_workers: int,
        resources: Mapping[str, float],
        timeout: float,
        address: str | None,
        num_threads: int | None,
        own_errors: tuple[type[Exception], ...],
        on_event: OnEvent,
        scheduling: str = "default",
    ) -> None:
        self._section = section
        self._build = build
        self._timeout = timeout
        self._num_threads = num_threads
        self._own_errors = own_errors
        self._on_event = on_event
        self._tasks: deque[_Task] = deque()
        self._changed = threading.Condition()  # of `_tasks` and `_closed`
        self._closed: BackendError | None = None  # the reason why the pool takes no more tasks
        self._threads: list[threading.Thread] = []
        self._workers = [
            _Worker(name=f"{section} worker {number}", number=number) for number in range(num_workers)
        ]
        self._cluster = Cluster(address, feature=f"{section}.placement=ray", on_lost=self._lose_node)
        try:
            self._options = _actor_options(section, num_workers, resources, scheduling)
            if self._cluster.local:
                _check_resources(section, num_workers, resources)
            logger.info("starting %s workers: %d", section, num_workers)
            begin = time.monotonic()
            for worker in self._workers:
                self._launch(worker)
            for worker in self._workers:
                self._await_start(worker)
            logger.info("the %s workers are ready after %.0f s", section, time.monotonic() - begin)
        except BaseException:
            self.close()
            raise
        self._serving = num_workers
        for worker in self._workers:
            thread = threading.Thread(target=self._serve, args=(worker,), name=worker.name, daemon=True)
            self._threads.append(thread)
            thread.start()

    @property
    def places(self) -> list[Mapping[str, Any]]:
        """Node and process of each worker."""
        return [dict(worker.place) for worker in self._workers]

    @property
    def num_busy(self) -> int:
        """How many workers have a task."""
        return sum(worker.busy for worker in self._workers)

    def submit(
        self,
        label: str,
        method: str,
        *arguments: Any,
        num_returns: int = 1,
        future: Future[Answer] | None = None,
    ) -> Future[Answer]:
        """Call a method of a worker's object; Ray replaces references among the arguments by their objects.

        Args:
            label: the task's name in messages and events.
            method: the method's name.
            arguments: its arguments.
            num_returns: number of values that it returns; several get one reference each.
            future: receives the answer; None makes a new one.
        """
        future = Future() if future is None else future
        task = _Task(label=label, method=method, arguments=arguments, num_returns=num_returns, future=future)
        self._enqueue(task, self._tasks.append)
        return future

    def check(self) -> None:
        """Raise the `BackendError` that closed the pool, if one has."""
        if self._closed is not None:
            raise self._closed

    def close(self) -> None:
        """Stop the workers, and the cluster if this pool started it; cancel tasks that wait. May be called again."""
        lost = isinstance(self._closed, NodeLostError)
        for task in self._close_queue(BackendError(f"the {self._section} workers are closed")):
            task.future.cancel()
        if any(worker.actor is not None for worker in self._workers):
            import ray

            idle = [worker.actor for worker in self._workers if worker.place and not worker.busy and not lost]
            endings = [actor.close.remote() for actor in idle if actor is not None]
            if endings:
                ray.wait(endings, num_returns=len(endings), timeout=CLOSE_TIMEOUT)
            for worker in self._workers:
                _kill(worker)
        deadline = time.monotonic() + CLOSE_TIMEOUT
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._cluster.close()

    def _close_queue(self, reason: BackendError) -> list[_Task]:
        """Take no more tasks; return the tasks that have not started. The first reason is kept."""
        with self._changed:
            self._closed = self._closed or reason
            waiting = list(self._tasks)
            self._tasks.clear()
            self._changed.notify_all()
        return waiting

    def _lose_node(self, error: NodeLostError) -> None:
        """Fail all running and waiting tasks at once: Ray ends this process some seconds after its node."""
        logger.error("the %s workers are lost: %s", self._section, error)
        self._on_event("node_lost", error=str(error))
        waiting = self._close_queue(error)
        for task in (*(worker.task for worker in self._workers), *waiting):
            if task is not None:
                task.fail(error)

    # Serving ---------------------------------------------------------------------------------------------

    def _serve(self, worker: _Worker) -> None:
        """Run tasks in `worker`, and in the workers that replace it, until the pool closes."""
        while (task := self._next(worker)) is not None:
            try:
                answer = self._do(worker, task)
            except _OwnError as error:
                task.fail(error.cause)
            except Exception as error:
                if self._closed:
                    if isinstance(self._closed, NodeLostError):
                        task.fail(self._closed)
                    task.future.cancel()
                    return
                self._lose(worker, task, error)
                if not self._replace(worker):
                    return
            else:
                task.succeed(answer)

    def _enqueue(self, task: _Task, put: Callable[[_Task], None]) -> None:
        """Put a task into the queue, or fail it if the pool is closed."""
        with self._changed:
            if self._closed is None:
                put(task)
                self._changed.notify()
                return
        task.fail(self._closed)

    def _next(self, worker: _Worker) -> _Task | None:
        """Wait for the next task of `worker`; None if the pool has closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._tasks or self._closed)
            worker.task = None if self._closed else self._tasks.popleft()
            return worker.task

    def _do(self, worker: _Worker, task: _Task) -> Answer:
        import ray
        from ray.exceptions import RayError, RayTaskError

        task.attempts += 1
        try:
            call = worker.actor.call.options(num_returns=task.num_returns)
            references = call.remote(task.method, *task.arguments)
            references = references if task.num_returns > 1 else [references]
            values = ray.get(references, timeout=self._timeout)
            return Answer(values=values, references=references, worker=worker.number)
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, self._own_errors) and not isinstance(cause, RayError):
                cause.__cause__ = error  # its text holds the worker's traceback
                raise _OwnError(cause) from None
            raise
        except ray.exceptions.GetTimeoutError:
            raise TimeoutError(f"no answer within {self._section}.timeout={self._timeout:g} s") from None
        finally:
            worker.task = None

    def _lose(self, worker: _Worker, task: _Task, error: Exception) -> None:
        """Record the loss of a worker, and queue its task again unless that was the last attempt."""
        reason = one_line(error)
        logger.warning("%s was lost during %s: %s", worker, task.label, reason)
        self._on_event("worker_lost", worker=worker.name, **worker.place, task=task.label, error=reason)
        if task.attempts >= ATTEMPTS:
            task.fail(
                BackendError(
                    f"{task.label} failed {task.attempts} times, the last time in {worker}: {reason}"
                )
            )
            return
        self._on_event("shard_retried", task=task.label, attempt=task.attempts + 1)
        self._enqueue(task, self._tasks.appendleft)

    def _replace(self, worker: _Worker) -> bool:
        """Start a worker in place of a lost one; False if that fails. The pool closes when no worker is left."""
        reason = ""
        for attempt in range(ATTEMPTS):
            try:
                _kill(worker)
                time.sleep(attempt)
                self._launch(worker)
                self._await_start(worker)
            except Exception as error:
                if self._closed:
                    return False
                reason = one_line(error)
                logger.warning("%s could not be replaced: %s", worker, reason)
                continue
            self._on_event("worker_restarted", worker=worker.name, **worker.place)
            return True
        _kill(worker)
        self._on_event("worker_lost", worker=worker.name, task="restart", error=reason)
        with self._changed:
            self._serving -= 1
            if self._serving:
                return False
        failure = BackendError(
            f"no {self._section} worker is left; the last, {worker.name}, failed with {reason}"
        )
        for task in self._close_queue(failure):
            task.fail(failure)
        return False

    # Starting --------------------------------------------------------------------------------------------

    def _launch(self, worker: _Worker) -> None:
        """Start a worker, without waiting for it."""
        import ray

        self.check()  # without a cluster, Ray would start a new one by itself
        worker.place = {}
        worker.actor = ray.remote(FlowcorrWorker).options(**self._options).remote(sys.path)
        worker.starting = worker.actor.start.remote(self._build, self._num_threads)
        if self._closed:
            _kill(worker)

    def _await_start(self, worker: _Worker) -> None:
        import ray
        from ray.exceptions import RayError, RayTaskError

        begin, warn_at = time.monotonic(), HEARTBEAT
        while not ray.wait([worker.starting], timeout=_POLL)[0]:
            self.check()
            waited = time.monotonic() - begin
            if waited > START_TIMEOUT:
                raise BackendError(f"{worker} did not start within {waited:.0f} s")
            if waited > warn_at:
                warn_at += HEARTBEAT
                logger.warning(
                    "%s is not ready after %.0f s; free in the cluster: %s", worker, waited, _free()
                )
        try:
            worker.place = ray.get(worker.starting)
        except RayTaskError as error:
            if isinstance(error.cause, FlowcorrError):
                raise error.cause from error
            raise BackendError(f"{worker} did not start: {one_line(error)}") from error
        except RayError as error:
            raise BackendError(f"{worker} did not start: {one_line(error)}") from error


class _OwnError(Exception):
    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


def _actor_options(
    section: str, num_workers: int, resources: Mapping[str, float], scheduling: str
) -> dict[str, Any]:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    own = ("num_cpus", "num_gpus", "memory")
    options: dict[str, Any] = {name: amount for name, amount in resources.items() if name in own}
    options["resources"] = {name: amount for name, amount in resources.items() if name not in own}
    if scheduling in ("default", "spread"):
        options["scheduling_strategy"] = scheduling.upper()
        return options
    alive = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    if scheduling not in alive:
        raise ConfigError(
            f"{section}.scheduling={scheduling!r} is not a node of the cluster; its nodes are {', '.join(alive)}"
        )
    options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(scheduling, soft=False)
    return options


def _check_resources(section: str, num_workers: int, resources: Mapping[str, float]) -> None:
    """Raise `ConfigError` if a cluster that cannot grow has no room for all workers."""
    import ray

    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
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


def _free() -> str:
    import ray

    return ", ".join(f"{name} {amount:g}" for name, amount in sorted(ray.available_resources().items()))


def _kill(worker: _Worker) -> None:
    import ray

    actor, worker.actor = worker.actor, None
    if actor is not None and ray.is_initialized():
        ray.kill(actor)
