"""Workers that are killed, stopped and slow in the middle of a run: the run is the same, and its events tell."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from ray_tasks import WORKERS

from flowcorr import trainer
from flowcorr.errors import BackendError
from flowcorr.trainer import Silent
from tests.ranks import start_ranks


class Meanwhile(Silent):
    """Does things to a run's parts as steps begin to sample; `parts` is the run's hook before its start.

    `places` are those of the start: to ask for the newest takes some milliseconds, in which a step may end.
    """

    def __init__(self, deeds):
        self.deeds, self.done, self.engine, self.places = deeds, 0, None, {}

    def parts(self, parts):
        self.engine = parts.engine
        self.places.update(engine=parts.engine.places, reward=parts.reward._workers.places)

    def on_phase(self, name):
        if name == "rollout" and self.done + 1 in self.deeds:
            self.deeds[self.done + 1](self)

    def on_step(self, step, metrics):
        self.done = step


def kill(pool, place):
    return lambda run: os.kill(run.places[pool][place]["pid"], signal.SIGKILL)


def train(bench, out, deeds, *overrides):
    meanwhile = Meanwhile(deeds)
    settings = bench.settings(*WORKERS, *overrides)
    return trainer.train(settings, out, observer=meanwhile, before_start=meanwhile.parts)


@pytest.mark.faults
def test_rollout_and_reward_workers_killed_in_mid_batch(bench, ray_cluster, tmp_path, events):
    deeds = {2: kill("engine", 0), 4: kill("reward", 0), 5: kill("engine", 1)}
    result = train(bench, tmp_path, deeds)
    assert (result.status, result.step) == ("finished", 6)
    bench.assert_same(tmp_path, bench.whole())
    lost = events(tmp_path, "worker_lost")
    # A worker that has done its share of the step in flight is found dead by its next task.
    steps = {event["worker"].replace(" worker ", "_"): event["step"] for event in lost}
    assert len(lost) == len(steps) == 3
    assert steps["rollout_0"] in (1, 2)
    assert steps["reward_0"] in (3, 4)
    assert steps["rollout_1"] in (4, 5)
    assert all("ActorDied" in event["error"] for event in lost)
    assert len(events(tmp_path, "shard_retried")) == 3
    restarted = events(tmp_path, "worker_restarted")
    assert {event["worker"] for event in restarted} <= {event["worker"] for event in lost}
    assert {event["pid"] for event in restarted}.isdisjoint(event["pid"] for event in lost)
    assert events(tmp_path, "failure") == []


@pytest.mark.faults
def test_a_worker_that_is_slow_holds_up_nothing_but_itself(bench, ray_cluster, tmp_path, events):
    """It stops for some seconds, so that the other one takes its share; nobody takes it for dead."""

    def pause(run):
        pid = run.places["engine"][0]["pid"]
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(3.0, os.kill, (pid, signal.SIGCONT)).start()

    begin = time.monotonic()
    train(bench, tmp_path, {2: pause})
    assert time.monotonic() - begin > 3
    bench.assert_same(tmp_path, bench.whole())
    assert set(events(tmp_path)) == {"start", "workers", "checkpoint", "end"}


@pytest.mark.faults
def test_a_worker_that_hangs_is_replaced(bench, ray_cluster, tmp_path, events, wait_for):
    def stop(run):
        os.kill(run.places["engine"][0]["pid"], signal.SIGSTOP)

    train(bench, tmp_path, {2: stop}, "rollout.timeout=20")
    bench.assert_same(tmp_path, bench.whole())
    (lost,) = events(tmp_path, "worker_lost")
    assert lost["error"].startswith("TimeoutError: ")
    assert "rollout.timeout=20" in lost["error"]
    wait_for(
        lambda: not psutil.pid_exists(lost["pid"]), 20, "the end of a process that no signal but SIGKILL ends"
    )


@pytest.mark.faults
def test_where_workers_die_again_and_again_the_run_ends_and_later_goes_on(
    bench, ray_cluster, tmp_path, events
):
    over = threading.Event()

    def hunt(engine):
        """Kill every rollout worker as soon as it is there."""
        while not over.is_set():
            with contextlib.suppress(BackendError):  # the pool has closed
                for place in engine.places:
                    with contextlib.suppress(KeyError, ProcessLookupError):
                        os.kill(place["pid"], signal.SIGKILL)
            over.wait(0.05)

    hunters = []

    def doom(run):
        hunters.append(threading.Thread(target=hunt, args=(run.engine,)))
        hunters[0].start()

    # Step 4 may have been sampled before the first of them dies.
    failed = r"sampling of groups .* of training step [45] failed 3 times"
    message = rf"{failed}, the last time in rollout worker \d .* on node "
    try:
        with pytest.raises(BackendError, match=message) as caught:
            train(bench, tmp_path, {4: doom})
    finally:
        over.set()
        hunters[0].join()
    assert events(tmp_path)[-1] == "failure"
    assert str(caught.value) in (tmp_path / "failure.txt").read_text()

    trainer.train(bench.settings(*WORKERS), tmp_path, resume=True)
    bench.assert_same(tmp_path, bench.whole())
    (resumed,) = events(tmp_path, "resume")
    assert resumed["step"] in (3, 4)


@pytest.mark.faults
def test_a_lost_node_is_lost_with_its_worker_alone(bench, tmp_path, events):
    """Two nodes on this machine; a process of its own, as it joins another cluster than these tests do."""
    program = Path(__file__).with_name("lose_a_node.py")
    overrides = [*bench.SMALL, "rollout.placement=ray", "rollout.num_workers=2", "trainer.doctor=false"]
    command = [sys.executable, str(program), str(tmp_path), *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    bench.assert_same(tmp_path, bench.whole())
    (lost,) = events(tmp_path, "worker_lost")
    assert lost["step"] == 1
    assert [event["task"] for event in events(tmp_path, "shard_retried")] == [lost["task"]]
    restarted = events(tmp_path, "worker_restarted")  # perhaps after the end of so short a run
    assert all(event["node"] != lost["node"] for event in restarted)


@pytest.mark.faults
@pytest.mark.parametrize(
    ("lost", "told"),
    [(1, r"^answers 3$"), (0, r"^after \d\.\d s the rollout workers are lost, .* continue with --resume")],
)
def test_a_lost_rank_takes_the_workers_with_it_only_if_it_is_the_main_one(lost, told):
    """The main rank has started the cluster, which ends with it."""
    ranks = start_ranks(2, Path(__file__).with_name("lose_a_rank.py"), lost)
    outputs = [process.communicate(timeout=240) for process in ranks]
    assert [process.returncode for process in ranks] == [0 if rank != lost else -9 for rank in range(2)], (
        outputs
    )
    assert re.search(told, outputs[1 - lost][0], re.MULTILINE), outputs
