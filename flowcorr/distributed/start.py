"""Joining and leaving the ranks of a run, and the device of each rank."""

from __future__ import annotations

import functools
import logging
import os
from datetime import timedelta

import torch
import torch.distributed as dist

from flowcorr.devices import named_device
from flowcorr.distributed.ranks import world_size
from flowcorr.errors import ConfigError

logger = logging.getLogger(__name__)

_WORLD_SIZES = ["WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"]
_RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_")


def start_ranks(device: str, *, timeout: float) -> None:
    """Join the ranks that torchrun, accelerate or MPI started; with a single process there is nothing to do.

    Args:
        device: `trainer.device`, which decides between NCCL and gloo.
        timeout: `trainer.collective_timeout`, seconds.

    Raises:
        ConfigError: the ranks cannot connect to each other.
    """
    from accelerate import PartialState
    from accelerate.utils import get_int_from_env

    num_ranks = get_int_from_env(_WORLD_SIZES, 1)
    if num_ranks == 1 and {"ACCELERATE_USE_CPU", "MASTER_PORT"} <= os.environ.keys():
        _warn_of_one_process()
    if num_ranks == 1 or dist.is_initialized():
        return
    on_gpu = local_device(device).type == "cuda"
    # Objects are gathered by gloo on the host, where a waiting rank gets an error after the timeout.
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    try:
        PartialState(cpu=not on_gpu, backend=backend, timeout=timedelta(seconds=timeout))
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"the {num_ranks} ranks of this run cannot connect ({error}); start them with torchrun or accelerate launch"
        ) from error
    # Child processes, such as a rollout engine's, must not join this process group.
    for name in [name for name in os.environ if name.startswith(_RENDEZVOUS)]:
        del os.environ[name]


@functools.cache  # a command joins before it loads a model, and the trainer asks again
def _warn_of_one_process() -> None:
    logger.warning(
        "accelerate launch was asked for several processes and started one: without --multi_gpu it needs MPI to start "
        "more; for N ranks, on CPUs too, use torchrun --nproc_per_node N -m flowcorr, or accelerate launch "
        "--multi_gpu --num_processes N -m flowcorr"
    )


def leave_ranks() -> None:
    """Leave the process group that `start_ranks` joined, once no rank waits for this one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def local_device(name: str) -> torch.device:
    """The device that `trainer.device` names; with several ranks, this rank's GPU.

    Raises:
        ConfigError: torch does not know the device, this machine lacks it, or it is one GPU for several ranks.
    """
    device = named_device("trainer.device", name)
    if device.type == "cuda" and world_size() > 1:
        if device.index is not None:
            raise ConfigError(
                f"trainer.device={name!r} names one GPU, but there are {world_size()} ranks; use cuda or auto"
            )
        device = torch.device("cuda", torch.cuda.current_device())  # set when the ranks connected
    return device
