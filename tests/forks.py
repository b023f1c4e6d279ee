"""New processes that start in no time: forks of one that has imported the libraries and done nothing else."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable

FORKS = multiprocessing.get_context("forkserver")
# Modules that take seconds to import and that most runs use.
FORKS.set_forkserver_preload(
    ["flowcorr.trainer", "diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3"]
)


def exit_code(function: Callable[..., object], *arguments: object, timeout: float = 240) -> int:
    """Call `function` in a new process; its exit code, negative if a signal ended it."""
    process = FORKS.Process(target=function, args=arguments)
    process.start()
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        raise TimeoutError(f"{function.__name__} takes more than {timeout} s")
    return process.exitcode
