"""The trainer itself is killed, stopped and left without space: what it saved is whole, and it goes on from there."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
from ray_tasks import WORKERS

from flowcorr.processes import STOP_SIGNALS
from flowcorr.trackers.jsonl import read_metrics
from flowcorr.trainer import checkpoint
from tests.descendants import descendants, running
from tests.faults.die_while_saving import train_and_die
from tests.forks import exit_code

DIE = str(Path(__file__).with_name("die_while_saving.py"))
AHEAD = (*WORKERS, "rollout.max_staleness=1")


def steps(folder):
    metrics = folder / "metrics.jsonl"
    return [record["step"] for record in read_metrics(metrics)] if metrics.exists() else []


def kill_while_saving(bench, out, moment, step, *overrides):
    """Start the run in `out`, or go on with it, and let it be killed at a `moment` of writing a checkpoint."""
    resume = ["--resume"] if out.exists() else []
    arguments = ("train", "tiny_jpeg_lora", *bench.SMALL, *overrides, *resume, "--out", str(out))
    assert exit_code(train_and_die, moment, step, *arguments) == -signal.SIGKILL
    assert steps(out)[-1] == step


@pytest.mark.system
def test_killed_while_it_writes_a_checkpoint(bench, tmp_path, events):
    out = tmp_path / "run"
    kill_while_saving(bench, out, "before it is renamed", 4)
    assert list((out / "checkpoints").glob(".partial_step_000004"))
    bench.resume(out)
    bench.assert_same(out, bench.whole())
    (resumed,) = events(out, "resume")
    assert resumed["step"] in (2, 3)  # step 3 has a checkpoint where its evaluation is the best so far
    assert events(out)[:3] == ["start", "checkpoint", "checkpoint"]
    assert events(out)[-1] == "end"


@pytest.mark.faults
def test_killed_at_every_moment_of_writing_checkpoints(bench, tmp_path, events):
    out = tmp_path / "run"
    moments = (
        ("before its tensors", 2),
        ("before its manifest", 2),
        ("before old ones go", 4),
        ("before it is renamed", 6),
    )
    for moment, step in moments:
        kill_while_saving(bench, out, moment, step)
    bench.resume(out)
    bench.assert_same(out, bench.whole())
    assert [event["step"] for event in events(out, "resume")] == [0, 0, 4, 4]


@pytest.mark.faults
def test_killed_ahead_it_leaves_no_process_and_goes_on(bench, tmp_path, events, wait_for):
    out = tmp_path / "run"
    run = bench.start(out, *AHEAD, program=(DIE, "before it is renamed", "4"))
    wait_for(lambda: steps(out) or run.poll() is not None)
    family = descendants(run.pid)
    assert {"raylet", "gcs_server"} <= set(family.values())
    assert sum("ray::Flowcorr" in name for name in family.values()) == 5
    said, _ = run.communicate(timeout=240)
    assert run.returncode == -signal.SIGKILL, said
    others = [process for process, name in family.items() if "Agent" not in name]
    wait_for(lambda: not any(map(running, others)), 30, "the end of Ray's processes")
    bench.resume(out)
    bench.assert_same(out, bench.whole("rollout.staleness=1"))
    (resumed,) = events(out, "resume")
    assert resumed["step"] in (2, 3)  # step 3 has a checkpoint where its evaluation is the best so far
    # Ray's own agents first try for a minute to report that their node is gone.
    wait_for(lambda: not any(map(running, family)), 90, "the end of Ray's agents")


@pytest.mark.faults
@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_terminated_ahead_it_saves_and_leaves_no_process(bench, tmp_path, events, wait_for, number):
    out = tmp_path / "run"
    run = bench.start(out, *AHEAD)
    wait_for(lambda: len(steps(out)) > 2 or run.poll() is not None, 600)
    family = descendants(run.pid)
    assert sum("ray::Flowcorr" in name for name in family.values()) == 5
    os.killpg(run.pid, number)  # to Ray's processes too, as terminals, `timeout` and schedulers do
    said, _ = run.communicate(timeout=600)
    assert run.returncode == 128 + number, said
    assert ": flowcorr train" in said  # the command that resumes
    wait_for(lambda: not any(map(running, family)), 60, "the end of Ray's processes")
    assert "worker_lost" not in events(out)
    assert events(out, "end")[0]["status"] == "interrupted"
    # A thread tells of the signal, which may be a moment later.
    assert events(out).index("end") >= len(events(out)) - 2
    assert not (out / "failure.txt").exists()
    bench.resume(out)
    bench.assert_same(out, bench.whole("rollout.staleness=1"))
    (ended, _), (resumed,) = events(out, "end"), events(out, "resume")
    assert resumed["step"] == ended["step"] >= events(out, "signal")[0]["step"]


@pytest.mark.faults
def test_a_run_that_loses_its_own_node_saves_and_ends_soon(bench, tmp_path, events, wait_for):
    """Its raylet and its workers. Ray ends a process that uses the object store just then at once, others later."""
    out = tmp_path / "run"
    run = bench.start(out, *AHEAD)
    wait_for(lambda: steps(out) or run.poll() is not None)
    family = descendants(run.pid)
    begin = time.monotonic()
    for process, name in family.items():
        if name == "raylet" or "ray::Flowcorr" in name:
            process.kill()
    said, _ = run.communicate(timeout=120)
    assert run.returncode == 1, said
    assert time.monotonic() - begin < 60
    ended_by_ray = not (out / "failure.txt").exists()
    wait_for(lambda: not any(map(running, family)), 90, "the end of Ray's processes and agents")
    if not ended_by_ray:
        assert re.search(r"error: .*(rollout|reward) workers .*--resume", said), said
        assert events(out)[-1] == "failure"
        assert len(events(out, "workers_lost")) == 2  # of both pools
    assert events(out, "worker_restarted") == []
    assert checkpoint.load_latest(out / "checkpoints")[1].step == steps(out)[-1]
    bench.resume(out)
    bench.assert_same(out, bench.whole("rollout.staleness=1"))


@pytest.mark.faults
def test_a_full_disk(bench, mounted, events):
    """A checkpoint takes 0.3 MB; the ballast leaves room for that of step 2, and not for those of all steps."""
    out = mounted / "run"
    ballast = mounted / "ballast"
    ballast.write_bytes(bytes(4 * 2**20 - 1_000_000))
    run = bench.start(out, "trainer.keep_checkpoints=9")
    said, _ = run.communicate(timeout=120)
    assert run.returncode == 1, said
    assert str(out / "checkpoints") in said
    found = checkpoint.folders(out / "checkpoints")
    done = checkpoint.load(found[-1]).step
    assert done < 6
    assert list((out / "checkpoints").glob(".partial_*")) == []
    ballast.unlink()
    bench.resume(out)
    bench.assert_same(out, bench.whole("trainer.keep_checkpoints=9"))
    (failure,) = events(out, "failure")
    assert "CheckpointError" in failure["error"]
    assert [event["step"] for event in events(out, "resume")] == [done]
