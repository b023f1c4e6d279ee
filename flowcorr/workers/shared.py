"""One pool of Ray workers for all ranks: the main rank has it, and the other ranks send it their tasks."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, Protocol

from flowcorr import distributed
from flowcorr.errors import BackendError
from flowcorr.workers.pool import Answer, WorkerPool

_NUMBERS = itertools.count()  # every rank opens the same pools in the same order
_LOST = "the main rank, which has the workers, has closed its connection"
Localize = Callable[[Any], Any]


class Pool(Protocol):
    """The methods of `WorkerPool` that every rank has."""

    def submit(
        self,
        label: str,
        method: str,
        *arguments: Any,
        num_returns: int = 1,
        future: Future[Answer] | None = None,
    ) -> Future[Answer]: ...

    def check(self) -> None: ...

    def close(self) -> None: ...

    @property
    def places(self) -> list[Mapping[str, Any]]: ...


def open_pool(
    section: str, build: Callable[[], Any], *, localize: Localize = lambda value: value, **options: Any
) -> Pool:
    """The workers that all ranks share; with one rank, a `WorkerPool`. No rank waits here for another.

    Args:
        section: see `WorkerPool`, as are `build` and `options`, which the main rank alone reads.
        build: makes the object that each worker holds.
        localize: replaces an argument that another rank sent, on the main rank.
        options: the other arguments of `WorkerPool`.
    """
    key = f"{section} pool {next(_NUMBERS)}"
    if not distributed.is_main():
        return _RemotePool(section, key)
    pool = WorkerPool(section, build, **options)
    if distributed.world_size() == 1:
        return pool
    try:
        return _ServedPool(pool, key, localize)
    except BaseException:
        pool.close()
        raise


class _ServedPool:
    """The main rank's side: its own tasks go to the workers, as do those that come through connections."""

    def __init__(self, pool: WorkerPool, key: str, localize: Localize) -> None:
        import ray

        self.submit, self.check, self._pool, self._localize = pool.submit, pool.check, pool, localize
        secret = secrets.token_bytes()
        others = distributed.world_size() - 1
        self._listener = Listener((ray.util.get_node_ip_address(), 0), backlog=others, authkey=secret)
        self._connections: list[Connection] = []
        threading.Thread(target=self._accept, args=(others,), name=key, daemon=True).start()
        distributed.publish(key, (self._listener.address, secret))

    @property
    def places(self) -> list[Mapping[str, Any]]:
        return self._pool.places

    def close(self) -> None:
        """Stop the workers; other ranks' tasks fail."""
        self._pool.close()
        with contextlib.suppress(OSError):
            self._listener.close()
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.close()

    def _accept(self, others: int) -> None:
        """Serve each rank that connects, in a thread of its own."""
        while len(self._connections) < others:
            try:
                connection = self._listener.accept()
            except AuthenticationError:
                continue  # no rank
            except OSError:
                return  # the pool closed before all ranks had connected
            self._connections.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        sending = threading.Lock()
        with contextlib.suppress(EOFError, OSError):  # the rank has closed its connection
            while True:
                number, label, method, arguments, num_returns = pickle.loads(connection.recv_bytes())
                task = self.submit(label, method, *map(self._localize, arguments), num_returns=num_returns)
                task.add_done_callback(partial(_reply, connection, sending, number))


def _reply(connection: Connection, sending: threading.Lock, number: int, task: Future[Answer]) -> None:
    """Send the values of a task, or its error."""
    error = BackendError("the workers are closed") if task.cancelled() else task.exception()
    if error is None:
        answer = task.result()
        message = pickle.dumps((number, (answer.values, answer.worker), None))
    else:
        message = pickle.dumps((number, None, _portable(error)))
    with contextlib.suppress(OSError), sending:
        connection.send_bytes(message)


def _portable(error: BaseException) -> BaseException:
    """The error itself, or its text where pickle cannot restore it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return BackendError(f"{type(error).__name__}: {error}")
    return error


class _RemotePool:
    """Another rank's side. It connects with its first task: by then the main rank has started the workers."""

    def __init__(self, section: str, key: str) -> None:
        self._section, self._key = section, key
        self._sending = threading.Lock()
        self._lock = threading.Lock()  # of the fields below
        self._connection: Connection | None = None
        self._closed: BackendError | None = None
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[Answer]] = {}

    def submit(
        self,
        label: str,
        method: str,
        *arguments: Any,
        num_returns: int = 1,
        future: Future[Answer] | None = None,
    ) -> Future[Answer]:
        """See `WorkerPool.submit`; the answer's references are its values."""
        future = Future() if future is None else future
        with self._lock:
            if self._closed is not None:
                future.set_exception(self._closed)
                return future
            if self._connection is None:
                address, secret = distributed.published(self._key)
                self._connection = Client(address, authkey=secret)
                threading.Thread(target=self._receive, name=self._key, daemon=True).start()
            number = next(self._numbers)
            self._waiting[number] = future
        # Not `send`, which would hand tensors over in the shared memory of one machine.
        message = pickle.dumps((number, label, method, arguments, num_returns))
        with contextlib.suppress(OSError), self._sending:  # `_receive` reports a lost connection
            self._connection.send_bytes(message)
        return future

    def check(self) -> None:
        if self._closed is not None:
            raise self._closed

    def close(self) -> None:
        for future in self._end(BackendError(f"the {self._section} workers are closed")):
            future.cancel()
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.close()

    @property
    def places(self) -> list[Mapping[str, Any]]:
        """None: the main rank knows them."""
        return []

    def _receive(self) -> None:
        assert self._connection is not None
        with contextlib.suppress(EOFError, OSError):
            while True:
                number, answer, error = pickle.loads(self._connection.recv_bytes())
                with self._lock:
                    future = self._waiting.pop(number)
                _settle(future, answer, error)
        for future in self._end(BackendError(_LOST)):
            _settle(future, None, self._closed)

    def _end(self, reason: BackendError) -> Sequence[Future[Answer]]:
        """Take no more tasks; return those without an answer. The first reason is kept."""
        with self._lock:
            self._closed = self._closed or reason
            waiting = list(self._waiting.values())
            self._waiting.clear()
        return waiting


def _settle(
    future: Future[Answer], answer: tuple[Sequence[Any], int] | None, error: BaseException | None
) -> None:
    with contextlib.suppress(InvalidStateError):  # cancelled meanwhile
        if answer is None:
            future.set_exception(error)
        else:
            values, worker = answer
            future.set_result(Answer(values=values, references=values, worker=worker))
