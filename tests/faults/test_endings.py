"""Runs that are ended at random moments: all go on to the bits of a run that was not, and lose one step at most."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

import flowcorr
from flowcorr.processes import STOP_SIGNALS
from flowcorr.trackers.jsonl import read_metrics
from flowcorr.trainer import checkpoint
from tests.faults.conftest import run_command
from tests.forks import FORKS

ONLY_ENDINGS_SAVE = ("trainer.save_every=99",)
WAYS = {number.name: (number,) for number in STOP_SIGNALS} | {
    "held SIGINT": (signal.SIGINT, signal.SIGINT),
    "SIGKILL": (signal.SIGKILL,),
}
PAGE = Path(flowcorr.__file__).parent / "trainer" / "README.md"


def records(folder):
    metrics = folder / "metrics.jsonl"
    return read_metrics(metrics) if metrics.exists() else []


def last_step(folder):
    return records(folder)[-1]["step"] if records(folder) else -1


def end(send, folder, way, seed, wait_for):
    """End a run at a random moment of a random step; the number of steps that were done before."""
    draw = random.Random(f"{way} {seed}")
    step = draw.randint(1, 3)
    wait_for(lambda: last_step(folder) >= step, 600)
    time.sleep(draw.uniform(0, records(folder)[-1]["timing/step"]))
    done = last_step(folder)
    for number in WAYS[way]:
        send(number)
        time.sleep(0.05)
    return done


def check_ending(way, code, folder, done):
    number = WAYS[way][0]
    if number == signal.SIGKILL:
        assert code == -signal.SIGKILL
        return
    assert code == 128 + number
    saved = checkpoint.load_latest(folder / "checkpoints")[1].step
    assert saved == last_step(folder) >= done  # the step in flight is finished
    assert not (folder / "failure.txt").exists()


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("way", WAYS)
def test_ended_at_a_random_moment_a_run_goes_on_as_if_it_had_not(bench, tmp_path, way, seed, wait_for):
    out = tmp_path / "run"
    arguments = ["train", "tiny_jpeg_lora", *bench.SMALL, *ONLY_ENDINGS_SAVE, "--out", str(out)]
    process = FORKS.Process(target=run_command, args=(arguments,))
    process.start()
    done = end(lambda number: os.kill(process.pid, number), out, way, seed, wait_for)
    process.join(240)
    check_ending(way, process.exitcode, out, done)
    bench.resume(out)
    bench.assert_same(out, bench.whole(*ONLY_ENDINGS_SAVE))


@pytest.mark.faults
@pytest.mark.vllm_omni
@pytest.mark.skipif(find_spec("vllm_omni") is None, reason="needs vllm-omni")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", WAYS)
def test_ended_with_all_of_its_processes_a_run_on_the_engine_goes_on(bench, tmp_path, way, wait_for):
    """SIGTERM ends the engine's worker too, and with it the step in flight; its state before is saved."""
    out = tmp_path / "run"
    keys = ("rollout.name=vllm_omni", "trainer.doctor=false", *ONLY_ENDINGS_SAVE)
    process = bench.start(out, *keys)
    done = end(lambda number: os.killpg(process.pid, number), out, way, 0, wait_for)
    said, _ = process.communicate(timeout=600)
    left = marked()
    check_ending(way, process.returncode, out, done)
    assert bool(left) == (way == "SIGKILL"), said
    bench.resume(out)
    assert not marked()
    bench.assert_same(out, bench.whole(*keys))


def marked():
    """The shared memory of flowcorr's processes."""
    return [path.name for path in Path("/dev/shm").glob("*flowcorr-*")]


@pytest.mark.faults
def test_the_end_of_a_terminal_saves(bench, tmp_path, wait_for):
    """Its processes get SIGHUP, and nothing that they print goes anywhere."""
    out = tmp_path / "run"
    ours, theirs = os.openpty()
    take = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
    train = ["-m", "flowcorr", "train", "tiny_jpeg_lora", *bench.SMALL, *ONLY_ENDINGS_SAVE, "--out", str(out)]
    process = subprocess.Popen(
        [sys.executable, "-c", take, sys.executable, *train],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    os.set_blocking(ours, False)
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        wait_for(lambda: [terminal.read(1 << 16)] and last_step(out) >= 2, 600)
    assert process.wait(240) == 128 + signal.SIGHUP
    check_ending("SIGHUP", 128 + signal.SIGHUP, out, 2)
    bench.resume(out)
    bench.assert_same(out, bench.whole(*ONLY_ENDINGS_SAVE))


@pytest.mark.faults
def test_the_slurm_job_of_the_page_goes_on_by_itself(bench, tmp_path, wait_for):
    """With Slurm's own command and the recipe replaced."""
    (job,) = (
        text for text in re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.DOTALL) if "#SBATCH" in text
    )
    keys = " ".join(f"'{key}'" for key in (*bench.SMALL, *ONLY_ENDINGS_SAVE))
    commands = {
        "flowcorr": f'shift 2; exec {sys.executable} -m flowcorr train tiny_jpeg_lora {keys} "$@"',
        "scontrol": 'echo "$@" >> scontrol.log',
    }
    for name, text in commands.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH")])),
        "SLURM_JOB_ID": "42",
    }
    out = tmp_path / "runs" / "mine"
    codes = []
    for step in (1, 3, 99):
        process = subprocess.Popen(["bash", "-c", job], cwd=tmp_path, env=environment)
        if step < 99:
            wait_for(lambda step=step: last_step(out) >= step, 600)
            process.send_signal(signal.SIGUSR1)
        codes.append(process.wait(600))
    assert codes == [75, 75, 0]
    assert (tmp_path / "scontrol.log").read_text() == "requeue 42\n" * 2
    bench.assert_same(out, bench.whole(*ONLY_ENDINGS_SAVE))
