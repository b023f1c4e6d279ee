"""Sampling in Ray workers equals sampling here, whoever does it and with whichever weights."""

import os
import signal
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch
from ray_tasks import wait_for

from flowcorr.errors import BackendError
from flowcorr.instruments.doctor import examine
from flowcorr.rollout import Weights
from flowcorr.workers.pool import Answer, ignore_event
from flowcorr.workers.rollout import PendingRollout, RayRollout
from tests.rollouts import columns
from tests.tolerances import LATENTS, LOG_PROBS

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("ray_cluster")]
GROUPS = range(5)
ROLLOUT = {"prompts_per_step": len(GROUPS), "n": 4, "batch_size": 8}  # shards of 2, 2 and 1 groups


@pytest.fixture(scope="module")
def start_pool(opened, make_config):
    """Options of the rollout -> a pool."""

    def start(on_event=ignore_event, **rollout):
        config = make_config(
            rollout={**ROLLOUT, "placement": "ray", "timeout": 600.0, **rollout}, trainer={"num_threads": 1}
        )
        return opened(RayRollout(config, on_event=on_event))

    return start


@pytest.fixture(scope="module")
def pool(start_pool, events):
    """Two workers that sample with the newest weights."""
    return start_pool(events, num_workers=2)


@pytest.fixture(scope="module")
def lagging(start_pool):
    """One worker that samples two training steps ahead, with rounded weights."""
    return start_pool(max_staleness=2, emulate="int8")


@pytest.fixture
def run(make_run):
    """An actor that has learned something, and an engine in this process that has its weights."""
    run = make_run(rollout=ROLLOUT)
    run.stir()
    return run


def rows(run, groups=GROUPS):
    """Conditioning of groups whose prompts alternate."""
    chosen = [group % 2 for group in groups]
    return {name: values[chosen] for name, values in run.conditioning.items()}


def sample(engine, run, groups=GROUPS, **options):
    return engine.sample(rows(run, groups), groups, **{"training_step": 3, "with_means": True, **options})


COMPUTED = {
    "latents": LATENTS,
    "next_latents": LATENTS,
    "means": LATENTS,
    "log_probs": LOG_PROBS,
    "images": {"rtol": 0, "atol": 1},
}


def assert_same(one, other):
    """Rollouts of the same samples; of what a model computed only nearly: a worker has memory of its own."""
    theirs = columns(other)
    for name, ours in columns(one).items():
        if ours is None:
            assert theirs[name] is None, name
        elif name == "worker_ids":
            assert ours.shape == one.group_ids.shape
        elif name == "conditioning":
            assert ours.keys() == theirs[name].keys()
            assert all(torch.equal(value, theirs[name][key]) for key, value in ours.items())
        elif name in COMPUTED:
            torch.testing.assert_close(ours, theirs[name], **COMPUTED[name], msg=name)
        else:
            assert torch.equal(ours, theirs[name]), name


def test_two_workers_and_none_agree(pool, run):
    """One worker does too: `test_one_worker_changes_weights_between_shards`."""
    pool.sync(run.actor.weights.snapshot())
    assert_same(sample(pool, run), sample(run.engine, run))
    assert pool.weights_for(0).weights.version == run.engine.version == 1


def test_groups_keep_their_ids_and_order(pool, run):
    pool.sync(run.actor.weights.snapshot())
    found = sample(pool, run, (4, 1, 3))
    assert found.group_ids.tolist() == [4] * 4 + [1] * 4 + [3] * 4
    # Groups 1 and 3 share a shard now, and did not above.
    expected = sample(run.engine, run).window.latents[4:8]
    torch.testing.assert_close(found.window.latents[4:8], expected, **LATENTS)


def test_every_sync_takes_effect_even_if_its_version_is_not_new(pool, run):
    """The doctor, for one, tells of other weights under one version."""
    found = []
    for seed in range(3):
        run.stir(seed=seed)
        run.actor.weights.version = 7
        run.engine.sync(run.actor.weights.snapshot())
        pool.sync(run.actor.weights.snapshot())
        found.append(sample(pool, run))
        assert_same(found[-1], sample(run.engine, run))
    assert (found[0].window.means - found[2].window.means).abs().max() > 100 * LATENTS["atol"]
    assert found[0].policy_versions.unique().tolist() == [7]


def test_one_worker_changes_weights_between_shards(lagging, run, make_run):
    """Steps that run ahead are sampled with what was newest when they were due."""
    lag = lagging.config.rollout.max_weight_age
    local = make_run(rollout={**ROLLOUT, "emulate": "int8", "staleness": 1})
    snapshots = []
    lagging.restore([run.actor.weights.snapshot()])
    for seed in range(4):
        run.stir(seed=seed)
        snapshots.append(run.actor.weights.snapshot())
        lagging.sync(snapshots[-1])
    assert [weights.version for weights in lagging.history] == [3, 4, 5]
    assert lagging.weights_for(0).weights.version == 3
    options = {"with_means": True}
    submitted = {
        ahead: lagging.submit(rows(run), GROUPS, training_step=9 + ahead, ahead=ahead, **options)
        for ahead in (0, 1, 2)
    }
    for ahead, sampling in submitted.items():
        assert sampling.version == snapshots[-1].version - (lag - ahead)
        local.engine.restore([snapshots[1 + ahead]])
        assert_same(sampling.result(), sample(local.engine, run, training_step=9 + ahead))


def test_early_steps_have_the_first_weights(lagging, run):
    lagging.restore([run.actor.weights.snapshot()])
    ahead = [lagging.weights_for(ahead).weights.version for ahead in (0, 1, 2)]
    run.stir(seed=5)
    lagging.sync(run.actor.weights.snapshot())
    assert ahead == [1, 1, 1]
    assert [lagging.weights_for(ahead).weights.version for ahead in (0, 1, 2)] == [1, 1, 2]


def test_history_is_on_the_cpu_and_restores(lagging, run):
    lagging.restore(
        [Weights(version=4, tensors=run.actor.weights.snapshot().tensors), run.actor.weights.snapshot()]
    )
    assert [weights.version for weights in lagging.history] == [4, 1]
    for name, tensor in run.actor.weights.snapshot().tensors.items():
        assert torch.equal(lagging.history[0].tensors[name], tensor)
    assert sample(lagging, run).policy_versions.unique().tolist() == [4]


def test_a_worker_killed_in_mid_batch_changes_nothing(pool, run, events):
    pool.sync(run.actor.weights.snapshot())
    expected = sample(run.engine, run)
    events.clear()
    sampling = pool.submit(rows(run), GROUPS, training_step=3, with_means=True)
    # A pool of rollout workers says nothing of their tasks, and the kill must come in the middle of one.
    wait_for(lambda: pool._workers.num_busy == 2)
    os.kill(pool.places[0]["pid"], signal.SIGKILL)
    assert_same(sampling.result(), expected)
    assert [event["kind"] for event in events[:2]] == ["worker_lost", "shard_retried"]
    assert events[0]["worker"] == "rollout worker 0"
    assert events[0]["task"].startswith("sampling of groups ")
    wait_for(lambda: events[-1]["kind"] == "worker_restarted")
    for _ in range(3):  # by the new worker too
        assert_same(sample(pool, run), expected)


def test_weights_that_diverged_are_no_workers_fault(pool, run, events):
    events.clear()
    broken = {
        name: torch.full_like(tensor, torch.nan)
        for name, tensor in run.actor.weights.snapshot().tensors.items()
    }
    pool.sync(Weights(version=2, tensors=broken))
    rollout = sample(pool, run)
    assert rollout.final_latents.isnan().flatten(1).any(1).all()
    assert not rollout.finite_images.any()
    assert events == []


def test_samples_say_which_worker_made_them(pool, run):
    pool.restore([run.actor.weights.snapshot()])
    assert set(sample(pool, run).worker_ids.tolist()) <= {0, 1}


def test_samples_of_other_weights_are_an_error(run):
    rollout = sample(run.engine, run)
    shard: Future[Answer] = Future()
    values = [replace(rollout, images=None), rollout.images]
    shard.set_result(Answer(values=values, references=[], worker=0))
    sampling = PendingRollout(shards=[shard], version=1, groups_per_shard=5)
    assert_same(sampling.result(), rollout)
    message = r"groups \[0, 1, 2, 3, 4\] .* \[1\] instead of 2:"
    with pytest.raises(BackendError, match=message):
        replace(sampling, version=2).result()


def test_the_doctor_finds_workers_and_actor_alike(pool, run):
    pool.restore([run.actor.weights.snapshot()])
    report = examine(run.actor, pool, run.conditioning)
    assert report.causes() == report.causes("warning") == []
    assert pool.describe() == run.engine.describe()
    assert [weights.version for weights in pool.history] == [1]
