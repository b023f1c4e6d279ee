"""A run that is resumed ends as one that was not interrupted."""

import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

from flowcorr import config, trainer
from flowcorr.actor import pass_bound
from flowcorr.errors import CheckpointError
from flowcorr.processes import STOP_SIGNALS, StopRequest
from flowcorr.trainer import checkpoint, state
from flowcorr.trainer.checkpoint import TrainingState
from flowcorr.trainer.events import read_events
from tests.trainer.runs import STALE, Recorder, assert_same_run, checkpoints, interrupt, records, small_config


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
    whole, killed = request.getfixturevalue(kind)
    settings = config.load(whole / "config.yaml")
    folder = shutil.copytree(killed, tmp_path / "a run")  # goes on after step 2
    recorder = Recorder(1, interrupt(number), phase="reward")
    handlers = [signal.getsignal(number) for number in STOP_SIGNALS]

    result = trainer.train(settings, folder, resume=True, observer=recorder)

    assert (result.status, result.signal, result.step) == ("interrupted", number, 3)
    assert recorder.results == [result]
    assert recorder.steps == [3]
    assert number.name in recorder.messages[0]
    assert checkpoints(folder)[-1] == "step_000003"
    assert handlers == [signal.getsignal(number) for number in STOP_SIGNALS]
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


TWO_STEPS = ("trainer.total_steps=2", "trainer.save_every=1", "trainer.eval_every=0")


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param(
            ("actor.optimizer=adamw_8bit", "model.lora.rank=48"), id="adam8bit", marks=pytest.mark.adam8bit
        ),
        pytest.param(("model.quantization=int8", *STALE), id="int8"),
        pytest.param(("model.quantization=nf4", *STALE), id="nf4", marks=pytest.mark.quantized),
    ],
)
def test_moments_or_a_base_of_few_bits_resume_as_they_were(keys, tmp_path):
    settings = small_config(*keys, *TWO_STEPS)
    trainer.train(settings, tmp_path / "whole")
    folder = shutil.copytree(tmp_path / "whole", tmp_path / "run")
    shutil.rmtree(folder / "checkpoints" / "step_000002")
    recorder = Recorder()
    trainer.train(settings, folder, resume=True, observer=recorder)
    assert recorder.steps == [2]
    assert_same_run(tmp_path / "whole", folder)


def when_saved(folder, step, then):
    """Send SIGTERM, wait until the step before the one in flight is saved for that, and do something."""

    def act():
        interrupt(signal.SIGTERM)()
        end = time.monotonic() + 60
        while f"step_{step:06d}" not in checkpoints(folder):
            assert time.monotonic() < end, "the step before the signal was not saved"
            time.sleep(0.001)
        then()

    return act


@pytest.mark.parametrize("kind", ["plain_runs", "stale_runs"])
@pytest.mark.parametrize("phase", ["rollout", "update"])
def test_killed_after_a_signal_a_run_loses_the_step_in_flight_alone(kind, phase, request, tmp_path):
    """As by a scheduler that does not wait until the step is done."""
    whole, begun = request.getfixturevalue(kind)
    # Nothing is deleted while the folder is copied.
    settings = config.load(whole / "config.yaml", ["trainer.save_every=99", "trainer.keep_checkpoints=9"])
    folder, killed = shutil.copytree(begun, tmp_path / "run"), tmp_path / "killed"
    recorder = Recorder(2, when_saved(folder, 3, lambda: shutil.copytree(folder, killed)), phase=phase)
    trainer.train(settings, folder, resume=True, observer=recorder)
    assert recorder.steps == [3, 4]
    trainer.train(settings, killed, resume=True, observer=(resumed := Recorder()))
    assert resumed.steps == [4]
    assert records(whole) == records(killed)
    ours, theirs = (checkpoint.load_latest(path / "checkpoints")[1] for path in (killed, whole))
    for name, value in theirs.tensors.items():
        torch.testing.assert_close(ours.tensors[name], value, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_observer_that_cannot_tell_of_a_signal_keeps_no_state_from_being_saved(plain_runs, tmp_path):
    class Mute(Recorder):
        def on_message(self, text):
            raise ValueError("I/O operation on closed file")

    settings, folder = small_config("trainer.save_every=99"), tmp_path / "run"
    shutil.copytree(plain_runs[1], folder)
    seen = []
    then = when_saved(folder, 3, lambda: seen.extend(checkpoints(folder)))
    trainer.train(settings, folder, resume=True, observer=Mute(2, then, phase="update"))
    assert "step_000003" in seen


def test_a_step_that_fails_after_a_signal_is_given_up(plain_runs, fragile, tmp_path):
    """As when the signal goes to the whole process group, and ends what the step needs."""
    overrides, flag = fragile
    settings, folder = small_config(overrides(), "trainer.save_every=99"), tmp_path / "run"
    result = trainer.train(
        settings, folder, observer=Recorder(4, when_saved(folder, 3, flag.touch), phase="rollout")
    )
    assert (result.status, result.signal, result.step) == ("interrupted", signal.SIGTERM, 3)
    assert not (folder / "failure.txt").exists()
    kinds = [event["kind"] for event in read_events(folder / "events.jsonl")]
    assert kinds[-5:] == ["signal", "checkpoint", "reward_failed", "given_up", "end"]
    flag.unlink()
    trainer.train(settings, folder, resume=True)
    assert records(folder) == records(plain_runs[0])


def test_a_ctrl_c_that_is_held_saves(tmp_path):
    def hold():
        for _ in range(20):
            interrupt(signal.SIGINT)()

    settings = small_config("trainer.save_every=99", "trainer.eval_every=0")
    result = trainer.train(settings, tmp_path, observer=Recorder(2, hold, phase="reward"))
    assert (result.status, result.step) == ("interrupted", 2)
    assert checkpoints(tmp_path) == ["step_000000", "step_000001", "step_000002"]


def test_another_ctrl_c_later_stops_at_once_without_the_step_in_flight(tmp_path, monkeypatch):
    monkeypatch.setattr("flowcorr.trainer.signals.REPEAT", 0.2)

    def twice():
        interrupt(signal.SIGINT)()
        while not recorder.messages:
            time.sleep(0.05)
        time.sleep(0.5)  # beyond REPEAT
        interrupt(signal.SIGINT)()
        time.sleep(60)

    settings = small_config("trainer.save_every=99", "trainer.eval_every=0")
    recorder = Recorder(2, twice, phase="reward")
    with pytest.raises(KeyboardInterrupt):
        trainer.train(settings, tmp_path, observer=recorder)
    assert recorder.steps == [1]
    assert checkpoints(tmp_path) == ["step_000000", "step_000001"]
    first, second = recorder.messages
    assert first.startswith("SIGINT: ")
    assert second.startswith("SIGINT again")
    assert ": flowcorr train" in second  # the command that resumes


class Interrupting:
    """A reward in whose construction the run is told to end."""

    def __init__(self):
        interrupt(signal.SIGUSR1)()

    def __call__(self, images, prompts):
        raise AssertionError("the run has begun")


def test_a_signal_before_the_first_step_ends_the_run_and_leaves_its_folder_free(tmp_path):
    interrupted = small_config("reward.terms=[{name: 'tests.trainer.test_state:Interrupting'}]")
    with pytest.raises(StopRequest, match="SIGUSR1"):
        trainer.train(interrupted, tmp_path)
    assert not (tmp_path / "failure.txt").exists()
    assert trainer.train(small_config("trainer.total_steps=1"), tmp_path).step == 1


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


def test_a_run_that_is_told_to_end_where_it_was_interrupted_is_evaluated_there(tmp_path):
    longer, settings = (small_config("trainer.eval_every=3", f"trainer.total_steps={n}") for n in (3, 2))
    interrupted, whole = tmp_path / "interrupted", tmp_path / "whole"
    trainer.train(longer, interrupted, observer=Recorder(2, interrupt(signal.SIGTERM)))
    assert "eval/reward" not in records(interrupted)[-1]
    recorder = Recorder()
    result = trainer.train(settings, interrupted, resume=True, observer=recorder)
    assert (result.status, recorder.steps, list(recorder.evals)) == ("finished", [], [2])
    trainer.train(settings, whole)
    assert checkpoint.load_latest(interrupted / "checkpoints")[1].facts["best"][0] == 2
    assert_same_run(whole, interrupted)


def test_a_damaged_checkpoint_is_passed_over_and_named(plain_runs, finished, caplog):
    newest = finished / "checkpoints" / "step_000004" / "state.safetensors"
    newest.write_bytes(newest.read_bytes()[:-100])
    leftover = finished / "checkpoints" / ".partial_step_000006"
    leftover.mkdir()
    recorder = Recorder()
    trainer.train(small_config(), finished, resume=True, observer=recorder)
    assert recorder.steps == [3, 4]
    assert "step_000004 is damaged: state.safetensors" in caplog.text
    assert "step_000002" in caplog.text.partition("step_000004")[2]
    assert not leftover.exists()
    assert_same_run(plain_runs[0], finished)


def test_a_smaller_micro_batch_may_continue_a_run(tmp_path):
    trainer.train(small_config("trainer.total_steps=1"), tmp_path)
    smaller = small_config("trainer.total_steps=2", "actor.micro_batch_size=2", "actor.fold_steps=false")
    assert trainer.train(smaller, tmp_path, resume=True).step == 2


def test_a_resumed_run_keeps_the_bound_of_its_passes(tmp_path, monkeypatch):
    measured = []
    monkeypatch.setattr(
        pass_bound, "_largest_pass", lambda *_: measured.append(len(measured) + 3) or measured[-1]
    )
    trainer.train(small_config("trainer.total_steps=1"), tmp_path)
    assert checkpoint.load_latest(tmp_path / "checkpoints")[1].facts["pass_rows"] == 3
    trainer.train(small_config("trainer.total_steps=2"), tmp_path, resume=True)
    assert checkpoint.load_latest(tmp_path / "checkpoints")[1].facts["pass_rows"] == 3
    assert measured == [3]


@pytest.mark.slow
@pytest.mark.parametrize("number", [*STOP_SIGNALS, signal.SIGKILL])
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
    expected = 128 + number if number in STOP_SIGNALS else -number
    assert process.returncode == expected, "".join(printed)
    trainer.train(small_config(), folder, resume=True)
    assert_same_run(plain_runs[0], folder)


DRAWN = """
import random
import numpy as np
import torch

def reward(images, prompts):
    return [random.random() + np.random.rand() + float(torch.rand(())) for _ in prompts]
"""


def test_a_reward_that_draws_gives_the_same_numbers_again_and_after_a_resume(tmp_path, monkeypatch):
    (tmp_path / "drawn_reward.py").write_text(DRAWN)
    monkeypatch.syspath_prepend(tmp_path)
    terms = ("reward.terms=[{name: drawn_reward:reward}]", "trainer.best_metric=eval/reward")
    runs = {}
    for name, steps in (("whole", [2]), ("resumed", [1, 2])):
        for total in steps:
            settings = small_config(*terms, f"trainer.total_steps={total}")
            trainer.train(settings, tmp_path / name, resume=total != steps[0])
        runs[name] = records(tmp_path / name)
    whole = [record["reward/mean"] for record in runs["whole"] if record["step"]]
    assert len(set(whole)) == 2
    assert [record["reward/mean"] for record in runs["resumed"] if record["step"]] == whole
    assert len({record["eval/reward"] for record in runs["whole"] if "eval/reward" in record}) == 1


@pytest.mark.filterwarnings("ignore:data.num_train=5 has no effect")
def test_other_prompts_end_a_resume(tmp_path):
    words = [f"word{place}" for place in range(40)]
    (tmp_path / "words.txt").write_text("\n".join(words))
    settings = small_config(f"data.path={tmp_path / 'words.txt'}", "trainer.total_steps=1")
    trainer.train(settings, tmp_path / "run")
    (tmp_path / "words.txt").write_text("\n".join(words[::-1]))
    with pytest.raises(CheckpointError, match=r"data\.path='.*words\.txt' .*step_000001 "):
        trainer.train(settings, tmp_path / "run", resume=True)


def _before(total_steps):
    """The checkpoint after 8 updates of a run of `total_steps`."""
    facts = {"config": {"trainer": {"total_steps": total_steps}}, "version": 8}
    return TrainingState(step=4, tensors={}, facts=facts)


def test_a_learning_rate_that_jumps_is_named_with_both_rates(caplog):
    settings = small_config(
        "actor.lr_schedule=linear", "actor.lr=0.1", "actor.mini_batches=2", "trainer.total_steps=8"
    )
    caplog.clear()  # loading speaks of other keys
    state.warn_of_another_schedule(settings, _before(4))
    assert caplog.messages == [
        "trainer.total_steps was 4 and is now 8, and actor.lr_schedule=linear falls over all steps: the learning rate "
        "goes on at 0.05, not at 0"
    ]


@pytest.mark.parametrize(
    ("overrides", "total_steps"), [((), 2), (("actor.lr_schedule=cosine",), 4)], ids=["constant", "same"]
)
def test_a_learning_rate_that_goes_on_is_not_mentioned(overrides, total_steps, caplog):
    settings = small_config(*overrides)
    caplog.clear()  # loading speaks of other keys
    state.warn_of_another_schedule(settings, _before(total_steps))
    assert caplog.messages == []
