"""Runs that fail: what is saved, and what the folder says."""

import math
import re
import resource
import signal
from dataclasses import replace

import pytest
import torch

from flowcorr import dumps, trainer
from flowcorr.errors import BackendError, BatchError, CheckpointError, ConfigError, MissingExtraError
from flowcorr.trackers import TRACKERS, JsonlTracker
from flowcorr.trainer import checkpoint, run_folder
from flowcorr.trainer.events import read_events
from tests.trainer.runs import Recorder, checkpoints, interrupt, records, small_config

TWO_STEPS = ("trainer.total_steps=2", "trainer.save_every=99")


def test_a_full_disk_stops_the_run_with_its_last_checkpoint_intact(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    recorder = Recorder(
        3, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, limits[1])), phase="rollout"
    )
    try:
        with pytest.raises(CheckpointError, match=r"step 4 .*step_000002\."):
            trainer.train(small_config(), tmp_path, observer=recorder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert records(tmp_path)[-1]["step"] == 4
    assert checkpoint.load_latest(tmp_path / "checkpoints")[1].step == 2
    assert not list((tmp_path / "checkpoints").glob(".partial_*"))
    assert "step 4" in (tmp_path / "failure.txt").read_text()


class CountingTracker(JsonlTracker):
    """Counts what is asked of it, beside the `metrics.jsonl` of another."""

    calls: list[str]

    def start(self, run_name, out_dir, *, resume_step=None):
        self.calls.append("start")

    def log(self, metrics, step):
        self.calls.append(f"log {step}")

    def finish(self, ending):
        self.calls.append(ending)


def test_a_failing_reward_saves_what_came_before_it(plain_runs, fragile, tmp_path, monkeypatch):
    overrides, flag = fragile
    calls = []
    monkeypatch.setitem(TRACKERS, "counting", CountingTracker)
    monkeypatch.setattr(CountingTracker, "calls", calls, raising=False)
    settings = small_config(overrides(), "trainer.trackers=[counting]", "trainer.total_steps=2")
    folder = tmp_path / "run"
    with pytest.raises(BackendError, match=r"Fragile .*sample 0 .*RuntimeError: ") as caught:
        trainer.train(settings, folder, observer=Recorder(2, flag.touch, phase="rollout"))
    assert calls == ["start", "log 0", "log 1", "failed"]
    assert str(caught.value) in (folder / "failure.txt").read_text()
    assert checkpoints(folder)[-1] == "step_000001"

    flag.unlink()
    recorder = Recorder()
    trainer.train(settings, folder, resume=True, observer=recorder)
    assert calls[-1] == "finished"
    assert recorder.steps == [2]
    assert not (folder / "failure.txt").exists()
    assert records(folder) == records(plain_runs[0])[:3]  # the same reward, had it not failed
    ours, theirs = (
        checkpoint.load(checkpoint.folder_of(path / "checkpoints", 2)) for path in (folder, plain_runs[0])
    )
    for name, value in theirs.tensors.items():
        torch.testing.assert_close(ours.tensors[name], value, rtol=0, atol=0)
    for path in (folder / "checkpoints").rglob("*"):
        assert path.is_dir() or b"s3cret" not in path.read_bytes(), path


def test_a_reward_that_fails_at_an_evaluation_costs_no_training_step(plain_runs, fragile, tmp_path):
    overrides, flag = fragile
    settings = small_config(overrides(), "trainer.save_every=99", "trainer.total_steps=3")
    folder = tmp_path / "run"
    with pytest.raises(BackendError, match=r"Fragile .*sample 0 .*RuntimeError: "):
        trainer.train(settings, folder, observer=Recorder(2, flag.touch))
    flag.unlink()
    trainer.train(settings, folder, resume=True, observer=(recorder := Recorder()))
    assert recorder.steps == [3]
    assert records(folder)[:3] == records(plain_runs[0])[:3]


def test_a_reward_that_exits_fails_the_run(plain_runs, fragile, tmp_path):
    overrides, flag = fragile
    settings = small_config(overrides(exits=True), *TWO_STEPS)
    folder = tmp_path / "run"
    with pytest.raises(BackendError, match=r"reward Fragile raised SystemExit\(0\)") as caught:
        trainer.train(settings, folder, observer=Recorder(1, flag.touch))
    assert str(caught.value) in (folder / "failure.txt").read_text()
    kinds = [event["kind"] for event in read_events(folder / "events.jsonl")]
    assert kinds[-3:] == ["reward_failed", "checkpoint", "failure"]
    flag.unlink()
    trainer.train(settings, folder, resume=True, observer=(recorder := Recorder()))
    assert recorder.steps == [2]
    assert records(folder) == records(plain_runs[0])[:3]


@pytest.mark.parametrize("error", [SystemExit(0), GeneratorExit()])
def test_a_run_that_other_code_exits_has_failed(error, tmp_path):
    def leave():
        raise error

    with pytest.raises(BackendError, match=re.escape(repr(error))):
        trainer.train(small_config(), tmp_path, observer=Recorder(1, leave, phase="update"))
    assert type(error).__name__ in (tmp_path / "failure.txt").read_text()
    assert read_events(tmp_path / "events.jsonl")[-1]["kind"] == "failure"


@pytest.mark.parametrize(
    ("step", "error"),
    [(1, BackendError), (2, BatchError), (2, RuntimeError)],  # the second is evaluated
)
def test_a_step_that_cannot_be_shown_is_kept(plain_runs, tmp_path, step, error):
    def fail():
        raise error("stdout=closed")

    total = f"trainer.total_steps={step + 1}"
    settings = small_config("trainer.save_every=99", "trainer.dump_log_probs=true", total)
    with pytest.raises(error, match="stdout=closed"):
        trainer.train(settings, tmp_path, observer=Recorder(step, fail))
    trainer.train(settings, tmp_path, resume=True, observer=(recorder := Recorder()))
    assert recorder.steps == [step + 1]
    assert list(dumps.files(tmp_path)) == list(range(1, step + 2))
    assert records(tmp_path)[: step + 1] == records(plain_runs[0])[: step + 1]


def test_trackers_are_told_of_a_signal(tmp_path, monkeypatch):
    monkeypatch.setitem(TRACKERS, "counting", CountingTracker)
    monkeypatch.setattr(CountingTracker, "calls", calls := [], raising=False)
    settings = small_config(*TWO_STEPS, "trainer.trackers=[counting]")
    trainer.train(settings, tmp_path, observer=Recorder(1, interrupt(signal.SIGTERM)))
    assert calls == ["start", "log 0", "log 1", "interrupted"]


class BrokenTracker(CountingTracker):
    """Fails at the first step, before another tracker gets its record."""

    def log(self, metrics, step):
        if step == 1:
            raise KeyError("no such metric")


def test_a_tracker_that_fails_costs_that_tracker_alone(plain_runs, tmp_path, monkeypatch):
    monkeypatch.setitem(TRACKERS, "broken", BrokenTracker)
    monkeypatch.setitem(TRACKERS, "counting", CountingTracker)
    monkeypatch.setattr(CountingTracker, "calls", calls := [], raising=False)
    settings = small_config(*TWO_STEPS, "trainer.trackers=[broken, counting]")
    result = trainer.train(settings, tmp_path, observer=(recorder := Recorder()))
    assert (result.status, recorder.steps) == ("finished", [1, 2])
    assert [call for call in calls if call.startswith("log")] == ["log 0", "log 1", "log 2"]
    assert records(tmp_path) == records(plain_runs[0])[:3]
    (message,) = recorder.messages
    assert "broken" in message
    assert "no such metric" in message
    (event,) = [e for e in read_events(tmp_path / "events.jsonl") if e["kind"] == "tracker_failed"]
    assert (event["step"], event["says"]) == (1, message)


class Talker(CountingTracker):
    """Says what it was asked as it finishes, as the trackers of services do, and takes Ctrl-C for itself."""

    def start(self, run_name, out_dir, *, resume_step=None):
        super().start(run_name, out_dir, resume_step=resume_step)
        signal.signal(signal.SIGINT, lambda *_: self.calls.append("took the signal"))


def test_the_last_word_is_the_runs(tmp_path, monkeypatch):
    """How to resume stands below the summaries that trackers print; a signal is the run's, and costs no step."""
    monkeypatch.setitem(TRACKERS, "talker", Talker)
    monkeypatch.setattr(CountingTracker, "calls", calls := [], raising=False)
    recorder = Recorder(1, interrupt(signal.SIGINT))
    monkeypatch.setattr(recorder, "on_finish", lambda result: calls.append(result.resume_command))
    settings = small_config(*TWO_STEPS, "trainer.trackers=[talker]")
    trainer.train(settings, tmp_path, observer=recorder)
    assert calls == ["start", "log 0", "log 1", "interrupted", run_folder.resume_command(tmp_path)]


class Pictures(CountingTracker):
    """Keeps the pictures that it gets."""

    def log_images(self, images, step):
        self.calls.append(
            (step, {name: [picture.size for picture in group] for name, group in images.items()})
        )


def test_trackers_get_the_images_of_an_evaluation(tmp_path, monkeypatch):
    monkeypatch.setitem(TRACKERS, "pictures", Pictures)
    monkeypatch.setattr(CountingTracker, "calls", calls := [], raising=False)
    trainer.train(
        small_config(
            *TWO_STEPS, "trainer.trackers=[pictures]", "trainer.image_every=2", "data.num_heldout=20"
        ),
        tmp_path,
    )
    logged = [call for call in calls if isinstance(call, tuple)]
    first = [(128, 64 + 18)] * 16  # of 20 held-out images of 16 x 32 pixels, enlarged and labelled
    assert logged[0] == (0, {"eval/images": first})
    assert logged[1][0] == 2
    assert logged[1:] == [(2, {"eval/images": first}), (2, {"rollout": [(4 * 128 + 3 * 4, 64 + 18)]})]
    names = {path.name for path in (tmp_path / "images").iterdir()}
    assert names == {"eval_before.png", "eval_after.png", "before_after.png", "rollout_000002_00.png"}


@pytest.mark.parametrize(
    ("override", "name"),
    [
        ("trainer.dump_log_probs=true", "log_probs/step_000001.safetensors"),
        ("trainer.image_every=1", "images/rollout_000001_00.png"),
    ],
)
def test_a_file_that_cannot_be_written_costs_no_training_step(plain_runs, tmp_path, override, name):
    settings, obstacle = small_config(override, *TWO_STEPS), tmp_path / name
    recorder = Recorder(1, lambda: obstacle.mkdir(parents=True), phase="rollout")
    with pytest.raises(BackendError, match=f"^{obstacle} "):
        trainer.train(settings, tmp_path, observer=recorder)
    assert records(tmp_path) == records(plain_runs[0])[:2]
    obstacle.rmdir()
    trainer.train(settings, tmp_path, resume=True, observer=(recorder := Recorder()))
    assert recorder.steps == [2]
    assert records(tmp_path) == records(plain_runs[0])[:3]


def test_drop_group_trains_on_the_rest(fragile, tmp_path):
    overrides, flag = fragile
    settings = small_config(
        overrides(value="nan"), "reward.on_error=drop_group", "trainer.eval_every=0", "trainer.total_steps=2"
    )

    class Spoiler(Recorder):
        def on_phase(self, name):
            if name == "rollout" and not self.steps:
                flag.touch()
            elif name == "update":
                flag.unlink(missing_ok=True)

    trainer.train(settings, tmp_path / "run", observer=Spoiler())
    first, second = records(tmp_path / "run")[1:]
    assert (first["reward/failed_samples"], second["reward/failed_samples"]) == (1, 0)
    assert (first["actor/updates"], second["actor/updates"]) == (1, 2)  # one group fills one mini-batch only
    assert all(math.isfinite(value) for value in first.values())


def test_diverged_weights_stop_the_run(tmp_path):
    with pytest.raises(BackendError, match=r"sample 0 .*: its latents .*actor\.lr "):
        trainer.train(small_config("actor.lr=1e30", "trainer.eval_every=0"), tmp_path)
    assert "not finite" in (tmp_path / "failure.txt").read_text()


def test_a_config_of_ones_own_is_held_to_the_rules_across_sections(tmp_path):
    config = small_config()
    too_many = replace(config, actor=replace(config.actor, mini_batches=9))
    with pytest.raises(ConfigError, match=r"actor\.mini_batches=9 .*rollout\.prompts_per_step=2: "):
        trainer.train(too_many, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_is_quick_to_fail_leaves_the_folder_free(fragile, tmp_path):
    """It fails before the model loads, which is not there."""
    settings = small_config("model.path=/nowhere", "reward.terms=[{name: 'fragile_reward:Unavailable'}]")
    with pytest.raises(MissingExtraError, match="nosuch"):
        trainer.train(settings, tmp_path / "run")
    run_folder.claim(tmp_path / "run", small_config(), resume=False)
