"""Whole runs: what they leave, and that stopping and going on changes nothing."""

import json
import math
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flowcorr import config, trainer
from flowcorr.diagnostics.reference.metrics import find_metric
from flowcorr.errors import BackendError, BatchError, CheckpointError, ConfigError, MissingExtraError
from flowcorr.rewards.combine import BUILT_IN_METRICS
from flowcorr.trackers import TRACKERS, JsonlTracker
from flowcorr.trackers.jsonl import read_metrics
from flowcorr.trainer import Silent, checkpoint, run_folder
from flowcorr.trainer.events import read_events

SMALL = (
    "model.lora.rank=4",
    "sampling.num_inference_steps=4",
    "sampling.sde_window_range=[0, 3]",
    "rollout.prompts_per_step=2",
    "rollout.n=2",
    "data.num_train=5",
    "data.num_heldout=4",
    "trainer.total_steps=4",
    "trainer.eval_every=2",
    "trainer.save_every=2",
    "trainer.image_every=0",
    "trainer.num_threads=1",  # in every process, so that all make the same calls
)
STALE = (
    "rollout.staleness=2",
    "rollout.emulate=int8",
    "actor.ema=0.9",
    "actor.warmup_steps=5",
    "algorithm.rollout_correction.preset=bypass_ppo_clip",
)


class Recorder(Silent):
    """Notes what a run says, and does something after a step or as a phase of one begins."""

    def __init__(self, at_step=None, then=None, *, phase=None):
        self.steps, self.evals, self.messages, self.phases, self.results = [], {}, [], [], []
        self._at_step, self._then, self._phase = at_step, then, phase

    def on_phase(self, name):
        self.phases.append(name)
        if self._phase == name and self._at_step == len(self.steps) + 1:
            self._then()

    def on_step(self, step, metrics):
        self.steps.append(step)
        if self._phase is None and step == self._at_step:
            self._then()

    def on_eval(self, step, metrics):
        self.evals[step] = metrics

    def on_message(self, text):
        self.messages.append(text)

    def on_finish(self, result):
        self.results.append(result)


def small_config(*overrides):
    return config.load("tiny_jpeg_lora", [*SMALL, *overrides])


def records(folder: Path):
    """The run's records, without what depends on the clock."""
    return [
        {name: value for name, value in record.items() if not name.startswith(("timing/", "perf/"))}
        for record in read_metrics(folder / "metrics.jsonl")
    ]


def checkpoints(folder: Path):
    return [path.name for path in checkpoint.folders(folder / "checkpoints")]


def assert_same_run(one: Path, other: Path, *, but: Collection[str] = ()):
    """All metrics, the last and the best checkpoint agree bit for bit."""
    assert records(one) == records(other)
    last, best = (checkpoint.load_latest(one / "checkpoints")[1].facts[key] for key in ("config", "best"))
    for step in {last["trainer"]["total_steps"], best[0]}:
        first, second = (checkpoint.folder_of(folder / "checkpoints", step) for folder in (one, other))
        assert (first / "state.json").read_bytes() == (second / "state.json").read_bytes()
        for name in ("state.safetensors", "pytorch_lora_weights.safetensors"):
            ours, theirs = load_file(first / name), load_file(second / name)
            assert ours.keys() == theirs.keys()
            differ = {key for key, value in ours.items() if not torch.equal(value, theirs[key])}
            assert differ - set(but) == set()


@pytest.fixture(scope="module")
def plain_runs(tmp_path_factory):
    """A whole run, and its folder as it was in the middle of step 4, as a killed process leaves it."""
    return _whole_and_killed(tmp_path_factory.mktemp("plain"), small_config())


@pytest.fixture(scope="module")
def stale_runs(tmp_path_factory):
    """The same with a stale, rounded rollout engine, averaged weights and a warm-up."""
    return _whole_and_killed(tmp_path_factory.mktemp("stale"), small_config(*STALE))


@pytest.fixture
def finished(plain_runs, tmp_path):
    """A copy of a finished run of four steps."""
    return shutil.copytree(plain_runs[0], tmp_path / "finished")


@pytest.fixture(autouse=True)
def _same_seed():
    """Training draws nothing from torch's global generator; a checkpoint keeps its state all the same."""
    torch.manual_seed(0)


def _whole_and_killed(folder, settings):
    torch.manual_seed(0)
    whole, killed = folder / "whole", folder / "killed"
    recorder = Recorder(4, lambda: shutil.copytree(whole, killed), phase="update")
    trainer.train(settings, whole, observer=recorder)
    return whole, killed


REWARD = """
import numpy as np
from collections.abc import Collection
from pathlib import Path
from flowcorr.errors import MissingExtraError
from flowcorr.rewards.jpeg import JpegCompressibility

class Fragile:
    def __init__(self, flag, api_key="", value=None, exits=False):
        self.flag, self.value, self.exits, self.reward = Path(flag), value, exits, JpegCompressibility()

    def __call__(self, images, prompts):
        scores = np.array(self.reward(images, prompts).scores)
        if self.flag.exists():
            if self.exits:
                raise SystemExit(0)
            if self.value is None:
                raise RuntimeError("the scorer is gone")
            scores[0] = self.value
        return scores

class Unavailable:
    def __init__(self):
        raise MissingExtraError("reward unavailable", "nosuch", "nosuch")
"""


@pytest.fixture
def fragile(tmp_path, monkeypatch):
    """The JPEG reward, which fails while a flag file is there: overrides and the flag."""
    (tmp_path / "fragile_reward.py").write_text(REWARD)
    monkeypatch.syspath_prepend(str(tmp_path))
    flag = tmp_path / "flag"

    def overrides(**options):
        options = {"flag": str(flag), "api_key": "s3cret", **options}
        return f"reward.terms=[{{name: 'fragile_reward:Fragile', options: {json.dumps(options)}}}]"

    return overrides, flag


def interrupt(number):
    return lambda: os.kill(os.getpid(), number)


# What a run leaves ---------------------------------------------------------------------------------------


def test_a_run_leaves_config_metrics_checkpoints_and_images(plain_runs):
    whole, _ = plain_runs
    assert config.load(whole / "config.yaml") == small_config()
    assert {path.name for path in (whole / "images").iterdir()} == {
        "eval_before.png",
        "eval_after.png",
        "before_after.png",
    }
    assert not (whole / "failure.txt").exists()
    found = read_metrics(whole / "metrics.jsonl")
    best = max((record["eval/reward"], -record["step"]) for record in found if "eval/reward" in record)
    newest_two_and_best = {"step_000002", "step_000004", f"step_{-best[1]:06d}"}
    assert set(checkpoints(whole)) == newest_two_and_best
    assert [path.name for path in whole.rglob(".partial_*")] == []


def test_metrics_are_one_flat_finite_record_a_step(plain_runs):
    found = read_metrics(plain_runs[0] / "metrics.jsonl")
    assert [record["step"] for record in found] == [0, 1, 2, 3, 4]
    assert [record["step"] for record in found if "eval/reward" in record] == [0, 2, 4]
    for record in found:
        odd = {name: value for name, value in record.items() if not math.isfinite(value)}
        assert odd == {}
    for name in (
        "reward/mean",
        "rollout_corr/kl",
        "actor/grad_norm",
        "timing/rollout",
        "perf/images_per_second",
    ):
        assert all(name in record for record in found[1:])
    assert all(record["timing/old_log_prob"] > 0 for record in found[1:])
    assert found[4]["actor/updates"] == 2


def test_the_names_that_rewards_may_not_use_are_those_of_every_run(plain_runs):
    logged = {name for record in read_metrics(plain_runs[0] / "metrics.jsonl") for name in record}
    names = {name.partition("/")[2] for name in logged if name.startswith(("reward/", "eval/"))}
    assert names == BUILT_IN_METRICS


def test_every_metric_of_a_run_is_explained(plain_runs):
    logged = {name for record in read_metrics(plain_runs[0] / "metrics.jsonl") for name in record}
    assert {name for name in logged - {"step", "time"} if find_metric(name) is None} == set()


def test_adapter_loads_into_the_pipeline(plain_runs):
    from diffusers import StableDiffusion3Pipeline

    from flowcorr.models import resolve_path

    folder = plain_runs[0] / "checkpoints" / "step_000004"
    pipe = StableDiffusion3Pipeline.from_pretrained(resolve_path("tiny_ocr"))
    pipe.load_lora_weights(folder)
    loaded = {name: value for name, value in pipe.transformer.named_parameters() if ".lora_" in name}
    trained = checkpoint.load(folder).group("weights")
    assert len(loaded) == len(trained) > 0
    for name, value in trained.items():
        peer = next(other for key, other in loaded.items() if key.replace("default_0", "default") == name)
        torch.testing.assert_close(peer, value, rtol=0, atol=0)


def test_bypass_spends_no_time_on_old_log_probs(tmp_path):
    settings = small_config(
        "algorithm.rollout_correction.preset=bypass_ppo_clip",
        "trainer.total_steps=1",
        "trainer.image_every=1",
    )
    recorder = Recorder()
    trainer.train(settings, tmp_path, observer=recorder)
    assert read_metrics(tmp_path / "metrics.jsonl")[1]["timing/old_log_prob"] == 0
    assert recorder.phases == ["evaluation", "rollout", "reward", "update", "sync", "evaluation"]
    assert (tmp_path / "images" / "rollout_000001_00.png").is_file()


# Resumed = uninterrupted ---------------------------------------------------------------------------------


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


# Folders and checkpoints ---------------------------------------------------------------------------------


def test_a_used_folder_needs_resume(finished):
    with pytest.raises(ConfigError, match="already holds a run; continue it with --resume"):
        trainer.train(small_config(), finished)


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


def test_a_full_disk_stops_the_run_with_its_last_checkpoint_intact(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    recorder = Recorder(
        3, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, limits[1])), phase="rollout"
    )
    try:
        with pytest.raises(
            CheckpointError, match=r"step 4 could not be written .* the one before it is .*step_000002"
        ):
            trainer.train(small_config(), tmp_path, observer=recorder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert records(tmp_path)[-1]["step"] == 4
    assert checkpoint.load_latest(tmp_path / "checkpoints")[1].step == 2
    assert not list((tmp_path / "checkpoints").glob(".partial_*"))
    assert "could not be written" in (tmp_path / "failure.txt").read_text()


def test_evaluate_run_finds_best_last_and_a_folder(finished):
    scores = {
        record["step"]: record["eval/reward"] for record in records(finished) if "eval/reward" in record
    }
    best = max(scores, key=scores.get)
    for which, step in (("best", best), ("last", 4), (str(finished / "checkpoints" / "step_000002"), 2)):
        chosen, evaluation = trainer.evaluate_run(finished, which=which)
        assert chosen.name == f"step_{step:06d}"
        assert evaluation.metrics["eval/reward"] == scores[step]
        assert evaluation.images.shape == (4, 32, 64, 3)
    sampled_elsewhere = ("rollout.name=vllm_omni", "rollout.engine={max_num_seqs: 2}")
    assert (
        trainer.evaluate_run(finished, overrides=sampled_elsewhere)[1].metrics["eval/reward"] == scores[best]
    )


def test_an_evaluation_may_have_its_own_size(finished):
    size = ("trainer.eval_height=16", "trainer.eval_width=48")
    assert trainer.evaluate_run(finished, overrides=size)[1].images.shape == (4, 16, 48, 3)
    with pytest.raises(
        ConfigError, match="trainer.eval_height=17, trainer.eval_width=None: .* must be a multiple"
    ):
        trainer.evaluate_run(finished, overrides=("trainer.eval_height=17",))


def test_evaluate_run_refuses_what_does_not_fit(finished, tmp_path):
    with pytest.raises(CheckpointError, match=r"does not fit this run: .*shape"):
        trainer.evaluate_run(finished, which="last", overrides=("model.lora.rank=2",))
    with pytest.raises(CheckpointError, match="'latest' is not a folder; give best, last"):
        trainer.evaluate_run(finished, which="latest")
    with pytest.raises(ConfigError, match="holds no run"):
        trainer.evaluate_run(tmp_path)


# Failures ------------------------------------------------------------------------------------------------


class CountingTracker(JsonlTracker):
    """Counts what is asked of it, beside the `metrics.jsonl` of another."""

    calls: list[str]

    def start(self, run_name, out_dir, *, resume_step=None):
        self.calls.append("start")

    def log(self, metrics, step):
        self.calls.append(f"log {step}")

    def finish(self):
        self.calls.append("finish")


def test_a_failing_reward_saves_what_came_before_it(plain_runs, fragile, tmp_path, monkeypatch):
    overrides, flag = fragile
    calls = []
    monkeypatch.setitem(TRACKERS, "counting", CountingTracker)
    monkeypatch.setattr(CountingTracker, "calls", calls, raising=False)
    settings = small_config(overrides(), "trainer.trackers=[counting]")
    folder = tmp_path / "run"
    with pytest.raises(BackendError, match="the scorer is gone"):
        trainer.train(settings, folder, observer=Recorder(4, flag.touch, phase="rollout"))
    assert calls == ["start", "log 0", "log 1", "log 2", "log 3", "finish"]
    assert "the scorer is gone" in (folder / "failure.txt").read_text()
    assert checkpoints(folder)[-1] == "step_000003"

    flag.unlink()
    recorder = Recorder()
    trainer.train(settings, folder, resume=True, observer=recorder)
    assert recorder.steps == [4]
    assert not (folder / "failure.txt").exists()
    assert records(folder) == records(plain_runs[0])  # the same reward, had it not failed
    ours, theirs = (checkpoint.load_latest(path / "checkpoints")[1] for path in (folder, plain_runs[0]))
    for name, value in theirs.tensors.items():
        torch.testing.assert_close(ours.tensors[name], value, rtol=0, atol=0)
    for path in (folder / "checkpoints").rglob("*"):
        assert path.is_dir() or b"s3cret" not in path.read_bytes(), path


def test_a_reward_that_fails_at_an_evaluation_costs_no_training_step(plain_runs, fragile, tmp_path):
    overrides, flag = fragile
    settings, folder = small_config(overrides(), "trainer.save_every=99"), tmp_path / "run"
    with pytest.raises(BackendError, match="the scorer is gone"):
        trainer.train(settings, folder, observer=Recorder(2, flag.touch))
    flag.unlink()
    trainer.train(settings, folder, resume=True, observer=(recorder := Recorder()))
    assert recorder.steps == [3, 4]
    assert records(folder) == records(plain_runs[0])


def test_a_reward_that_exits_fails_the_run(plain_runs, fragile, tmp_path):
    overrides, flag = fragile
    settings, folder = small_config(overrides(exits=True), "trainer.save_every=99"), tmp_path / "run"
    with pytest.raises(BackendError, match=r"reward Fragile raised SystemExit\(0\)"):
        trainer.train(settings, folder, observer=Recorder(3, flag.touch))
    assert "reward Fragile raised SystemExit(0)" in (folder / "failure.txt").read_text()
    kinds = [event["kind"] for event in read_events(folder / "events.jsonl")]
    assert kinds[-3:] == ["reward_failed", "checkpoint", "failure"]
    flag.unlink()
    trainer.train(settings, folder, resume=True, observer=(recorder := Recorder()))
    assert recorder.steps == [4]
    assert records(folder) == records(plain_runs[0])


@pytest.mark.parametrize("error", [SystemExit(0), GeneratorExit()])
def test_a_run_that_other_code_exits_has_failed(error, tmp_path):
    def leave():
        raise error

    with pytest.raises(BackendError, match=f"{type(error).__name__}.* was raised during the run"):
        trainer.train(small_config(), tmp_path, observer=Recorder(1, leave, phase="update"))
    assert type(error).__name__ in (tmp_path / "failure.txt").read_text()
    assert read_events(tmp_path / "events.jsonl")[-1]["kind"] == "failure"


@pytest.mark.parametrize("step", [1, 2])  # the second is evaluated
def test_a_step_that_cannot_be_shown_is_kept(plain_runs, tmp_path, step):
    def fail():
        raise BackendError("standard output is closed")

    settings = small_config("trainer.save_every=99")
    with pytest.raises(BackendError, match="standard output is closed"):
        trainer.train(settings, tmp_path, observer=Recorder(step, fail))
    trainer.train(settings, tmp_path, resume=True, observer=(recorder := Recorder()))
    assert recorder.steps == list(range(step + 1, 5))
    assert records(tmp_path) == records(plain_runs[0])


def test_a_smaller_micro_batch_may_continue_a_run(tmp_path):
    trainer.train(small_config("trainer.total_steps=1"), tmp_path)
    smaller = small_config("trainer.total_steps=2", "actor.micro_batch_size=2")
    assert trainer.train(smaller, tmp_path, resume=True).step == 2


def test_drop_group_trains_on_the_rest(fragile, tmp_path):
    overrides, flag = fragile
    settings = small_config(
        overrides(value="nan"), "reward.on_error=drop_group", "trainer.eval_every=0", "trainer.total_steps=2"
    )
    flag.touch()
    with pytest.raises(BackendError, match="failed on sample 0"):  # an evaluation needs every score
        trainer.train(settings, tmp_path / "run")
    flag.unlink()

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
    with pytest.raises(BatchError, match="latents are not finite for image 0 of prompt 0"):
        trainer.train(small_config("actor.lr=1e30", "trainer.eval_every=0"), tmp_path)
    assert "not finite" in (tmp_path / "failure.txt").read_text()


def test_an_unknown_best_metric_is_named_and_leaves_the_folder_free(tmp_path):
    with pytest.raises(
        ConfigError, match=r"trainer.best_metric='eval/rewards' is unknown.*did you mean eval/reward\?"
    ):
        trainer.train(small_config("trainer.best_metric=eval/rewards"), tmp_path)
    run_folder.claim(tmp_path, small_config(), resume=False)


def test_what_is_quick_to_fail_fails_before_the_model_loads(fragile, tmp_path):
    nowhere = "model.path=/nowhere"
    with pytest.raises(MissingExtraError):
        trainer.train(
            small_config(nowhere, "reward.terms=[{name: 'fragile_reward:Unavailable'}]"), tmp_path / "a"
        )
    with pytest.raises(ConfigError, match=r"trainer.trackers='tensorbord'"):
        trainer.train(small_config(nowhere, "trainer.trackers=[tensorbord]"), tmp_path / "b")
    with pytest.raises(ConfigError, match=r"trainer.device='gpu' cannot be used here"):
        trainer.train(small_config(nowhere, "trainer.device=gpu"), tmp_path / "c")


def test_claim_names_the_keys_that_differ(tmp_path):
    run_folder.claim(tmp_path, small_config(), resume=False)
    run_folder.claim(tmp_path, small_config("actor.lr=1e-2"), resume=False)  # nothing was trained in it yet
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    changed = small_config(
        "actor.lr=1.0", "model.lora.rank=8", "trainer.total_steps=9", "trainer.eval_every=1"
    )
    with pytest.raises(ConfigError) as caught:
        run_folder.claim(tmp_path, changed, resume=True)
    assert "another configuration" in str(caught.value)
    assert "actor.lr was 0.01, now 1.0; model.lora.rank was 4, now 8. Use the old" in str(caught.value)
    run_folder.claim(tmp_path, small_config("actor.lr=1e-2", "trainer.total_steps=9"), resume=True)
    assert config.load(tmp_path / "config.yaml").trainer.total_steps == 9


def test_claim_keeps_secrets_to_the_owner(tmp_path, fragile):
    overrides, _ = fragile
    settings = small_config(overrides())
    run_folder.claim(tmp_path, settings, resume=False)
    assert (tmp_path / "config.yaml").stat().st_mode & 0o077 == 0
    assert config.load(tmp_path / "config.yaml") == settings
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(ConfigError, match=r"reward.terms") as caught:
        run_folder.claim(tmp_path, small_config(overrides(api_key="another")), resume=True)
    assert "s3cret" not in str(caught.value)


def test_claim_names_a_changed_secret_and_does_not_tell_it(tmp_path):
    def settings(token):
        return small_config("rollout.name=vllm_omni", f"rollout.engine={{hf_token: {token}}}")

    run_folder.claim(tmp_path, settings("s3cret"), resume=False)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(ConfigError) as caught:
        run_folder.claim(tmp_path, settings("s3cret too"), resume=True)
    assert 'rollout.engine.hf_token was "***", now "***"' in str(caught.value)


def test_two_processes_do_not_train_in_one_folder(tmp_path):
    code = "import sys, pathlib; from flowcorr.trainer import run_folder\n"
    code += "with run_folder.locked(pathlib.Path(sys.argv[1])): print('mine', flush=True); sys.stdin.read()"
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout.readline() == "mine\n"
    with pytest.raises(ConfigError, match=r"another process trains in .*; wait for it or end it, or choose"):
        trainer.train(small_config(), tmp_path)
    other.kill()  # as whatever ended it without a chance to tidy up
    other.communicate()
    with run_folder.locked(tmp_path):
        pass


def test_claim_refuses_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        run_folder.claim(tmp_path / "file" / "run", small_config(), resume=False)


def test_a_failure_that_cannot_be_noted_does_not_hide_the_failure(tmp_path, caplog):
    run_folder.write_failure(tmp_path / "gone", "reason")
    assert "failure.txt could not be written" in caplog.text


# Real processes ------------------------------------------------------------------------------------------


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


def test_a_band_that_cannot_act_is_named_once(tmp_path, caplog):
    settings = small_config(
        "algorithm.rollout_correction.preset=decoupled_seq_is_rs",
        "rollout.emulate=int8",
        "trainer.eval_every=0",
    )
    trainer.train(settings, tmp_path / "run")
    idle = [message for message in caplog.messages if "cannot reject anything" in message]
    assert len(idle) == 1
    assert "rollout_rs=seq_sum_k1" in idle[0]
