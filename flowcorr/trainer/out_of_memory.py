"""Which key to change when a GPU's memory runs out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from flowcorr import distributed
from flowcorr.actor.passes import passes_of
from flowcorr.config import resolve_engine
from flowcorr.config.schema import Config
from flowcorr.errors import BackendError

LOADING, PROBING, ENCODING = "loading the model", "probing it", "encoding prompts"
_SCORING = ("old_log_prob", "correction", "drift", "update")


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
    prompts = len(distributed.local_indices(rollout.prompts_per_step))  # of the step, on this rank
    if phase in (LOADING, PROBING, ENCODING):
        offloaded = config.model.offload_text_encoders
        return "use a GPU with more memory" if offloaded else "set model.offload_text_encoders=true"
    if phase in _SCORING:
        learned = prompts * rollout.learned_per_prompt
        size = min(learned, passes_of(config).samples if micro_batch is None else micro_batch())
        if size > 1:
            return f"set actor.micro_batch_size={size // 2} instead of {size}"
        if not actor.gradient_checkpointing:
            return "set actor.gradient_checkpointing=true"
    size = 0
    if phase == "evaluation":
        heldout = -(-config.data.num_heldout // distributed.world_size())
        size = min(heldout, rollout.evaluation_batch_size)
    elif phase == "rollout" and not resolve_engine(rollout.name).own_processes:
        sampled = prompts * rollout.n
        size = min(sampled, rollout.batch_size or sampled)
    if size > 1:
        return f"set rollout.batch_size={size // 2} instead of {size}"
    if phase == "reward":
        return "give the reward that runs on the GPU a smaller batch_size, or device: cpu"
    return "use a GPU with more memory, or fewer images a step (rollout.prompts_per_step) in a new run"
