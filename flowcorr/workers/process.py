"""A worker's own process."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any

from flowcorr.processes import signal_mask


class FlowcorrWorker:
    """The Ray actor that holds the object; `ps` shows its process under this class's name."""

    def __init__(self, path: Sequence[str]) -> None:
        sys.path += [folder for folder in path if folder not in sys.path]
        self._object: Any = None

    def start(self, build: Callable[[], Any], num_threads: int | None) -> dict[str, Any]:
        """Make the object; returns node, host, process and GPUs."""
        import ray

        if num_threads is not None:
            import torch

            torch.set_num_threads(num_threads)
        # The object's own child processes have to end on SIGTERM.
        with signal_mask(signal.SIG_UNBLOCK, {signal.SIGTERM}):
            self._object = build()
        return {
            "node": ray.get_runtime_context().get_node_id(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "gpus": ray.get_gpu_ids(),
        }

    def call(self, method: str, arguments: Sequence[Any], num_returns: int) -> tuple[Any, ...]:
        """Call a method of the object; references among the arguments are replaced by their objects.

        Returns:
            None, which says that the call is done to a caller that does not read the values; then the values.
        """
        import ray

        values = getattr(self._object, method)(
            *(ray.get(value) if isinstance(value, ray.ObjectRef) else value for value in arguments)
        )
        return None, *(values if num_returns > 1 else (values,))

    def close(self) -> None:
        """Close the object, if it has a `close`."""
        if hasattr(self._object, "close"):
            self._object.close()
