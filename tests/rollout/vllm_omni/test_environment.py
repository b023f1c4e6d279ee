"""The environment of the engine's processes."""

import os

import pytest
import torch

from flowcorr.rollout.vllm_omni import environment


@pytest.mark.parametrize(
    ("visible", "device", "ranks", "gpus", "theirs"),
    [
        ("4, 6,7", "cuda:2", 3, 1, "7"),  # no other: the trainer's
        (None, "cuda:2", 4, 1, "2"),
        ("4,5,6,7", "cuda:1", 2, 1, "7"),  # the ranks train on 4 and 5
        ("4", "cuda:0", 1, 1, "4"),
        ("4,6", "cuda", 1, 1, "6"),
        ("4,6", "cuda:1", 1, 1, "4"),
        ("4,5,6", "cuda:0", 1, 2, "5,6"),
        ("4,6", "cuda:0", 1, 2, "6,4"),
        ("4,6", "cpu", 2, 1, "4,6"),
    ],
)
def test_an_engine_joins_no_ranks_and_takes_a_free_gpu_where_there_is_one(
    monkeypatch, visible, device, ranks, gpus, theirs
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    before = dict(os.environ)
    with environment.changed(environment.of_engine(torch.device(device), ranks, gpus)):
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == theirs
        assert not {"MASTER_PORT", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE"} & os.environ.keys()
    assert dict(os.environ) == before
