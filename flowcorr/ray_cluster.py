"""The Ray cluster that a process joins or starts for itself, and the loss of its own node."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

from flowcorr.errors import BackendError, ConfigError, MissingExtraError

logger = logging.getLogger(__name__)

_REASON_LENGTH = 500
_STARTED_HERE: set[str] = set()  # addresses of local clusters, of which several pools may use one


class NodeLostError(BackendError):
    """The Ray node of this process is gone."""


class Cluster:
    """The Ray cluster that this process works with.

    Args:
        address: the cluster to join; None takes the one that `RAY_ADDRESS` names, and without that starts a local one,
            which ends with this object. Where the process is already connected, it stays with that.
        feature: what needs Ray, for messages.
        on_lost: told, in a thread, where this process loses its node: the raylet, without which nothing starts, and
            nobody answers. Once the cluster knows of it, some 15 s later, Ray ends this process without a word.

    Raises:
        MissingExtraError: Ray is not installed.
        ConfigError: the address is one of Ray's client.
        BackendError: the cluster cannot be joined or started.
    """

    def __init__(
        self, address: str | None, *, feature: str, on_lost: Callable[[NodeLostError], None] | None = None
    ) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a report of it would leave this machine
        # A worker that reserves no GPU is to see none, and not to share the trainer's.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
        try:
            import ray
        except ImportError as error:
            raise MissingExtraError(feature, "ray", "ray", error) from error
        self._connected = not ray.is_initialized()
        self._folder: str | None = None
        self._line: socket.socket | None = None
        try:
            if self._connected:
                self._connect(address)
            if on_lost is not None:
                self._watch_node(on_lost)
        except BaseException:
            self.close()
            raise

    def _connect(self, address: str | None) -> None:
        import ray

        address = address or os.environ.get("RAY_ADDRESS") or "local"
        if address.startswith("ray://"):
            raise ConfigError(
                f"the Ray cluster at {address!r} cannot be used through Ray's client; give the cluster's own address, "
                "host:port as `ray start` says it, on a machine that is one of its nodes"
            )
        options: dict[str, Any] = {"address": address, "logging_level": logging.ERROR}
        if address == "local":
            # In /tmp, since a socket's path must be short.
            self._folder = tempfile.mkdtemp(prefix="flowcorr-ray-", dir="/tmp")
            options |= {"include_dashboard": False, "_temp_dir": self._folder}
        try:
            # A SIGTERM to the whole process group, as by `timeout` or a scheduler, is not to end Ray's processes: the
            # step in flight needs them, and Ray would end this process too.
            with _own_signal_handlers(), sigterm(signal.SIG_BLOCK):
                ray.init(**options)
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise BackendError(f"the Ray cluster at {address!r} cannot be used: {one_line(error)}") from error
        if address == "local":
            _STARTED_HERE.add(_address())

    @property
    def local(self) -> bool:
        """Whether the cluster was started by this process, so that it cannot grow."""
        return _address() in _STARTED_HERE

    def _watch_node(self, on_lost: Callable[[NodeLostError], None]) -> None:
        """Hold a connection to this node's raylet, whose end is that of the raylet, and known at once."""
        import ray

        node = ray.get_runtime_context().get_node_id()
        line = socket.socket(socket.AF_UNIX)
        try:
            (path,) = (entry["RayletSocketName"] for entry in ray.nodes() if entry["NodeID"] == node)
            line.connect(path)
        except (KeyError, ValueError, OSError) as error:
            line.close()
            logger.warning(
                "the Ray node of this process cannot be watched (%s): its loss would be noticed late", error
            )
            return
        self._line = line

        def watch() -> None:
            with contextlib.suppress(OSError):
                while line.recv(1):
                    pass
            if self._line is not None:
                on_lost(
                    NodeLostError(
                        f"the Ray node of this process, {node}, is gone: its raylet has ended, and no worker can be "
                        "started from here any more; start again with --resume"
                    )
                )

        threading.Thread(target=watch, name="raylet", daemon=True).start()

    def close(self) -> None:
        """Leave the cluster; one that was started here ends."""
        line, self._line = self._line, None
        if line is not None:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
            line.close()
        if not self._connected:
            return
        import ray

        self._connected = False
        if ray.is_initialized():
            _STARTED_HERE.discard(_address())
        with _own_signal_handlers():
            ray.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def one_line(error: Exception) -> str:
    """An error in one line, without Ray's preamble and a worker's traceback."""
    from ray.exceptions import RayTaskError

    if isinstance(error, RayTaskError):
        error = error.cause
    says = str(error).rpartition("The actor is dead because ")[2]
    text = " ".join(f"{type(error).__name__}: {says}".split())
    return text if len(text) <= _REASON_LENGTH else f"{text[:_REASON_LENGTH]}..."


@contextlib.contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Keep Ray's handler of SIGTERM, which it leaves behind, out of this process."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and handler is not None:
            signal.signal(signal.SIGTERM, handler)


@contextlib.contextmanager
def sigterm(how: int) -> Iterator[None]:
    """Block or unblock SIGTERM, for this thread and for what it starts."""
    before = signal.pthread_sigmask(how, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _address() -> str:
    import ray

    return ray.get_runtime_context().gcs_address
