"""Workers in Ray: each does one task at a time; who dies or hangs is replaced, and the task runs again elsewhere."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any, Protocol

from flowcorr.errors import BackendError, ConfigError, FlowcorrError
from flowcorr.ray_cluster import Cluster, NodeLostError, one_line, sigterm

logger = logging.getLogger(__name__)

ATTEMPTS = 3  # times that a task is tried, and that a lost worker's place is filled
START_TIMEOUT = 1800.0  # seconds for a worker to load its model
HEARTBEAT = 60.0  # seconds between warnings that workers are still missing
CLOSE_TIMEOUT = 10.0  # seconds for workers to end by themselves
_POLL = 3.0  # seconds between looks whether a worker that starts is still wanted


class OnEvent(Protocol):
    """Told of what happens to workers."""

    def __call__(self, kind: str, /, **fields: Any) -> None: ...


def ignore_event(kind: str, /, **fields: Any) -> None:
    """For those who keep no record."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    """What a task returned, and references to it in Ray's object store, from which other workers may read it."""

    values: Sequence[Any]
    references: Sequence[Any]


@dataclass(slots=True, kw_only=True, eq=False)
class _Task:
    label: str
    method: str
    arguments: tuple[Any, ...]
    num_returns: int
    future: Future[Answer]
    attempts: int = 0

    def succeed(self, answer: Answer) -> None:
        with contextlib.suppress(InvalidStateError):  # the pool has failed meanwhile, and its tasks with it
            self.future.set_result(answer)

    def fail(self, error: Exception) -> None:
        with contextlib.suppress(InvalidStateError):
            self.future.set_exception(error)


@dataclass(slots=True, kw_only=True, eq=False)
class _Worker:
    name: str
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
    """Workers that each hold the object that `build` makes, and call its methods.

    Tasks begin in the order in which they are submitted; the next one goes to whoever is idle, so that others take a
    slow worker's share. A worker that dies, takes longer than `timeout`, or fails otherwise than by the task's own
    fault, is killed and replaced; its task runs again on whoever is free first, `ATTEMPTS` times in all. (Ray's own
    `ActorPool` hands the next task to a worker that died, and waits for one that hangs.) Where the Ray node of this
    process is lost, nobody can be replaced, and all tasks fail at once.

    Args:
        section: `rollout` or `reward`, the configuration's section, for messages.
        build: makes what works; it travels to each worker, and so does the path on which Python finds modules.
        num_workers: their number.
        resources: what Ray reserves for each: `num_cpus`, `num_gpus`, `memory`, or resources of the cluster's own.
        scheduling: `default`, `spread`, or a node's id.
        timeout: seconds for a task.
        address: see `flowcorr.ray_cluster.Cluster`.
        num_threads: CPU threads of torch in each worker; None leaves torch's own choice.
        own_errors: errors that are a task's own fault: it would fail anywhere, and is not tried again.
        on_event: told of `worker_lost`, `worker_restarted`, `shard_retried` and `node_lost`, in a thread.

    Raises:
        ConfigError: the workers cannot be built, or do not fit the cluster.
        MissingExtraError: Ray, or what `build` needs, is not installed.
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
        self._news = threading.Condition()
        self._ended: BackendError | None = None  # why no task is taken any more
        self._threads: list[threading.Thread] = []
        self._workers = [_Worker(name=f"{section} worker {place}") for place in range(num_workers)]
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

    def submit(
        self,
        label: str,
        method: str,
        *arguments: Any,
        num_returns: int = 1,
        future: Future[Answer] | None = None,
    ) -> Future[Answer]:
        """Let a worker call `method`; arguments that are references to objects arrive as those objects.

        Args:
            label: what the task is called in messages and events.
            method: of what `build` made.
            arguments: its arguments.
            num_returns: values that it returns; more than one have a reference each.
            future: gets the answer; None makes a new one.
        """
        future = Future() if future is None else future
        task = _Task(label=label, method=method, arguments=arguments, num_returns=num_returns, future=future)
        self._enqueue(task, self._tasks.append)
        return future

    def check(self) -> None:
        """Raise `BackendError` where no task is taken any more."""
        if self._ended is not None:
            raise self._ended

    def close(self) -> None:
        """Stop the workers, and the cluster if it is ours; what was not done will not be. May be called again."""
        lost = isinstance(self._ended, NodeLostError)
        for task in self._end(BackendError(f"the {self._section} workers are closed")):
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

    def _end(self, reason: BackendError) -> list[_Task]:
        """Take no task any more, and return those that nobody has begun; the first reason stays."""
        with self._news:
            self._ended = self._ended or reason
            left = list(self._tasks)
            self._tasks.clear()
            self._news.notify_all()
        return left

    def _lose_node(self, error: NodeLostError) -> None:
        """Fail at once what is done and what waits, since Ray ends this process some seconds after its node."""
        logger.error("the %s workers are lost: %s", self._section, error)
        self._on_event("node_lost", error=str(error))
        left = self._end(error)
        for task in (*(worker.task for worker in self._workers), *left):
            if task is not None:
                task.fail(error)

    # Serving ---------------------------------------------------------------------------------------------

    def _serve(self, worker: _Worker) -> None:
        """Do tasks with `worker`, and with those that replace it, until the pool closes."""
        while (task := self._next(worker)) is not None:
            try:
                answer = self._do(worker, task)
            except _OwnError as error:
                task.fail(error.cause)
            except Exception as error:
                if self._ended:
                    if isinstance(self._ended, NodeLostError):
                        task.fail(self._ended)
                    task.future.cancel()
                    return
                self._lose(worker, task, error)
                if not self._replace(worker):
                    return
            else:
                task.succeed(answer)

    def _enqueue(self, task: _Task, put: Callable[[_Task], None]) -> None:
        """Put a task among those that wait, or fail it where nobody will do it."""
        with self._news:
            if self._ended is None:
                put(task)
                self._news.notify()
                return
        task.fail(self._ended)

    def _next(self, worker: _Worker) -> _Task | None:
        """The task that `worker` is to do, or None where there will be none."""
        with self._news:
            self._news.wait_for(lambda: self._tasks or self._ended)
            worker.task = None if self._ended else self._tasks.popleft()
            return worker.task

    def _do(self, worker: _Worker, task: _Task) -> Answer:
        import ray
        from ray.exceptions import RayError, RayTaskError

        task.attempts += 1
        try:
            call = worker.actor.call.options(num_returns=task.num_returns)
            references = call.remote(task.method, *task.arguments)
            references = references if task.num_returns > 1 else [references]
            return Answer(values=ray.get(references, timeout=self._timeout), references=references)
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
        """Give up a worker that failed; its task goes to whoever is free next, or has failed for good."""
        reason = one_line(error)
        logger.warning("%s is lost at %s: %s", worker, task.label, reason)
        self._on_event("worker_lost", worker=worker.name, **worker.place, task=task.label, error=reason)
        if task.attempts >= ATTEMPTS:
            task.fail(
                BackendError(f"{task.label} failed {task.attempts} times, at last on {worker}: {reason}")
            )
            return
        self._on_event("shard_retried", task=task.label, attempt=task.attempts + 1)
        self._enqueue(task, self._tasks.appendleft)

    def _replace(self, worker: _Worker) -> bool:
        """Fill a lost worker's place; False if nobody can. The last one who finds so fails all that is left."""
        reason = ""
        for attempt in range(ATTEMPTS):
            try:
                _kill(worker)
                time.sleep(attempt)
                self._launch(worker)
                self._await_start(worker)
            except Exception as error:
                if self._ended:
                    return False
                reason = one_line(error)
                logger.warning("%s could not be replaced: %s", worker, reason)
                continue
            self._on_event("worker_restarted", worker=worker.name, **worker.place)
            return True
        _kill(worker)
        self._on_event("worker_lost", worker=worker.name, task="restart", error=reason)
        with self._news:
            self._serving -= 1
            if self._serving:
                return False
        failure = BackendError(f"no {self._section} worker is left; {worker.name} at last: {reason}")
        for task in self._end(failure):
            task.fail(failure)
        return False

    # Starting --------------------------------------------------------------------------------------------

    def _launch(self, worker: _Worker) -> None:
        """Begin to start a worker."""
        import ray

        self.check()  # or Ray, once it is gone, would start anew by itself
        worker.place = {}
        worker.actor = ray.remote(FlowcorrWorker).options(**self._options).remote(sys.path)
        worker.starting = worker.actor.start.remote(self._build, self._num_threads)
        if self._ended:
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


class FlowcorrWorker:
    """The Ray actor, by whose name `ps` shows the process: it holds what works."""

    def __init__(self, path: Sequence[str]) -> None:
        sys.path += [folder for folder in path if folder not in sys.path]

    def start(self, build: Callable[[], Any], num_threads: int | None) -> dict[str, Any]:
        """Make what works; returns node and process."""
        import ray

        if num_threads is not None:
            import torch

            torch.set_num_threads(num_threads)
        with sigterm(signal.SIG_UNBLOCK):  # for processes that are started here, and ended by it
            self._works = build()
        return {"node": ray.get_runtime_context().get_node_id(), "pid": os.getpid()}

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of what works."""
        return getattr(self._works, method)(*arguments)

    def close(self) -> None:
        """Let go of what works, if it holds processes of its own."""
        with contextlib.suppress(AttributeError):
            self._works.close()


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
            f"{section}.scheduling={scheduling!r} is no node of the cluster; there are {', '.join(alive)}"
        )
    options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(scheduling, soft=False)
    return options


def _check_resources(section: str, num_workers: int, resources: Mapping[str, float]) -> None:
    """Raise `ConfigError` where a cluster that cannot grow will never have room for all workers."""
    import ray

    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if ranks > 1 and resources.get("num_gpus"):
        raise ConfigError(
            f"{section}.worker_resources.num_gpus={resources['num_gpus']:g}: each of {ranks} ranks on this machine "
            "would start a Ray cluster of its own, and all of them would hand out the same GPUs; start one for all by "
            "`CUDA_VISIBLE_DEVICES=... ray start --head`, on GPUs that no rank trains on, and name it in RAY_ADDRESS"
        )
    names = {"num_cpus": "CPU", "num_gpus": "GPU"}
    there = ray.cluster_resources()
    for name, amount in resources.items():
        if num_workers * amount > (most := there.get(names.get(name, name), 0.0)):
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
