"""The Ray cluster that this process joins or starts, and its errors as one line."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import tempfile
from typing import Any

from flowcorr.errors import BackendError, ConfigError, MissingExtraError
from flowcorr.processes import STOP_SIGNALS, own_signal_handlers, signal_mask

logger = logging.getLogger(__name__)

START_ATTEMPTS = 3
_REASON_LENGTH = 500
_STARTED_HERE: set[str] = set()  # addresses of clusters that this process started; pools may share one


def init_ray(**options: Any) -> None:
    """Call `ray.init`, again if the node did not start within Ray's fixed limit of 30 s, as on a busy machine.

    Raises:
        BackendError: the node did not start in any attempt.
    """
    import ray

    for attempt in range(1, START_ATTEMPTS + 1):
        try:
            ray.init(**options)
            return
        except Exception as error:  # Ray raises no narrower one
            if "timed out during startup" not in str(error):
                raise
            ray.shutdown()
            if attempt == START_ATTEMPTS:
                raise BackendError(
                    f"Ray's node did not start within 30 s in {START_ATTEMPTS} attempts; the machine is too busy, or "
                    "the node's log in its session_latest/logs says why"
                ) from error
            logger.warning("Ray's node did not start within 30 s; starting it again")


class Cluster:
    """A connection to a Ray cluster.

    Args:
        address: the cluster to join; None joins the cluster in `RAY_ADDRESS` or, if that is not set, starts a local
            one, which ends with this object. A process that is already connected keeps its connection.
        feature: the feature that needs Ray, for messages.

    Raises:
        MissingExtraError: Ray is not installed.
        ConfigError: the address is one for Ray's client.
        BackendError: the cluster cannot be joined or started.
    """

    def __init__(self, address: str | None, *, feature: str) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would send usage statistics
        # A worker that reserves no GPU must not see any: it would share the trainer's.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
        try:
            import ray
        except ImportError as error:
            raise MissingExtraError(feature, "ray", "ray", error) from error
        self._owns_connection = not ray.is_initialized()
        self._folder: str | None = None
        try:
            if self._owns_connection:
                self._connect(address)
        except BaseException:
            self.close()
            raise

    def _connect(self, address: str | None) -> None:
        import ray

        address = address or os.environ.get("RAY_ADDRESS") or "local"
        if address.startswith("ray://"):
            raise ConfigError(
                f"the address {address!r} is one of Ray's client, which flowcorr does not support; start flowcorr on a "
                "node of the cluster, and give the cluster's address, host:port, as `ray start` prints it"
            )
        options: dict[str, Any] = {"address": address, "logging_level": logging.ERROR}
        if address == "local":
            # In /tmp, since the path of a Unix socket has to be short.
            self._folder = tempfile.mkdtemp(prefix="flowcorr-ray-", dir="/tmp")
            options |= {"include_dashboard": False, "_temp_dir": self._folder}
        try:
            # Terminals, `timeout` and schedulers signal whole process groups. Ray's processes must not end by that: the
            # step in flight needs them, and Ray would end this process too.
            with own_signal_handlers(), signal_mask(signal.SIG_BLOCK, STOP_SIGNALS):
                init_ray(**options)
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            message = f"the Ray cluster at {address!r} cannot be used: {one_line(error)}"
            if address != "local":
                message += (
                    f"; on {socket.gethostname()}, as on each machine that runs a rank, a node of the cluster has to "
                    f"run: `ray start --address {address}` starts one"
                )
            raise BackendError(message) from error
        if address == "local":
            _STARTED_HERE.add(self.address)

    @property
    def local(self) -> bool:
        """Whether this process started the cluster, which therefore cannot grow."""
        return self.address in _STARTED_HERE

    @property
    def address(self) -> str:
        """The cluster's address, as other ranks join it."""
        import ray

        return ray.get_runtime_context().gcs_address

    def invitation(self) -> tuple[str, str, dict[str, str]]:
        """Address, namespace of named actors, and variables with the cluster's secret: other ranks join by them."""
        import ray

        secrets = {name: value for name, value in os.environ.items() if name.startswith("RAY_AUTH_")}
        return self.address, ray.get_runtime_context().namespace, secrets

    def close(self) -> None:
        """Disconnect; end the cluster if this object started it."""
        if not self._owns_connection:
            return
        import ray

        self._owns_connection = False
        if ray.is_initialized():
            _STARTED_HERE.discard(self.address)
        with own_signal_handlers():
            ray.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def one_line(error: Exception) -> str:
    """An error as one line, without Ray's preamble and without the worker's traceback."""
    from ray.exceptions import RayTaskError

    if isinstance(error, RayTaskError):
        error = error.cause
    says = str(error).rpartition("The actor is dead because ")[2]
    text = " ".join(f"{type(error).__name__}: {says}".split())
    return text if len(text) <= _REASON_LENGTH else f"{text[:_REASON_LENGTH]}..."
