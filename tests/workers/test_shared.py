"""One pool for two ranks: both get what they asked for, from the same workers."""

import os

import pytest
from ray_tasks import WORKERS, Tasks

from flowcorr import config, distributed, trainer
from flowcorr.errors import BackendError, ConfigError
from flowcorr.trainer.events import read_events
from flowcorr.workers.shared import open_pool
from tests.trainer.test_ranks import SMALL, assert_same_run, in_float64, records

pytestmark = pytest.mark.system

RUN = (*WORKERS, "rollout.emulate=int8", "rollout.max_staleness=1", "rollout.drift_every=1")
OPTIONS = {
    "num_workers": 2,
    "resources": {},
    "timeout": 600.0,
    "address": None,
    "num_threads": 1,
    "own_errors": (ConfigError,),
    "on_event": lambda kind, **fields: None,
}


def settings(*overrides):
    return config.load(
        "tiny_jpeg_lora", [*SMALL, "reward.terms=[{name: 'ray_tasks:brightness'}]", *overrides]
    )


def ask_workers():
    """On each rank: the workers that answered, an object there and back, and errors."""
    pool = open_pool("rollout", Tasks, **OPTIONS)
    pauses = [pool.submit("a pause", "pid", 0.1) for _ in range(4)]
    found = {"workers": {pause.result(600).values[0] for pause in pauses}}
    found["pair"] = one(pool, "pair", distributed.rank())
    answer = pool.submit("a pair", "pair", "a", num_returns=2).result(600)
    found["of references"] = one(pool, "pair", answer.references[1])
    distributed.gather(None, "the end of what succeeds")
    kinds = ("config", "memory") if distributed.rank() else ("config",)  # each "memory" costs three workers
    for kind in kinds:
        with pytest.raises((ConfigError, BackendError)) as caught:
            one(pool, "fail", kind)
        found[kind] = f"{caught.type.__name__}: {caught.value}"
    distributed.gather(None, "the end of all tasks")
    pool.close()
    with pytest.raises(BackendError, match="the rollout workers are closed"):
        pool.check()
    return found


def one(pool, method, *arguments):
    (value,) = pool.submit("a task", method, *arguments).result(600).values
    return value


@pytest.fixture(scope="module")
def two_ranks_of_a_cluster(ray_cluster, two_ranks):
    # The cluster's secret is among them.
    rays = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
    two_ranks.call(join_cluster, {**rays, "RAY_ADDRESS": ray_cluster.get_runtime_context().gcs_address})
    return two_ranks


def join_cluster(variables):
    os.environ.update(variables)


def test_every_rank_is_answered_by_the_same_workers(two_ranks_of_a_cluster):
    told = two_ranks_of_a_cluster.call(ask_workers)
    assert len(told[0]["workers"] | told[1]["workers"]) == 2
    for rank, found in enumerate(told):
        assert found["pair"] == (rank, [rank])
        assert found["of references"] == (["a"], [["a"]])
        assert found["config"] == "ConfigError: this cannot work"
    assert told[1]["memory"].startswith(
        "BackendError: a task failed 3 times, the last time in rollout worker "
    )


@pytest.fixture(scope="module")
def of_one_rank(ray_cluster, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    train(folder, (*RUN, "rollout.num_workers=1", "reward.placement=local"))
    return folder


@pytest.mark.parametrize(
    "workers", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)]
)
def test_two_ranks_with_one_pool_are_one_rank(two_ranks_of_a_cluster, of_one_rank, workers, tmp_path):
    two_ranks_of_a_cluster.call(train, tmp_path, (*RUN, f"rollout.num_workers={workers}"))
    assert_same_run(tmp_path, of_one_rank, config=False)
    assert [record["rollout/staleness_max"] for record in records(tmp_path)[1:]] == [0, 1]
    assert [event["kind"] for event in read_events(tmp_path / "events.jsonl")].count("end") == 1


@in_float64()
def train(folder, overrides):
    trainer.train(settings(*overrides), folder)
