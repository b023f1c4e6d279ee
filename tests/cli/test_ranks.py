"""The launchers' own commands, literally, on two CPU ranks."""

import json
import signal
import subprocess
import sys
import time

import pytest

from flowcorr.trackers.jsonl import read_metrics
from flowcorr.trainer import checkpoint
from tests.trainer.test_ranks import SMALL

TRAIN = ["-m", "flowcorr", "train", "tiny_jpeg_lora", *SMALL]
TORCHRUN = ["-m", "torch.distributed.run", "--nproc_per_node", "2"]
ACCELERATE = ["-m", "accelerate.commands.launch", "--num_processes", "2"]

pytestmark = pytest.mark.slow


def launch(*arguments, timeout=900):
    return subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=timeout, check=False
    )


@pytest.mark.parametrize("launcher", [TORCHRUN, [*ACCELERATE, "--multi_gpu"]], ids=["torchrun", "accelerate"])
def test_a_launcher_starts_ranks_that_are_one_run(launcher, tmp_path):
    done = launch(*launcher, *TRAIN, "sampling.cps_unscaled=true", "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step 1/2") == 1
    assert done.stdout.count("finished after") == 1
    last = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    assert last["actor/updates"] == 2
    assert done.stderr.count("warning: sampling.cps_unscaled=True") == 1


def test_more_ranks_than_prompts_are_an_error(tmp_path):
    done = launch(
        *TORCHRUN, *TRAIN, "rollout.prompts_per_step=1", "actor.mini_batches=1", "--out", tmp_path / "run"
    )
    assert done.returncode != 0
    assert "error: rollout.prompts_per_step=1" in done.stderr
    assert "rank 1: rollout.prompts_per_step=1" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_signal_to_the_launcher_saves_and_ends_all(tmp_path):
    command = [sys.executable, *TORCHRUN, *TRAIN, "trainer.total_steps=999", "--out", str(tmp_path / "run")]
    printed, at = [], time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout:
            printed.append(line)
            if line.startswith("step 2/"):
                process.send_signal(signal.SIGINT)
    assert process.returncode != 0
    output = "".join(printed)
    assert "interrupted after" in output, output
    assert ": flowcorr train" in output
    assert time.monotonic() - at < 600
    folder = tmp_path / "run"
    saved = checkpoint.load_latest(folder / "checkpoints")[1].step
    assert saved == read_metrics(folder / "metrics.jsonl")[-1]["step"]
    assert not (folder / "failure.txt").exists()
    kinds = [json.loads(line)["kind"] for line in (folder / "events.jsonl").read_text().splitlines()]
    assert kinds[-1] == "end"
