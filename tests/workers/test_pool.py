"""Workers that die, hang and fail, with tasks that need no model."""

import os
import socket
import time
from functools import partial

import pytest
from ray_tasks import Events, Tasks, broken, wait_for

from flowcorr.errors import BackendError, ConfigError, MissingExtraError
from flowcorr.workers import pool as worker_pool
from flowcorr.workers.cluster import Cluster, NodeLostError
from flowcorr.workers.pool import WorkerPool

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("ray_cluster")]
NODE = "0" * 56


def start(build=Tasks, events=None, **options):
    defaults = {
        "num_workers": 2,
        "resources": {},
        "timeout": 600.0,
        "address": None,
        "num_threads": None,
        "own_errors": (ConfigError, MissingExtraError),
        "on_event": Events() if events is None else events,
    }
    return WorkerPool("rollout", build, **{**defaults, **options})


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


def test_a_worker_that_hangs_is_replaced(tmp_path):
    events = Events()
    pool = start(events=events, num_workers=1, timeout=3.0)
    begin = time.monotonic()
    found = value(pool.submit("an endless task", "hang", str(tmp_path / "flag")))
    assert time.monotonic() - begin >= 3
    assert events.kinds()[:3] == ["worker_lost", "shard_retried", "worker_restarted"]
    assert events[0]["error"] == "TimeoutError: no answer within rollout.timeout=3 s"
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
    with pytest.raises(
        BackendError, match=r"a task failed 3 times, .* on node .*: RuntimeError: out of memory$"
    ):
        pool.submit("a task", "fail", "memory").result(timeout=600)
    assert events.kinds().count("worker_lost") == 3
    wait_for(lambda: events.kinds().count("worker_restarted") == 3)


def test_workers_that_cannot_start_say_why(tmp_path):
    flag = tmp_path / "flag"
    flag.write_text("model.path='nowhere' is not a pipeline")
    with pytest.raises(ConfigError, match="^model.path='nowhere' is not a pipeline$"):
        start(partial(Tasks, str(flag)), num_workers=1)
    with pytest.raises(BackendError, match="rollout worker 0 did not start: RuntimeError: no such model"):
        start(broken, num_workers=1)


def test_without_a_worker_left_everything_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_pool, "ATTEMPTS", 1)
    events = Events()
    pool = start(partial(Tasks, str(tmp_path / "flag")), events, num_workers=1)
    (tmp_path / "flag").write_text("the file system is gone")
    doomed, waiting = pool.submit("a fatal task", "die"), pool.submit("a pause", "pid")
    with pytest.raises(BackendError, match="a fatal task failed 1 times"):
        doomed.result(timeout=600)
    message = "no rollout worker is left; the last, rollout worker 0, failed with ConfigError: the file system is gone"
    with pytest.raises(BackendError, match=message):
        waiting.result(timeout=600)
    with pytest.raises(BackendError, match=message):
        pool.submit("a pause", "pid").result()
    assert events.kinds() == ["worker_lost", "worker_lost"]
    pool.close()


def test_without_the_node_of_this_process_everything_fails_at_once(monkeypatch):
    """Here only the connection to the raylet closes; `tests/faults` ends a real raylet."""
    events = Events()
    pool = start(events=events, num_workers=1)
    busy, waiting = pool.submit("a long pause", "pid", 3000.0), pool.submit("a pause", "pid")
    wait_for(lambda: pool.num_busy == 1)
    monkeypatch.setattr(worker_pool, "CLOSE_TIMEOUT", 600.0)
    begin = time.monotonic()
    # No public call breaks the connection as the end of a raylet does.
    pool._cluster._raylet.shutdown(socket.SHUT_RDWR)
    for future in (busy, waiting, pool.submit("a pause", "pid")):
        with pytest.raises(
            NodeLostError, match=r"^the Ray node of this process, \w{56}, is gone: .* with --resume$"
        ):
            future.result(timeout=600)
    with pytest.raises(NodeLostError):
        pool.check()
    pool.close()
    assert events.kinds() == ["node_lost"]
    assert time.monotonic() - begin < worker_pool.CLOSE_TIMEOUT


def test_close_ends_workers_at_work(monkeypatch):
    pool = start(num_workers=1)
    busy, waiting = pool.submit("a long pause", "pid", 3000.0), pool.submit("a pause", "pid")
    (place,) = pool.places
    wait_for(lambda: pool.num_busy == 1)
    monkeypatch.setattr(worker_pool, "CLOSE_TIMEOUT", 600.0)
    begin = time.monotonic()
    pool.close()
    assert time.monotonic() - begin < worker_pool.CLOSE_TIMEOUT / 2
    pool.close()
    assert waiting.cancelled()
    assert busy.cancelled()
    with pytest.raises(BackendError, match="the rollout workers are closed"):
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
    with pytest.raises(
        ConfigError, match=f"rollout.scheduling='{NODE}' is not a node of the cluster; its nodes are {node}"
    ):
        start(scheduling=NODE)


def test_what_a_local_cluster_cannot_hold_is_an_error_at_once(monkeypatch):
    monkeypatch.setattr(Cluster, "local", True)
    with pytest.raises(
        ConfigError, match=r"worker_resources.num_gpus=1 for rollout.num_workers=2 is more than the 0"
    ):
        start(resources={"num_gpus": 1})
    with pytest.raises(ConfigError, match=r"worker_resources.tpu_slice=0.5 for .* is more than the 0"):
        start(resources={"tpu_slice": 0.5})


def test_a_local_cluster_hands_out_no_gpus_that_ranks_train_on(monkeypatch):
    monkeypatch.setattr(Cluster, "local", True)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(
        ConfigError, match=r"num_gpus=1 would take the GPUs on which 8 ranks train, .* RAY_ADDRESS"
    ):
        start(resources={"num_gpus": 1})
    start(num_workers=1, resources={"num_cpus": 0.5}).close()
