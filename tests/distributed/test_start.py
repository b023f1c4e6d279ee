"""Joining the ranks of a run, and the device of each."""

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from flowcorr.distributed.start import leave_ranks, local_device, start_ranks
from flowcorr.errors import ConfigError
from tests.trainer.test_ranks import SMALL

TORCHRUN = "torchrun --nproc_per_node N -m flowcorr"


@pytest.fixture
def alone(monkeypatch):
    """A process that no launcher started."""
    for name in ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def test_a_single_process_joins_nobody(alone, caplog):
    before = dict(os.environ)
    start_ranks("cpu", timeout=1.0)
    assert not dist.is_initialized()
    assert os.environ == before
    assert caplog.messages == []
    leave_ranks()


def test_one_process_where_several_were_asked_for_is_warned_of(alone, monkeypatch, caplog):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    monkeypatch.setenv("MASTER_PORT", "29500")
    start_ranks("cpu", timeout=1.0)
    assert not dist.is_initialized()
    assert TORCHRUN in caplog.text


def test_one_rank_takes_the_device_that_is_named():
    assert local_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"trainer\.device='gpu' .*auto, cpu"):
        local_device("gpu")


@pytest.mark.slow
def test_accelerate_that_starts_one_process_is_told(tmp_path):
    launch = ["-m", "accelerate.commands.launch", "--num_processes", "2", "--cpu"]
    train = ["-m", "flowcorr", "train", "tiny_jpeg_lora", *SMALL, "trainer.total_steps=1"]
    done = subprocess.run(
        [sys.executable, *launch, *train, "--out", str(tmp_path / "run")],
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(TORCHRUN) == 1
