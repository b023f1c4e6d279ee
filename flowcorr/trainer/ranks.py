"""Several processes that train together: how they meet, and how they part."""

from __future__ import annotations

import logging
import os
from datetime import timedelta

import torch.distributed as dist

from flowcorr import distributed
from flowcorr.config.schema import Config
from flowcorr.errors import ConfigError
from flowcorr.trainer.setup import choose_device

logger = logging.getLogger(__name__)

_SIZES = ["WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"]
_MEETING = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_")


def start_ranks(config: Config) -> None:
    """Join the other ranks that torchrun, accelerate or MPI started; a process alone has nothing to do.

    Raises:
        ConfigError: the ranks cannot meet, or are too many for the work of a training step.
    """
    from accelerate import PartialState
    from accelerate.utils import get_int_from_env

    started, timeout = get_int_from_env(_SIZES, 1), config.trainer.collective_timeout
    if started == 1 and {"ACCELERATE_USE_CPU", "MASTER_PORT"} <= os.environ.keys():
        logger.warning(
            "accelerate launch was asked for several processes and started one: without --multi_gpu it needs MPI to "
            "start more; for N ranks, on CPUs too, use torchrun --nproc_per_node N -m flowcorr, or accelerate launch "
            "--multi_gpu --num_processes N -m flowcorr"
        )
    if started > 1 and not dist.is_initialized():
        on_gpu = choose_device(config.trainer.device).type == "cuda"
        # What is gathered on the host takes another way than the gradients, and so has a time limit of its own.
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        try:
            PartialState(cpu=not on_gpu, backend=backend, timeout=timedelta(seconds=timeout))
        except (ValueError, RuntimeError) as error:
            raise ConfigError(
                f"the {started} ranks of this run cannot meet ({error}); start them with torchrun or accelerate launch"
            ) from error
        # Processes that this one starts, such as those of a rollout engine, meet elsewhere.
        for name in [name for name in os.environ if name.startswith(_MEETING)]:
            del os.environ[name]
    ranks, prompts = distributed.world_size(), config.rollout.prompts_per_step
    if prompts < ranks:
        raise ConfigError(
            f"rollout.prompts_per_step={prompts} leaves some of {ranks} ranks without a prompt, since the images of a "
            f"prompt stay together; use at least {ranks}, or fewer ranks"
        )


def leave_ranks() -> None:
    """End what `start_ranks` began, once no rank waits for this one."""
    if dist.is_initialized():
        dist.destroy_process_group()
