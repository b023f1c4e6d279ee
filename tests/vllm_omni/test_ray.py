"""The engine in a Ray worker: the same samples, and none of its processes outlives the worker."""

import os
import signal
import time
from dataclasses import replace

import psutil
import pytest
import torch

from flowcorr.rollout.ray_pool import RayPool

pytestmark = [pytest.mark.vllm_omni, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def remote(shared, ray_cluster):
    """A pool of one worker for the configuration of `stack`, and what happens to it."""
    config, events = shared[0].config, []
    rollout = replace(config.rollout, placement="ray", batch_size=8, timeout=300.0)
    pool = RayPool(
        replace(config, rollout=rollout), on_event=lambda kind, **fields: events.append((kind, fields))
    )
    yield pool, events
    pool.close()


def sample(engine, stack):
    return engine.sample(stack.conditioning, (0, 1), training_step=1, with_means=True)


def assert_alike(found, expected):
    torch.testing.assert_close(found.latents, expected.latents, rtol=0, atol=1e-4)
    torch.testing.assert_close(found.log_probs, expected.log_probs, rtol=0, atol=1e-6)
    assert torch.equal(found.group_ids, expected.group_ids)
    assert torch.equal(found.policy_versions, expected.policy_versions)


def test_a_worker_samples_as_the_engine_does_here(stack, remote):
    pool, events = remote
    for _ in range(2):
        stack.stir()
        stack.sync()
        pool.sync(stack.actor.snapshot())
        found = sample(pool, stack)
        assert_alike(found, stack.sample())
        assert stack.mismatch(found).max() <= 1e-6
    assert found.policy_versions.unique().tolist() == [stack.actor.version]
    assert "attention" in pool.describe()
    assert events == []


def test_a_killed_worker_takes_its_engine_with_it_and_is_replaced(stack, remote):
    pool, events = remote
    pool.sync(stack.actor.snapshot())
    expected = sample(pool, stack)
    children = psutil.Process(pool.places[0]["pid"]).children(recursive=True)
    assert children, "the engine samples in processes of its own"
    sampling = pool.submit(stack.conditioning, (0, 1), training_step=1, with_means=True)
    os.kill(pool.places[0]["pid"], signal.SIGKILL)
    assert_alike(sampling.result(), expected)
    assert [kind for kind, _ in events] == ["worker_lost", "shard_retried", "worker_restarted"]
    end = time.monotonic() + 60
    while any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children):
        assert time.monotonic() < end, "the engine's processes outlive the worker"
        time.sleep(0.2)
