"""Blocking calls to vllm-omni's asynchronous engine; errors quote the end of its log."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import logging
import logging.config
import signal
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, TypeVar

from flowcorr.errors import BackendError, MissingExtraError
from flowcorr.processes import CHILDREN_IGNORE, clear_shared_memory, mark_shared_memory, signal_mask
from flowcorr.rollout.vllm_omni.environment import changed

logger = logging.getLogger(__name__)

HEARTBEAT = 15.0  # seconds between log lines while the engine is loading
HEALTH_CHECK = 2.0  # seconds between health checks during a call
# vllm-omni's own timeout: `rollout.timeout` is the only one.
NO_ENGINE_TIMEOUT = {"VLLM_OMNI_ASYNC_OUTPUT_TIMEOUT": "1e9"}
LOG_LINES = 20  # lines of the engine's log that an error quotes
SHUTDOWN = 60.0  # seconds to wait for the engine to stop; later it ends with its parent process
LOGGERS = ("vllm", "vllm_omni")

Answer = TypeVar("Answer")


class OmniClient:
    """One running vllm-omni engine, driven by an event loop in a thread.

    Args:
        model: a pipeline folder or hub name.
        options: further arguments of `vllm_omni.AsyncOmni`.
        log: the log file of vllm-omni, in its own processes and in this one.
        environment: changes to the environment of its processes; None removes a variable. See
            `environment.of_engine`.
        timeout: `rollout.timeout`, seconds without an answer after which a call has failed.

    Raises:
        BackendError: the engine does not start.
    """

    def __init__(
        self,
        model: str,
        options: Mapping[str, Any],
        log: Path,
        environment: Mapping[str, str | None] | None = None,
        timeout: float = 900.0,
    ) -> None:
        self.log = log
        self.timeout = timeout
        clear_shared_memory()
        mark_shared_memory()
        self._omni: Any = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="vllm-omni", daemon=True)
        self._thread.start()
        logging.config.dictConfig(_log_config(log))
        try:
            with changed({"VLLM_LOGGING_CONFIG_PATH": _write_log_config(log), **(environment or {})}):
                self._omni = self._start(model, options)
        except BaseException:
            self.close()
            raise

    def _serve(self) -> None:
        # Python unblocks SIGINT in the thread that starts its resource tracker, so that one comes first.
        resource_tracker.ensure_running()
        # The engine's processes are started here. A terminal signals them too, while the step in flight needs them.
        with signal_mask(signal.SIG_BLOCK, CHILDREN_IGNORE):
            self._loop.run_forever()

    def _start(self, model: str, options: Mapping[str, Any]) -> Any:
        logger.info("starting vllm-omni with %s; its log is %s", model, self.log)
        began = time.monotonic()
        future = asyncio.run_coroutine_threadsafe(_create(model, options), self._loop)
        while not concurrent.futures.wait([future], timeout=HEARTBEAT).done:
            logger.info("vllm-omni is loading, %.0f s so far", time.monotonic() - began)
        try:
            omni = future.result()
        except Exception as error:
            raise self._failure("did not start", error) from error
        logger.info("vllm-omni is ready after %.0f s", time.monotonic() - began)
        return omni

    def generate(self, requests: Sequence[tuple[Mapping[str, Any], Any]]) -> list[Any]:
        """Send `requests`, pairs of a prompt and its sampling parameters, and return their outputs in the same order.

        Raises:
            BackendError: a request failed, none was answered for `rollout.timeout` seconds, or the engine died.
        """
        with changed(NO_ENGINE_TIMEOUT):
            return self._wait("a request", self._answers(requests))

    def rpc(self, method: str, **kwargs: Any) -> list[Mapping[str, Any]]:
        """Call `method` of the worker extension and return one answer from each worker.

        Raises:
            BackendError: the method failed in a worker, where vllm-omni itself returns the error as a normal result; or
                it was not answered within `rollout.timeout` seconds.
        """
        answers = _leaves(self._wait(method, self._within(self._omni.collective_rpc(method, kwargs=kwargs))))
        for answer in answers:
            if not isinstance(answer, Mapping) or answer.keys() & {"error", "todo", "supported"}:
                raise self._failure(f"answered {method} with {answer!r}")
        if not answers:
            raise self._failure(f"did not answer {method}")
        return answers

    def sleep(self) -> None:
        """Move the weights to main memory, which frees the GPU for the trainer."""
        self._acknowledged("sleep", self._omni.sleep(level=1))

    def wake_up(self) -> None:
        """Move the weights back to the GPU; on an engine that is awake it does nothing."""
        self._acknowledged("wake_up", self._omni.wake_up())

    def close(self) -> None:
        """Stop the engine and its processes; calling it again does nothing."""
        if self._loop.is_closed():
            return
        if self._omni is not None:
            stopping = threading.Thread(target=self._omni.shutdown, name="vllm-omni stop", daemon=True)
            stopping.start()
            stopping.join(SHUTDOWN)
            if stopping.is_alive():
                logger.warning("vllm-omni did not stop within %.0f s", SHUTDOWN)
        asyncio.run_coroutine_threadsafe(_cancel_tasks(), self._loop).result(timeout=SHUTDOWN)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        _stop_logging()

    def _acknowledged(self, what: str, coroutine: Coroutine[Any, Any, list[Any]]) -> None:
        for answer in self._wait(what, self._within(coroutine)):
            if getattr(answer, "status", None) != "SUCCESS":
                raise self._failure(f"answered {what} with {answer!r}")

    def _wait(self, what: str, coroutine: Coroutine[Any, Any, Answer]) -> Answer:
        if self._loop.is_closed():
            coroutine.close()
            raise BackendError(f"the vllm-omni engine is closed; {what} cannot be served")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        while not concurrent.futures.wait([future], timeout=HEALTH_CHECK).done:
            if (death := self._death()) is not None:
                future.cancel()
                raise self._failure(f"died during {what}", death) from death
        try:
            return future.result()
        except Exception as error:
            raise self._failure(f"failed on {what}", error) from error

    def _death(self) -> Exception | None:
        check = asyncio.run_coroutine_threadsafe(self._omni.check_health(), self._loop)
        try:
            check.result(timeout=HEALTH_CHECK)
        except concurrent.futures.TimeoutError:
            return None  # a busy engine answers late
        except Exception as error:
            return error
        return None

    def _failure(self, what: str, error: BaseException | None = None) -> BackendError:
        reason = f": {type(error).__name__}: {error}" if error is not None else ""
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_LINES:] if self.log.is_file() else []
        quoted = "\n".join(["; the last lines of its log:", *lines]) if lines else ""
        return BackendError(f"the vllm-omni engine {what}{reason}{quoted}")

    async def _answers(self, requests: Sequence[tuple[Mapping[str, Any], Any]]) -> list[Any]:
        """Send requests all at once and return their outputs; raises `TimeoutError` if answers stay away."""
        tasks = [asyncio.create_task(self._generate(request)) for request in requests]
        missing = set(tasks)
        try:
            while missing:
                done, missing = await asyncio.wait(
                    missing, timeout=self.timeout, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    raise TimeoutError(
                        f"{len(missing)} of {len(requests)} answers did not arrive, and none came for "
                        f"rollout.timeout={self.timeout:g} seconds; if the engine is only slow, raise that key"
                    )
                for task in done:
                    task.result()  # the first request that failed ends the call
            return [task.result() for task in tasks]
        finally:
            for task in missing:
                task.cancel()

    async def _within(self, coroutine: Coroutine[Any, Any, Answer]) -> Answer:
        try:
            return await asyncio.wait_for(coroutine, self.timeout)
        except TimeoutError:
            raise TimeoutError(f"no answer within rollout.timeout={self.timeout:g} seconds") from None

    async def _generate(self, request: tuple[Mapping[str, Any], Any]) -> Any:
        prompt, params = request
        outputs = self._omni.generate(prompt=dict(prompt), sampling_params_list=[params])
        return [output async for output in outputs][-1]


def import_vllm_omni() -> None:
    """Import vllm-omni without the log lines of its import.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        with changed({"VLLM_LOGGING_LEVEL": "ERROR"}):
            import vllm_omni.entrypoints.async_omni  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("rollout.name=vllm_omni", "vllm-omni", "vllm-omni", error) from error


async def _create(model: str, options: Mapping[str, Any]) -> Any:
    from vllm_omni.entrypoints.async_omni import AsyncOmni

    return AsyncOmni(model=model, **options)


async def _cancel_tasks() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _stop_logging() -> None:
    for name in LOGGERS:
        for handler in list(logging.getLogger(name).handlers):
            logging.getLogger(name).removeHandler(handler)
            handler.close()


def _leaves(answer: Any) -> list[Any]:
    if isinstance(answer, list | tuple):
        return [leaf for part in answer for leaf in _leaves(part)]
    return [answer]


def _write_log_config(log: Path) -> str:
    """Write the logging configuration that makes vLLM's processes log to `log`, and return its path."""
    file = log.with_name("logging.json")
    file.write_text(json.dumps(_log_config(log)))
    return str(file)


def _log_config(path: Path) -> dict[str, Any]:
    file = {"class": "logging.FileHandler", "filename": str(path), "formatter": "plain"}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"plain": {"format": "%(asctime)s %(levelname)s %(name)s %(message)s"}},
        "handlers": {"file": file},
        "loggers": {name: {"handlers": ["file"], "level": "INFO", "propagate": False} for name in LOGGERS},
    }
