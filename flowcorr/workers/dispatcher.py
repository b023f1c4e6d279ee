"""The actor that gives the tasks of all ranks to idle workers, and replaces workers that die or hang."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flowcorr.errors import BackendError, FlowcorrError
from flowcorr.workers.cluster import one_line
from flowcorr.workers.process import FlowcorrWorker

ATTEMPTS = 3  # for a task, and for replacing a lost worker
START_TIMEOUT = 1800.0  # seconds for a worker to load its model
HEARTBEAT = 60.0  # seconds between warnings that a worker has not started
CLOSE_TIMEOUT = 10.0  # seconds for workers to close before they are killed


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WorkerOptions:
    """The options of a pool's workers.

    Attributes:
        section: `rollout` or `reward`: the section of the configuration, for messages.
        num_workers: number of workers.
        resources: Ray resources reserved for each worker: `num_cpus`, `num_gpus`, `memory`, or custom ones.
        scheduling: `default`, `spread`, or a node's id.
        timeout: seconds for a task.
        num_threads: CPU threads of torch in each worker; None keeps torch's default.
        own_errors: errors of the task rather than of the worker; the task is not retried, since it would fail again.
    """

    section: str
    num_workers: int
    resources: Mapping[str, float]
    timeout: float
    num_threads: int | None = None
    own_errors: tuple[type[Exception], ...] = ()
    scheduling: str = "default"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Event:
    """An event of a worker: a line for the log and, if it has a `kind`, fields for the record of the run."""

    message: str
    kind: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True, eq=False)
class _Task:
    label: str
    method: str
    arguments: Any  # a reference to them
    num_returns: int
    answer: asyncio.Future[tuple[list[Any], int]]
    attempts: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class _Worker:
    name: str
    number: int
    actor: Any = None
    place: dict[str, Any] = field(default_factory=dict)
    busy: bool = False

    def __str__(self) -> str:
        where = f" (process {self.place['pid']} on node {self.place['node']})" if self.place else ""
        return f"{self.name}{where}"


class FlowcorrDispatcher:
    """Owns the workers; `ps` shows its process under this class's name.

    It only handles references: neither arguments nor values are unpickled here, so it imports no torch. A task that
    runs again keeps its number in the queue, and so comes before later ones.

    Args:
        options: of the workers.
        actor_options: those of Ray's actors, such as the resources that they reserve.
        path: Python's module search path in each worker.
    """

    def __init__(self, options: WorkerOptions, actor_options: Mapping[str, Any], path: Sequence[str]) -> None:
        self._options, self._actor_options, self._path = options, actor_options, path
        sys.path += [folder for folder in path if folder not in sys.path]  # of the errors that tasks raise
        os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"  # here all errors are in references that nobody reads
        self._workers = [
            _Worker(name=f"{options.section} worker {number}", number=number)
            for number in range(options.num_workers)
        ]
        self._serving: list[asyncio.Task[None]] = []
        self._numbers = itertools.count()
        self._tasks: asyncio.PriorityQueue[tuple[int, _Task]] = asyncio.PriorityQueue()
        self._failure: BackendError | None = None
        self._events: list[Event] = []
        self._reported = 0  # number of events
        self._happened = asyncio.Condition()  # of both
        self._closing = asyncio.Event()
        self._shared: defaultdict[tuple[int, int], asyncio.Future[Any]] = defaultdict(asyncio.Future)

    async def start(self, build: Sequence[Any]) -> None:
        """Start the workers and wait until all are ready.

        Args:
            build: a reference to the function that makes each worker's object.
        """
        (self._build,) = build
        await asyncio.gather(*map(self._launch, self._workers))
        self._serving = [asyncio.create_task(self._serve(worker)) for worker in self._workers]

    async def run(
        self, label: str, method: str, arguments: Sequence[Any], num_returns: int
    ) -> tuple[list[Any], int]:
        """Call a method of a worker's object; returns references to its values, and the worker's number.

        Args:
            label: the task's name in messages and events.
            method: the method's name.
            arguments: a reference to the arguments. (In a sequence, Ray leaves it a reference.)
            num_returns: number of values that it returns.
        """
        if self._failure is not None:
            raise self._failure
        task = _Task(
            label=label,
            method=method,
            arguments=arguments[0],
            num_returns=num_returns,
            answer=asyncio.get_running_loop().create_future(),
        )
        self._tasks.put_nowait((next(self._numbers), task))
        return await task.answer

    async def events(self, reported: int) -> list[Event]:
        """All events after the first `reported`, for the main rank; waits for one."""
        async with self._happened:
            self._reported = reported
            self._happened.notify_all()
            await self._happened.wait_for(lambda: len(self._events) > reported)
        return self._events[reported:]

    async def closing(self) -> None:
        """Wait for `close`; the caller gets an error if this actor ends before."""
        await self._closing.wait()

    async def share(self, number: int, num_ranks: int, reference: Sequence[Any]) -> None:
        """Keep a reference until each rank but the main one has asked for it by its number."""
        for rank in range(1, num_ranks):
            self._shared[number, rank].set_result(reference)

    async def shared(self, number: int, rank: int) -> Sequence[Any]:
        """The reference of that number, for a rank; waits for it."""
        reference = await self._shared[number, rank]
        del self._shared[number, rank]
        return reference

    async def places(self) -> list[dict[str, Any]]:
        """Node and process of each worker."""
        return [worker.place for worker in self._workers]

    async def num_busy(self) -> int:
        """How many workers have a task."""
        return sum(worker.busy for worker in self._workers)

    async def retire(self, reasons: Mapping[int, str]) -> bool:
        """Take workers out, and start none in their place. A task that one of them has runs again in another.

        Each rank may call it with the same workers.

        Args:
            reasons: by number of a worker, why.

        Returns:
            Whether a worker is left; if none would be, all stay.
        """
        retired = [worker for worker in self._workers if worker.number in reasons]
        if len(retired) == len(self._workers):
            return False
        for worker in retired:
            self._workers.remove(worker)
            if not worker.busy:
                self._serving[worker.number].cancel()
        for worker in retired:
            _kill(worker)
            reason = reasons[worker.number]
            await self._tell(
                f"{worker} is taken out, {len(self._workers)} left: {reason}",
                "worker_faulty", worker=worker.name, **worker.place, error=reason,
            )  # fmt: skip
        return True

    async def close(self) -> None:
        """Let idle workers close, and kill all."""
        self._closing.set()
        for serving in self._serving:
            serving.cancel()
        endings = [
            asyncio.wrap_future(worker.actor.close.remote().future())
            for worker in self._workers
            if worker.place and not worker.busy
        ]
        if endings:
            await asyncio.wait(endings, timeout=CLOSE_TIMEOUT)
        for worker in self._workers:
            _kill(worker)

    # Serving ---------------------------------------------------------------------------------------------

    async def _serve(self, worker: _Worker) -> None:
        """Run tasks in `worker`, and in the workers that replace it, until none can."""
        while True:
            number, task = await self._tasks.get()
            worker.busy = True
            try:
                references = await self._call(worker, task)
            except Exception as error:
                await self._lose(worker, number, task, error)
                worker.busy = False
                if worker not in self._workers or not await self._replace(worker):
                    return
            else:
                worker.busy = False
                task.answer.set_result((references, worker.number))

    async def _call(self, worker: _Worker, task: _Task) -> list[Any]:
        """References to the values of a task, or to the error that is its own."""
        from ray.exceptions import RayError, RayTaskError

        task.attempts += 1
        call = worker.actor.call.options(num_returns=1 + task.num_returns)
        done, *references = call.remote(task.method, task.arguments, task.num_returns)
        try:
            await asyncio.wait_for(done, self._options.timeout)
        except RayTaskError as error:
            if not isinstance(error.cause, self._options.own_errors) or isinstance(error.cause, RayError):
                raise
        except TimeoutError:
            section, timeout = self._options.section, self._options.timeout
            raise TimeoutError(f"no answer within {section}.timeout={timeout:g} s") from None
        return references

    async def _lose(self, worker: _Worker, number: int, task: _Task, error: Exception) -> None:
        """Record the loss of a worker, and queue its task again unless that was the last attempt."""
        reason = one_line(error)
        await self._tell(
            f"{worker} was lost during {task.label}: {reason}",
            "worker_lost", worker=worker.name, **worker.place, task=task.label, error=reason,
        )  # fmt: skip
        if task.attempts >= ATTEMPTS:
            message = f"{task.label} failed {task.attempts} times, the last time in {worker}: {reason}"
            task.answer.set_exception(BackendError(message))
            return
        attempt = task.attempts + 1
        await self._tell(
            f"{task.label} runs again, attempt {attempt}", "shard_retried", task=task.label, attempt=attempt
        )
        self._tasks.put_nowait((number, task))

    async def _replace(self, worker: _Worker) -> bool:
        """Start a worker in place of a lost one; False if that fails. All tasks fail when no worker is left."""
        reason = ""
        for attempt in range(ATTEMPTS):
            try:
                _kill(worker)
                await asyncio.sleep(attempt)
                await self._launch(worker)
            except Exception as error:
                reason = one_line(error)
                await self._tell(f"{worker} could not be replaced: {reason}")
                continue
            await self._tell(
                f"{worker} has started again", "worker_restarted", worker=worker.name, **worker.place
            )
            return True
        _kill(worker)
        await self._tell(
            f"{worker} is given up", "worker_lost", worker=worker.name, task="restart", error=reason
        )
        self._workers.remove(worker)
        if not self._workers:
            self._failure = BackendError(
                f"no {self._options.section} worker is left; the last, {worker.name}, failed with {reason}"
            )
            while not self._tasks.empty():
                self._tasks.get_nowait()[1].answer.set_exception(self._failure)
        return False

    async def _tell(self, message: str, kind: str = "", **fields: Any) -> None:
        """Add an event, and wait until the main rank has reported it: before the failure that it explains, say."""
        async with self._happened:
            self._events.append(Event(message=message, kind=kind, fields=fields))
            self._happened.notify_all()
            number = len(self._events)
            await self._happened.wait_for(lambda: self._reported >= number)

    # Starting --------------------------------------------------------------------------------------------

    async def _launch(self, worker: _Worker) -> None:
        """Start a worker and wait until it is ready."""
        import ray
        from ray.exceptions import RayError, RayTaskError

        worker.place = {}
        worker.actor = ray.remote(FlowcorrWorker).options(**self._actor_options).remote(self._path)
        started = worker.actor.start.remote(self._build, self._options.num_threads)
        ready, begin = asyncio.wrap_future(started.future()), time.monotonic()
        while not (await asyncio.wait([ready], timeout=HEARTBEAT))[0]:
            waited = time.monotonic() - begin
            if waited > START_TIMEOUT:
                raise BackendError(f"{worker} did not start within {waited:.0f} s")
            await self._tell(f"{worker} is not ready after {waited:.0f} s; free in the cluster: {_free()}")
        try:
            worker.place = ready.result()
        except RayTaskError as error:
            if isinstance(error.cause, FlowcorrError):
                raise error.cause from error
            raise BackendError(f"{worker} did not start: {one_line(error)}") from error
        except RayError as error:
            raise BackendError(f"{worker} did not start: {one_line(error)}") from error


def _free() -> str:
    import ray

    return ", ".join(f"{name} {amount:g}" for name, amount in sorted(ray.available_resources().items()))


def _kill(worker: _Worker) -> None:
    import ray

    actor, worker.actor = worker.actor, None
    if actor is not None:
        ray.kill(actor)
