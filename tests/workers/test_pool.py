"""Workers that die, hang and fail, with tasks that need no model."""

import os
import re
import time
from functools import partial

import pytest
from ray_tasks import WORKERS, Events, Tasks, broken, wait_for

from flowcorr import config, distributed, trainer
from flowcorr.errors import BackendError, ConfigError, MissingExtraError
from flowcorr.trainer.events import read_events
from flowcorr.workers.cluster import Cluster
from flowcorr.workers.dispatcher import WorkerOptions
from flowcorr.workers.pool import WorkerPool
from tests.descendants import descendants
from tests.trainer.test_ranks import SMALL, assert_same_run, in_float64, records

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("ray_cluster")]
NODE = "0" * 56


def start(build=Tasks, events=None, **options):
    defaults = {
        "section": "rollout",
        "num_workers": 2,
        "resources": {},
        "timeout": 600.0,
        "own_errors": (ConfigError, MissingExtraError),
    }
    on_event = Events() if events is None else events
    return WorkerPool(build, WorkerOptions(**{**defaults, **options}), address=None, on_event=on_event)


@pytest.fixture(scope="module")
def shared(opened, events):
    return opened(start(events=events))


@pytest.fixture
def pool(shared, events):
    events.clear()
    return shared


def value(future):
    (only,) = future.result(timeout=600).values
    return only


def dispatchers():
    return {child for child, name in descendants().items() if name.startswith("ray::FlowcorrDispatcher")}


def runs(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_tasks_go_to_all_workers(pool):
    found = {value(future) for future in [pool.submit("a pause", "pid", 0.2) for _ in range(6)]}
    assert found == {place["pid"] for place in pool.places}
    assert os.getpid() not in found


def test_others_take_the_share_of_a_slow_worker(pool, tmp_path):
    flag = tmp_path / "flag"
    slow = pool.submit("a long wait", "wait_for", str(flag))
    quick = [value(future) for future in [pool.submit("a task", "pid") for _ in range(10)]]
    assert not slow.done()
    flag.touch()
    assert set(quick) == {place["pid"] for place in pool.places} - {value(slow)}


def test_several_values_have_references_that_other_workers_read(pool):
    answer = pool.submit("a pair", "pair", "a").result()
    assert answer.values == [("a", ["a"])]
    answer = pool.submit("a pair", "pair", "a", num_returns=2).result()
    assert answer.values == ["a", ["a"]]
    assert value(pool.submit("another", "pair", answer.references[1])) == (["a"], [["a"]])


def test_a_killed_worker_is_replaced_and_its_task_done_elsewhere(pool, events, tmp_path):
    before = {place["pid"] for place in pool.places}
    survivor = value(pool.submit("a fatal task", "die", str(tmp_path / "flag")))
    assert survivor in before
    wait_for(lambda: "worker_restarted" in events.kinds())
    after = {place["pid"] for place in pool.places}
    assert after & before == {survivor}
    assert events.kinds() == ["worker_lost", "shard_retried", "worker_restarted"]
    lost, retried, restarted = events
    assert lost["pid"] in before - {survivor}
    assert lost["task"] == retried["task"] == "a fatal task"
    assert "SYSTEM_ERROR" in lost["error"]
    assert (retried["attempt"], lost["worker"], restarted["pid"]) == (
        2,
        restarted["worker"],
        (after - before).pop(),
    )


def test_a_task_that_kills_every_worker_is_given_up(pool, events):
    where = r"rollout worker \d \(process \d+ on node \w{56}\)"
    pattern = rf"a fatal task failed 3 times, the last time in {where}: ActorDied"
    with pytest.raises(BackendError, match=pattern):
        pool.submit("a fatal task", "die").result(timeout=600)
    wait_for(lambda: events.kinds().count("worker_restarted") == 3)
    assert events.kinds().count("shard_retried") == 2
    assert value(pool.submit("a pause", "pid")) in {place["pid"] for place in pool.places}


def test_workers_go_on_where_their_events_cannot_be_recorded(tmp_path, caplog):
    def fails(kind, /, **fields):
        raise ValueError("no room for records")

    pool = start(events=fails, num_workers=1)
    (before,) = pool.places
    assert value(pool.submit("a fatal task", "die", str(tmp_path / "flag"))) != before["pid"]
    pool.close()
    assert "the event worker_lost of the rollout workers could not be recorded" in caplog.text
    assert "no room for records" in caplog.text


def test_a_worker_that_hangs_is_replaced(tmp_path):
    events = Events()
    pool = start(events=events, num_workers=1, timeout=3.0)
    begin = time.monotonic()
    found = value(pool.submit("an endless task", "hang", str(tmp_path / "flag")))
    assert time.monotonic() - begin >= 3
    assert events.kinds()[:3] == ["worker_lost", "shard_retried", "worker_restarted"]
    assert events[0]["error"].startswith("TimeoutError: ")
    assert "rollout.timeout=3 s" in events[0]["error"]
    assert found != events[0]["pid"]
    wait_for(lambda: not runs(events[0]["pid"]))
    pool.close()


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("config", ConfigError, "^this cannot work$"),
        (
            "extra",
            MissingExtraError,
            r"^reward ocr needs rapidocr; install it with: pip install 'flowcorr\[ocr\]'$",
        ),
    ],
)
def test_a_tasks_own_error_comes_back_as_it_is(pool, events, kind, error, message):
    before = pool.places
    with pytest.raises(error, match=message):
        pool.submit("a task", "fail", kind).result(timeout=600)
    assert events == []
    assert pool.places == before


def test_any_other_error_costs_the_worker_its_place(pool, events):
    with pytest.raises(BackendError, match=r" failed 3 times, .* on node .*: RuntimeError: "):
        pool.submit("a task", "fail", "memory").result(timeout=600)
    assert events.kinds().count("worker_lost") == 3
    wait_for(lambda: events.kinds().count("worker_restarted") == 3)


def test_workers_that_cannot_start_say_why(tmp_path):
    flag = tmp_path / "flag"
    flag.write_text("model.path='nowhere' is not a pipeline")
    with pytest.raises(ConfigError, match=r"^model\.path='nowhere' "):
        start(partial(Tasks, str(flag)), num_workers=1)
    with pytest.raises(BackendError, match="rollout worker 0 .*: RuntimeError: "):
        start(broken, num_workers=1)


def test_without_a_worker_left_everything_fails(tmp_path):
    events = Events()
    pool = start(partial(Tasks, str(tmp_path / "flag")), events, num_workers=1)
    (tmp_path / "flag").write_text("the file system is gone")
    doomed, waiting = pool.submit("a fatal task", "die"), pool.submit("a pause", "pid")
    for future in (doomed, waiting):
        assert future.exception(timeout=600)
    for future in (doomed, waiting, pool.submit("a pause", "pid")):
        with pytest.raises(BackendError, match="; the last, rollout worker 0, .*ConfigError: "):
            future.result(timeout=600)
    assert events.kinds() == ["worker_lost", "shard_retried", "worker_lost"]
    pool.close()


def test_without_the_dispatcher_everything_fails_at_once():
    """`tests/faults` ends the whole node of a run."""
    events = Events()
    others = dispatchers()
    pool = start(events=events, num_workers=1)
    (place,) = pool.places
    busy = pool.submit("a long pause", "pid", 3000.0)
    wait_for(lambda: pool.num_busy == 1)
    waiting = pool.submit("a pause", "pid")
    (dispatcher,) = dispatchers() - others
    dispatcher.kill()
    begin = time.monotonic()
    for answer in (busy.result, waiting.result, pool.submit("a pause", "pid").result, pool.check):
        with pytest.raises(BackendError, match=r"lost, .*--resume \(ActorDied"):
            answer()
    assert time.monotonic() - begin < 60
    pool.close()
    assert events.kinds() == ["workers_lost"]
    wait_for(lambda: not runs(place["pid"]))


def test_close_ends_workers_at_work():
    pool = start(num_workers=1)
    busy, waiting = pool.submit("a long pause", "pid", 3000.0), pool.submit("a pause", "pid")
    (place,) = pool.places
    wait_for(lambda: pool.num_busy == 1)
    pool.close()
    pool.close()
    assert waiting.cancelled()
    assert busy.cancelled()
    with pytest.raises(BackendError, match="^the rollout .* closed$"):
        pool.submit("a pause", "pid").result()
    wait_for(lambda: not runs(place["pid"]))


def test_workers_keep_to_their_number_of_threads():
    pool = start(num_workers=1, num_threads=3)
    assert value(pool.submit("a count", "threads")) == 3
    pool.close()


def test_a_node_may_be_chosen(pool):
    node = pool.places[0]["node"]
    chosen = start(num_workers=1, scheduling=node)
    assert chosen.places[0]["node"] == node
    chosen.close()
    with pytest.raises(ConfigError, match=rf"rollout\.scheduling='{NODE}' .* {node}$"):
        start(scheduling=NODE)


@pytest.mark.parametrize(("name", "amount"), [("num_gpus", 1), ("tpu_slice", 0.5)])
def test_what_a_local_cluster_cannot_hold_is_an_error_at_once(monkeypatch, name, amount):
    monkeypatch.setattr(Cluster, "local", True)
    named = rf"rollout\.worker_resources\.{name}={amount} .*rollout\.num_workers=2 .* 0 "
    with pytest.raises(ConfigError, match=named):
        start(resources={name: amount})


def test_a_local_cluster_hands_out_no_gpus_that_ranks_train_on(monkeypatch):
    monkeypatch.setattr(Cluster, "local", True)
    monkeypatch.setattr(distributed, "ranks_here", lambda: 8)
    with pytest.raises(ConfigError, match=r"worker_resources\.num_gpus=1 .* 8 ranks .* RAY_ADDRESS"):
        start(resources={"num_gpus": 1})
    start(num_workers=1, resources={"num_cpus": 0.5}).close()


# Several ranks ------------------------------------------------------------------------------------------

RUN = (*WORKERS, "rollout.emulate=int8", "rollout.max_staleness=1", "rollout.drift_every=1")


def settings(*overrides):
    return config.load(
        "tiny_jpeg_lora", [*SMALL, "reward.terms=[{name: 'ray_tasks:brightness'}]", *overrides]
    )


def ask_workers():
    """On each rank: the workers that answered, an object there and back, and errors."""
    pool = start(own_errors=(ConfigError,), num_threads=1)
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
    with pytest.raises(BackendError, match="^the rollout .* closed$"):
        pool.check()
    return found


def load_shared_weights():
    """On each rank: the main rank's object, as a worker gets it from each rank's reference."""
    pool = start(num_threads=1)
    references = [pool.share(f"of rank {distributed.rank()}, {number}") for number in range(3)]
    found = [one(pool, "pair", reference)[0] for reference in references]
    distributed.gather(None, "the end of all tasks")
    pool.close()
    return found


def one(pool, method, *arguments):
    (value,) = pool.submit("a task", method, *arguments).result(600).values
    return value


@pytest.fixture(scope="module")
def two_ranks_of_a_cluster(ray_cluster, two_ranks):
    # The cluster's secret is among them.
    rays = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
    two_ranks.call(join_cluster, {**rays, "RAY_ADDRESS": ray_cluster.get_runtime_context().gcs_address})
    yield two_ranks
    two_ranks.call(join_cluster, {"RAY_ADDRESS": ""})


def join_cluster(variables):
    os.environ.update(variables)


def test_the_other_rank_joins_the_cluster_that_the_main_rank_starts(two_ranks):
    told = two_ranks.call(ask_workers)
    assert len(told[0]["workers"] | told[1]["workers"]) == 2
    assert told[1]["pair"] == (1, [1])


def test_every_rank_is_answered_by_the_same_workers(two_ranks_of_a_cluster):
    told = two_ranks_of_a_cluster.call(ask_workers)
    assert len(told[0]["workers"] | told[1]["workers"]) == 2
    for rank, found in enumerate(told):
        assert found["pair"] == (rank, [rank])
        assert found["of references"] == (["a"], [["a"]])
        assert found["config"] == "ConfigError: this cannot work"
    assert re.match(r"BackendError: .* 3 times, .* rollout worker \d", told[1]["memory"])


def test_every_rank_shares_the_main_ranks_weights(two_ranks_of_a_cluster):
    expected = [f"of rank 0, {number}" for number in range(3)]
    assert two_ranks_of_a_cluster.call(load_shared_weights) == [expected] * 2


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
