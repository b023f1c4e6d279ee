import pytest
import torch

from flowcorr import distributed, trainer
from flowcorr.actor.scoring import Scorer
from flowcorr.errors import BackendError
from flowcorr.trainer.out_of_memory import ENCODING, LOADING, explained
from tests.trainer.runs import small_config

TORCH = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB"


@pytest.mark.parametrize(
    ("phase", "sections", "remedy"),
    [
        ("update", {"actor": {"micro_batch_size": 8}}, "actor.micro_batch_size=4 instead of 8"),
        (
            "old_log_prob",
            {"rollout": {"prompts_per_step": 4, "n": 6}},
            "actor.micro_batch_size=12 instead of 24",
        ),
        ("update", {"actor": {"micro_batch_size": 1}}, "actor.gradient_checkpointing=true"),
        ("rollout", {"rollout": {"prompts_per_step": 4, "n": 6}}, "rollout.batch_size=12 instead of 24"),
        ("evaluation", {"rollout": {"batch_size": 8}}, "rollout.batch_size=4 instead of 8"),
        ("evaluation", {"data": {"num_heldout": 500}}, "rollout.batch_size=32 instead of 64"),
        (
            "evaluation",
            {"data": {"num_heldout": 20}, "rollout": {"batch_size": 96}},
            "rollout.batch_size=10 instead of 20",
        ),
        (
            "evaluation",
            {"rollout": {"name": "vllm_omni", "batch_size": 8}},
            "rollout.batch_size=4 instead of 8",
        ),
        ("rollout", {"rollout": {"name": "vllm_omni"}}, "fewer images a step"),
        ("reward", {}, "a smaller batch_size"),
        ("sync", {}, "fewer images a step"),
        (LOADING, {}, "set model.offload_text_encoders=true"),
        (ENCODING, {"model": {"offload_text_encoders": True}}, "use a GPU with more memory"),
    ],
)
def test_the_phase_and_the_key_that_helps_are_named(make_config, phase, sections, remedy):
    with (
        pytest.raises(BackendError, match=rf"in {phase} \(CUDA out of memory\): .*{remedy}.*flowcorr plan"),
        explained(make_config(**sections), lambda: phase),
    ):
        raise torch.OutOfMemoryError(TORCH)


def test_a_first_pass_without_room_is_explained(tmp_path, monkeypatch):
    """Whatever a micro-batch would have been: one image does not fit."""

    def full(*_):
        raise torch.OutOfMemoryError(TORCH)

    monkeypatch.setattr(Scorer, "score", full)
    with pytest.raises(BackendError, match=r"in old_log_prob .*actor.gradient_checkpointing=true"):
        trainer.train(small_config(), tmp_path)


@pytest.mark.parametrize(
    ("phase", "keys", "remedy"),
    [
        ("update", {}, "actor.micro_batch_size=6 instead of 12"),
        ("rollout", {}, "rollout.batch_size=6 instead of 12"),
        ("rollout", {"batch_size": 24}, "rollout.batch_size=6 instead of 12"),
        ("evaluation", {}, "rollout.batch_size=5 instead of 10"),
    ],
)
def test_the_pass_of_a_rank_is_halved_not_that_of_all(make_config, monkeypatch, phase, keys, remedy):
    """The second of two ranks has two of five groups, and scores ten held-out prompts of 19."""
    monkeypatch.setattr(distributed.ranks, "world_size", lambda group=None: 2)
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(distributed.ranks, "rank", lambda: 1)
    config = make_config(rollout={"prompts_per_step": 5, "n": 6, **keys}, data={"num_heldout": 19})
    with pytest.raises(BackendError, match=remedy), explained(config, lambda: phase):
        raise torch.OutOfMemoryError(TORCH)


def test_other_errors_pass(make_config):
    with pytest.raises(KeyError), explained(make_config(), lambda: "update"):
        raise KeyError
