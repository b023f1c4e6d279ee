"""The trainer itself is killed, stopped and left without space: what it saved is whole, and it goes on from there."""

import signal
from pathlib import Path

import psutil
import pytest

from flowcorr.trackers.jsonl import read_metrics
from flowcorr.trainer import checkpoint

DIE = str(Path(__file__).with_name("die_while_saving.py"))
AHEAD = (
    "rollout.placement=ray",
    "rollout.num_workers=2",
    "rollout.max_staleness=1",
    "reward.placement=ray",
)


def steps(folder):
    metrics = folder / "metrics.jsonl"
    return [record["step"] for record in read_metrics(metrics)] if metrics.exists() else []


@pytest.mark.parametrize(
    ("moment", "found"),
    [
        pytest.param("before its tensors", 2, marks=pytest.mark.faults),
        pytest.param("before its manifest", 2, marks=pytest.mark.faults),
        ("before it is renamed", 2),
        pytest.param("before old ones go", 4, marks=pytest.mark.faults),
    ],
)
def test_killed_while_it_writes_a_checkpoint(bench, tmp_path, events, moment, found):
    out = tmp_path / "run"
    run = bench.start(out, program=(DIE, moment, "4"))
    assert run.wait(timeout=120) == -signal.SIGKILL, run.stdout.read()
    run.stdout.close()
    assert [path.name for path in checkpoint.folders(out / "checkpoints")][-1] == f"step_{found:06d}"
    assert steps(out)[-1] == 4
    bench.resume(out)
    bench.assert_same(out, bench.whole())
    assert [event["step"] for event in events(out, "resume")] == [found]
    assert events(out)[0] == "start"
    assert events(out)[-1] == "end"


@pytest.mark.faults
def test_killed_ahead_it_leaves_no_process_and_goes_on(bench, tmp_path, events, wait_for, family_of):
    out = tmp_path / "run"
    run = bench.start(out, *AHEAD, program=(DIE, "before it is renamed", "4"))
    wait_for(lambda: len(steps(out)) > 1 or run.poll() is not None)
    family = family_of(run.pid)
    names = [process.name() for process in family]
    assert {"raylet", "gcs_server"} <= set(names)
    assert sum("_Host" in name for name in names) == 3
    assert run.wait(timeout=120) == -signal.SIGKILL, run.stdout.read()
    run.stdout.close()
    others = [process for process in family if "Agent" not in process.name()]
    wait_for(lambda: not any(map(running, others)), 30, "the end of Ray's processes")
    bench.resume(out)
    bench.assert_same(out, bench.whole("rollout.staleness=1"))
    assert [event["step"] for event in events(out, "resume")] == [2]
    # Ray's own agents first try for a minute to report that their node is gone.
    wait_for(lambda: not any(map(running, family)), 90, "the end of Ray's agents")


@pytest.mark.faults
def test_terminated_ahead_it_saves_and_leaves_no_process(bench, tmp_path, events, wait_for, family_of):
    out = tmp_path / "run"
    run = bench.start(out, *AHEAD)
    wait_for(lambda: len(steps(out)) > 2 or run.poll() is not None)
    family = family_of(run.pid)
    assert sum("_Host" in process.name() for process in family) == 3
    run.send_signal(signal.SIGTERM)
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGTERM, said
    assert "resume with: flowcorr train" in said
    wait_for(lambda: not any(map(running, family)), 10, "the end of Ray's processes")
    assert events(out)[-3:] == ["signal", "checkpoint", "end"] or events(out)[-2:] == ["signal", "end"]
    assert events(out, "end")[0]["status"] == "interrupted"
    assert not (out / "failure.txt").exists()
    bench.resume(out)
    bench.assert_same(out, bench.whole("rollout.staleness=1"))
    assert [event["step"] for event in events(out, "resume")] == [events(out, "signal")[0]["step"] + 1]


def running(process):
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.mark.faults
def test_a_full_disk(bench, mounted, events):
    """A checkpoint takes 0.6 MB; the ballast leaves room for what follows step 2, and not for that of step 4."""
    out = mounted / "run"
    ballast = mounted / "ballast"
    ballast.write_bytes(bytes(4 * 2**20 - 1_500_000))
    run = bench.start(out, "trainer.keep_checkpoints=9")
    said, _ = run.communicate(timeout=120)
    assert run.returncode == 1, said
    assert "could not be written" in said
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


@pytest.mark.faults
def test_a_kill_at_any_moment(bench, tmp_path, events, wait_for):
    """Not at a chosen one: as soon as each second step is logged, whatever it does just then."""
    out = tmp_path / "run"
    for number in (2, 4):
        program = ("-m", "flowcorr")
        run = bench.start(out, *(["--resume"] if out.exists() else []), program=program)
        wait_for(lambda: number in steps(out) or run.poll() is not None)  # noqa: B023
        run.send_signal(signal.SIGKILL)
        run.communicate(timeout=30)
    bench.resume(out)
    bench.assert_same(out, bench.whole())
    assert events(out).count("end") >= 1
    assert events(out)[0] == "start"
