"""Rewards in Ray workers mean what they mean here, whether they score, fail or die."""

import os
import signal
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import torch
from ray_tasks import wait_for

from flowcorr.config import RewardConfig, RewardTerm
from flowcorr.errors import BackendError, BatchError, ConfigError
from flowcorr.records import Prompt
from flowcorr.rewards import build_reward, score_batch
from flowcorr.workers.pool import Answer, ignore_event
from flowcorr.workers.reward import RayReward

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("ray_cluster")]
NUM = 40  # three shares
TERMS = (
    RewardTerm(name="jpeg_compressibility", weight=0.5),
    RewardTerm(name="ray_tasks:brightness", weight=2.0, options={"dark": 20.0, "api_key": "s3cret-t0ken"}),
)
GOLD = (RewardTerm(name="jpeg_incompressibility"),)


@pytest.fixture(scope="module")
def start(opened):
    """Keys of `reward` -> a reward in workers."""

    def start(on_event=ignore_event, **keys):
        config = RewardConfig(**{"terms": TERMS, "gold": GOLD, "placement": "ray", "timeout": 60.0, **keys})
        return opened(RayReward(config, num_threads=1, on_event=on_event))

    return start


@pytest.fixture(scope="module")
def remote(start, events):
    return start(events, num_workers=2)


@pytest.fixture
def local():
    return build_reward(TERMS, GOLD)


@pytest.fixture
def images():
    return np.random.default_rng(0).integers(40, 255, (NUM, 16, 24, 3), dtype=np.uint8)


@pytest.fixture
def prompts():
    return [Prompt(text=f"image {index}", target=f"word{index}") for index in range(NUM)]


def assert_same(one, other):
    np.testing.assert_array_equal(one.scores, other.scores)
    for name in ("extra", "terms"):
        ours, theirs = getattr(one, name), getattr(other, name)
        assert ours.keys() == theirs.keys()
        for key, values in ours.items():
            np.testing.assert_array_equal(values, theirs[key])


def test_scores_extras_terms_and_gold_are_the_same(remote, local, images, prompts):
    assert remote.name == local.name
    expected = score_batch(local, images, prompts)
    found = score_batch(remote, images, prompts)
    assert_same(found, expected)
    assert set(found.extra) >= {"jpeg_compressibility", "brightness", "gold/jpeg_incompressibility"}
    assert set(found.terms) == {"jpeg_compressibility", "brightness"}
    assert not found.failed.any()
    assert not expected.failed.any()


def test_failures_are_found_and_named_as_here(remote, local, images, prompts, caplog):
    images[[3, 30]] = 0
    for reward in (local, remote):
        caplog.clear()
        found = score_batch(reward, images, prompts, on_error="drop_group")
        assert np.flatnonzero(found.failed).tolist() == [3, 30]
        assert np.isnan(found.scores[[3, 30]]).all()
        (record,) = [record for record in caplog.records if record.name == "flowcorr.rewards.base"]
        said = record.getMessage()
        for part in (
            f"reward {local.name} ",
            "sample 3 (prompt 'image 3'): ",
            "ValueError: ",
            "reward brightness",
        ):
            assert part in said
        assert "2 of 40" in said
        with pytest.raises(BackendError, match=r"sample 3 \(prompt 'image 3'\): .*ValueError"):
            score_batch(reward, images, prompts)
    expected = score_batch(local, images, prompts, on_error="drop_group")
    assert_same(found, expected)


def test_errors_that_are_no_samples_fault_come_through(remote, images):
    without_target = [Prompt(text="nothing to look for")] * NUM
    with pytest.raises(BatchError, match="no target"):
        score_batch(remote, images, without_target, on_error="drop_group")


def test_a_reward_that_cannot_be_built_is_an_error_at_once(start):
    """With the message that it has here, see `tests/rewards/test_combine.py`."""
    with pytest.raises(ConfigError, match=r"reward\.terms\.name='orc' .* ocr\?"):
        start(terms=(RewardTerm(name="orc"),), gold=())


def sampled(ray, images):
    """What a rollout worker hands on: a shard whose second value is images in the object store."""
    shard: Future[Answer] = Future()
    references = [ray.put(None), ray.put(torch.tensor(images))]
    return shard, Answer(values=[], references=references, worker=0)


def test_shards_are_scored_when_they_are_there(ray_cluster, remote, local, images, prompts):
    parts = [slice(0, 8), slice(8, 16), slice(16, 24)]
    shards = [sampled(ray_cluster, images[part]) for part in parts]
    reward = remote.follow([shard for shard, _ in shards], [prompts[part] for part in parts])
    for shard, answer in reversed(shards):
        shard.set_result(answer)
    wait_for(lambda: all(score.done() for score in reward.scores))
    expected = score_batch(local, images[:24], prompts[:24])
    found = score_batch(reward, images[:24], prompts[:24])
    assert_same(found, expected)


def test_a_shard_that_fails_is_scored_again_one_by_one(ray_cluster, remote, local, images, prompts):
    images[11] = 0
    parts = [slice(0, 8), slice(8, 16)]
    shards = [sampled(ray_cluster, images[part]) for part in parts]
    reward = remote.follow([shard for shard, _ in shards], [prompts[part] for part in parts])
    for shard, answer in shards:
        shard.set_result(answer)
    found = score_batch(reward, images[:16], prompts[:16], on_error="drop_group")
    expected = score_batch(local, images[:16], prompts[:16], on_error="drop_group")
    assert np.flatnonzero(found.failed).tolist() == [11]
    assert_same(found, expected)


def test_nobody_scores_a_shard_that_was_not_sampled(remote, prompts):
    shard: Future[Answer] = Future()
    reward = remote.follow([shard], [prompts[:4]])
    shard.set_exception(BackendError("the rollout failed"))
    wait_for(reward.scores[0].cancelled)


def test_a_killed_reward_worker_is_replaced_and_its_share_scored_elsewhere(
    ray_cluster, remote, local, images, prompts, events
):
    """And secrets of options reach no log, neither by this nor by an image that fails."""
    events.clear()
    os.kill(remote._workers.places[0]["pid"], signal.SIGKILL)
    found = score_batch(remote, images, prompts)
    expected = score_batch(local, images, prompts)
    assert_same(found, expected)
    assert not found.failed.any()
    wait_for(lambda: [event["kind"] for event in events].count("worker_restarted") == 1)
    assert [event["kind"] for event in events] == ["worker_lost", "shard_retried", "worker_restarted"]
    assert events[0]["worker"] == "reward worker 0"
    assert events[0]["task"].startswith("scoring of ")
    images[2] = 0
    with pytest.raises(BackendError, match=r"sample 2 \(prompt ") as caught:
        score_batch(remote, images, prompts)
    assert "s3cret" not in str(caught.value)
    logs = [path for path in Path(session_folder(ray_cluster)).rglob("*") if path.is_file()]
    assert len(logs) > 5
    assert [path for path in logs if b"s3cret" in path.read_bytes()] == []


def session_folder(ray):
    # Ray has no public name for it.
    return ray._private.worker._global_node.get_session_dir_path()
