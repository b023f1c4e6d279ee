"""The engine in a Ray worker: the same samples, and none of its processes outlives the worker."""

import os
import shutil
import signal
import time
from dataclasses import replace

import pytest
import torch

from flowcorr.models import EMBEDDED
from flowcorr.rollout.vllm_omni.probe import actor_probe
from flowcorr.workers.rollout import RayRollout, RolloutWorker, Shard
from tests.descendants import descendants, running

pytestmark = [pytest.mark.vllm_omni, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def remote(shared, ray_cluster):
    """A pool of one worker for the configuration of `stack`, and what happens to it."""
    (stack, initial), events = shared, []
    rollout = replace(stack.config.rollout, placement="ray", batch_size=8, timeout=300.0)
    pool = RayRollout(
        replace(stack.config, rollout=rollout),
        probe=actor_probe(stack.family, stack.config, initial),
        on_event=lambda kind, **fields: events.append((kind, fields)),
    )
    yield pool, events
    pool.close()


def sample(engine, stack):
    return engine.sample(stack.conditioning, (0, 1), training_step=1, with_means=True)


def assert_alike(found, expected):
    torch.testing.assert_close(found.window.latents, expected.window.latents, rtol=0, atol=1e-4)
    torch.testing.assert_close(found.log_probs, expected.log_probs, rtol=0, atol=1e-6)
    assert torch.equal(found.group_ids, expected.group_ids)
    assert torch.equal(found.policy_versions, expected.policy_versions)


def test_a_worker_samples_as_the_engine_does_here(stack, remote):
    pool, events = remote
    for _ in range(2):
        stack.stir()
        stack.sync()
        pool.sync(stack.actor.weights.snapshot())
        found = sample(pool, stack)
        assert_alike(found, stack.sample())
        assert stack.mismatch(found).max() <= 1e-6
    assert found.policy_versions.unique().tolist() == [stack.actor.weights.version]
    assert "attention" in pool.describe()
    assert events == []


def test_a_worker_needs_no_text_encoder_and_runs_no_transformer_of_its_own(
    stack, ray_cluster, tmp_path, monkeypatch
):
    folder = shutil.copytree(EMBEDDED["tiny_ocr"], tmp_path / "model")
    for encoder in folder.glob("text_encoder*"):
        shutil.rmtree(encoder)
    rollout = replace(stack.config.rollout, placement="ray", engine={"distributed_executor_backend": "uni"})
    config = replace(stack.config, rollout=rollout, model=replace(stack.config.model, path=str(folder)))
    probe = actor_probe(stack.family, config, stack.actor.weights.snapshot().tensors)
    stack.stir()
    stack.sync()
    weights = stack.actor.weights.snapshot()
    weights = replace(weights, probe_velocity=probe.velocity(weights))
    expected = stack.sample()
    monkeypatch.setattr(type(stack.family.transformer), "forward", None)
    worker = RolloutWorker(config, probe.shipped())
    try:
        shard = Shard(
            conditioning=stack.conditioning,
            groups=(0, 1),
            training_step=1,
            with_means=True,
            weights=ray_cluster.put(weights),
        )
        found, _ = worker.sample(shard)
    finally:
        worker.close()
    assert_alike(found, expected)


def test_a_killed_worker_takes_its_engine_with_it_and_is_replaced(stack, remote):
    pool, events = remote
    pool.sync(stack.actor.weights.snapshot())
    expected = sample(pool, stack)
    children = descendants(pool.places[0]["pid"])
    assert children, "the engine samples in processes of its own"
    sampling = pool.submit(stack.conditioning, (0, 1), training_step=1, with_means=True)
    os.kill(pool.places[0]["pid"], signal.SIGKILL)
    assert_alike(sampling.result(), expected)
    assert [kind for kind, _ in events] == ["worker_lost", "shard_retried", "worker_restarted"]
    end = time.monotonic() + 60
    while any(map(running, children)):
        assert time.monotonic() < end, "the engine's processes outlive the worker"
        time.sleep(0.2)
