"""A run that is resumed ends as one that was not interrupted."""

import shlex
import shutil
import signal
import subprocess
import sys

import pytest

from flowcorr import config, trainer
from flowcorr.errors import CheckpointError
from tests.trainer.runs import Recorder, assert_same_run, checkpoints, interrupt, records, small_config


@pytest.mark.parametrize("kind", ["plain_runs", "stale_runs"])
def test_resumed_after_a_kill_is_uninterrupted(kind, request, tmp_path):
    whole, killed = request.getfixturevalue(kind)
    assert checkpoints(killed)[-1] == "step_000002"
    assert records(killed)[-1]["step"] == 3
    folder = shutil.copytree(killed, tmp_path / "run")
    recorder = Recorder()
    trainer.train(config.load(folder / "config.yaml"), folder, resume=True, observer=recorder)
    assert recorder.steps == [3, 4]
    assert_same_run(whole, folder)


@pytest.mark.parametrize(("kind", "number"), [("plain_runs", signal.SIGINT), ("stale_runs", signal.SIGTERM)])
def test_resumed_after_a_signal_is_uninterrupted(kind, number, request, tmp_path):
    whole, _ = request.getfixturevalue(kind)
    settings = config.load(whole / "config.yaml")
    folder = tmp_path / "a run"
    recorder = Recorder(3, interrupt(number), phase="reward")
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

    result = trainer.train(settings, folder, observer=recorder)

    assert (result.status, result.signal, result.step) == ("interrupted", number, 3)
    assert recorder.results == [result]
    assert recorder.steps == [1, 2, 3]
    assert number.name in recorder.messages[0]
    assert checkpoints(folder)[-1] == "step_000003"
    assert handlers == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
    assert shlex.split(result.resume_command) == [
        "flowcorr",
        "train",
        str(folder / "config.yaml"),
        "--resume",
        "--out",
        str(folder),
    ]
    assert trainer.train(settings, folder, resume=True).status == "finished"
    assert_same_run(whole, folder)


@pytest.mark.adam8bit
def test_moments_in_8_bits_resume_as_they_were(tmp_path):
    keys = ("trainer.total_steps=2", "trainer.save_every=1", "trainer.eval_every=0")
    settings = small_config("actor.optimizer=adamw_8bit", "model.lora.rank=48", *keys)
    trainer.train(settings, tmp_path / "whole")
    folder = shutil.copytree(tmp_path / "whole", tmp_path / "run")
    shutil.rmtree(folder / "checkpoints" / "step_000002")
    recorder = Recorder()
    trainer.train(settings, folder, resume=True, observer=recorder)
    assert recorder.steps == [2]
    assert_same_run(tmp_path / "whole", folder)


def test_a_second_signal_stops_at_once(tmp_path):
    def twice():
        interrupt(signal.SIGINT)()
        interrupt(signal.SIGINT)()

    recorder = Recorder(1, twice, phase="reward")
    with pytest.raises(KeyboardInterrupt):
        trainer.train(small_config(), tmp_path, observer=recorder)
    assert recorder.steps == []
    assert checkpoints(tmp_path) == ["step_000000"]


def test_resume_with_more_steps_trains_on(finished):
    recorder = Recorder()
    result = trainer.train(small_config("trainer.total_steps=5"), finished, resume=True, observer=recorder)
    assert (recorder.steps, result.step) == ([5], 5)
    assert [record["step"] for record in records(finished)] == [0, 1, 2, 3, 4, 5]


def test_resume_of_a_finished_run_evaluates_and_changes_nothing(plain_runs, finished):
    recorder = Recorder()
    result = trainer.train(small_config(), finished, resume=True, observer=recorder)
    assert (result.status, result.step, recorder.steps) == ("finished", 4, [])
    assert result.metrics["eval/reward"] == records(finished)[-1]["eval/reward"]
    assert_same_run(plain_runs[0], finished)


def test_a_damaged_checkpoint_is_passed_over_and_named(plain_runs, finished, caplog):
    newest = finished / "checkpoints" / "step_000004" / "state.safetensors"
    newest.write_bytes(newest.read_bytes()[:-100])
    leftover = finished / "checkpoints" / ".partial_step_000006"
    leftover.mkdir()
    recorder = Recorder()
    trainer.train(small_config(), finished, resume=True, observer=recorder)
    assert recorder.steps == [3, 4]
    assert "step_000004 is damaged: state.safetensors does not match" in caplog.text
    assert "step_000002 is used instead" in caplog.text
    assert not leftover.exists()
    assert_same_run(plain_runs[0], finished)


def test_without_an_intact_checkpoint_the_run_stops(finished):
    for folder in (finished / "checkpoints").iterdir():
        (folder / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is intact.*step_000004.*step_000002"):
        trainer.train(small_config(), finished, resume=True)
    assert "no checkpoint in" in (finished / "failure.txt").read_text()
    assert checkpoints(finished)[-1] == "step_000004"


def test_a_smaller_micro_batch_may_continue_a_run(tmp_path):
    trainer.train(small_config("trainer.total_steps=1"), tmp_path)
    smaller = small_config("trainer.total_steps=2", "actor.micro_batch_size=2")
    assert trainer.train(smaller, tmp_path, resume=True).step == 2


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_process_can_be_resumed(number, plain_runs, tmp_path):
    folder = tmp_path / "run"
    command = [
        sys.executable,
        "-m",
        "flowcorr",
        "train",
        str(plain_runs[0] / "config.yaml"),
        "--out",
        str(folder),
    ]
    printed, stopped = [], False
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout:
            printed.append(line)
            if line.startswith("step 2/") and not stopped:
                process.send_signal(number)
                stopped = True
    expected = 128 + number if number == signal.SIGTERM else -number
    assert process.returncode == expected, "".join(printed)
    trainer.train(small_config(), folder, resume=True)
    assert_same_run(plain_runs[0], folder, but=["rng/cpu"])
