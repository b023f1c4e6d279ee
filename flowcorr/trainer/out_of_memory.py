"""Which key to change when a GPU's memory runs out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from flowcorr.config import resolve_engine
from flowcorr.config.schema import Config
from flowcorr.errors import BackendError

LOADING, PROBING, ENCODING = "loading the model", "probing it", "encoding prompts"
FIRST_PASS = "a pass of one image at one step"
_SAMPLING = ("rollout", "evaluation")
_SCORING = (FIRST_PASS, "old_log_prob", "correction", "drift", "update")


@contextlib.contextmanager
def explained(
    config: Config, phase: Callable[[], str], micro_batch: Callable[[], int] | None = None
) -> Iterator[None]:
    """Turn torch's error into one that names the phase and the keys that need less memory.

    Args:
        config: the run's.
        phase: tells the phase that is running.
        micro_batch: tells the samples of a micro-batch, once the model is there.

    Raises:
        BackendError: the device has no memory left.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        reason = str(error).partition(". ")[0]
        raise BackendError(
            f"out of GPU memory in {phase()} ({reason}): {_remedy(config, phase(), micro_batch)}; `flowcorr plan` "
            "predicts what each phase of a recipe needs"
        ) from error


def _remedy(config: Config, phase: str, micro_batch: Callable[[], int] | None) -> str:
    rollout, actor = config.rollout, config.actor
    if phase in (LOADING, PROBING, ENCODING):
        offloaded = config.model.offload_text_encoders
        return "use a GPU with more memory" if offloaded else "set model.offload_text_encoders=true"
    if phase in _SCORING:
        size = config.mini_batch_size
        if micro_batch is not None:
            size = micro_batch()
        elif isinstance(actor.micro_batch_size, int):
            size = actor.micro_batch_size
        if size > 1:
            return f"set actor.micro_batch_size={size // 2} instead of {size}"
        if not actor.gradient_checkpointing:
            return "set actor.gradient_checkpointing=true"
    if phase in _SAMPLING and not resolve_engine(rollout.name).own_processes:
        size = rollout.batch_size or rollout.prompts_per_step * rollout.n
        if size > 1:
            return f"set rollout.batch_size={size // 2} instead of {size}"
    if phase == "reward":
        return "give the reward that runs on the GPU a smaller batch_size, or device: cpu"
    return "take fewer images a step (rollout.prompts_per_step), or a GPU with more memory"
