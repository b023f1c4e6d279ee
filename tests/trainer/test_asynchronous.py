"""Runs whose sampling runs ahead in Ray workers: what they train on, stop at and go on from."""

import os
import shutil
import signal
import time
from dataclasses import replace

import pytest
import torch
from ray_tasks import WORKERS

from flowcorr import config, trainer
from flowcorr.errors import BackendError, ConfigError
from flowcorr.trackers.jsonl import read_metrics
from flowcorr.trainer import checkpoint
from flowcorr.trainer.events import read_events
from flowcorr.trainer.setup import build_run
from flowcorr.trainer.step import train_step
from tests.descendants import descendants
from tests.trainer import runs
from tests.trainer.runs import Recorder, assert_same_weights, records

pytestmark = pytest.mark.system

SMALL = (
    *runs.SMALL,
    "rollout.n=3",
    "rollout.n_learned=2",
    "rollout.batch_size=3",
    "trainer.total_steps=6",
    "trainer.eval_every=3",
    "trainer.save_every=3",
)
LATE = ("rollout.max_staleness=2", "rollout.drift_every=2", "rollout.replay_every=2")
AHEAD = ("rollout.placement=ray", "rollout.timeout=600", *LATE)


def small_config(*overrides):
    return config.load("tiny_jpeg_lora", [*SMALL, *overrides])


def kinds(folder):
    """The story of a run, without where its workers ran."""
    events = read_events(folder / "events.jsonl")
    return [(event["kind"], event["step"]) for event in events if event["kind"] != "workers"]


@pytest.fixture(scope="module")
def runs(ray_cluster, tmp_path_factory):
    """A synchronous run with old weights, one ahead, and that one's folder as a kill in step 5 leaves it."""
    folder = tmp_path_factory.mktemp("runs")
    torch.manual_seed(0)
    stale = ("rollout.staleness=2", "rollout.drift_every=2", "rollout.replay_every=2")
    trainer.train(small_config(*stale), folder / "stale")
    torch.manual_seed(0)
    copy = Recorder(5, lambda: shutil.copytree(folder / "ahead", folder / "killed"), phase="update")
    trainer.train(small_config(*AHEAD), folder / "ahead", observer=copy)
    return folder


def test_sampling_ahead_equals_sampling_with_old_weights(runs):
    assert records(runs / "ahead") == records(runs / "stale")
    assert_same_weights(runs / "ahead", runs / "stale", 6)
    ages = [record["rollout/staleness_max"] for record in records(runs / "ahead")[1:]]
    assert ages == [0, 1, 2, 2, 2, 2]
    drifts = [record.get("rollout_corr/staleness/k3_kl", 0.0) for record in records(runs / "ahead")[1:]]
    assert [drift > 0 for drift in drifts] == [False, True] * 3
    replayed = [record.get("rollout_corr/replay/window") for record in records(runs / "ahead")[1:]]
    assert [value is None for value in replayed] == [False, False, True, False, True, False]
    assert max(filter(None, replayed)) < 1e-4  # under the weights that sampled; .06 under the present ones
    for record in read_metrics(runs / "ahead" / "metrics.jsonl")[1:]:
        assert record["rollout/staleness_mean"] == record["rollout/staleness_max"]
        assert record["rollout/dropped_stale_samples"] == 0
        assert 0 <= record["timing/rollout_wait"] <= record["timing/rollout"]
    assert all(
        "timing/rollout_wait" not in record for record in read_metrics(runs / "stale" / "metrics.jsonl")
    )


def test_events_tell_the_story_of_a_run(runs):
    story = [("start", 0), ("checkpoint", 0), ("checkpoint", 3), ("checkpoint", 6), ("end", 6)]
    best = checkpoint.load_latest(runs / "stale" / "checkpoints")[1].facts["best"][0]
    assert best in (0, 3, 6)
    for folder in (runs / "ahead", runs / "stale"):
        assert kinds(folder) == story
    first, *_, last = read_events(runs / "ahead" / "events.jsonl")
    assert first["time"].endswith("+00:00")
    assert first["time"] < last["time"]
    assert (first["total_steps"], last["status"]) == (6, "finished")


@pytest.mark.faults
def test_resumed_after_a_kill_samples_again_what_was_in_flight(runs, tmp_path):
    folder = shutil.copytree(runs / "killed", tmp_path / "run")
    assert [record["step"] for record in records(folder)] == [0, 1, 2, 3, 4]
    trainer.train(config.load(folder / "config.yaml"), folder, resume=True)
    assert records(folder) == records(runs / "ahead")
    assert_same_weights(folder, runs / "ahead", 6)
    assert kinds(folder) == [*kinds(runs / "killed"), ("resume", 3), ("checkpoint", 6), ("end", 6)]


@pytest.mark.faults
def test_a_signal_ends_a_run_with_a_checkpoint_and_without_workers(runs, tmp_path):
    settings = small_config(*WORKERS, *LATE)
    seen = []

    def terminate():
        seen.extend(workers())
        os.kill(os.getpid(), signal.SIGTERM)

    stop = Recorder(4, terminate, phase="rollout")
    result = trainer.train(settings, tmp_path / "run", observer=stop)
    assert (result.status, result.step) == ("interrupted", 4)
    assert kinds(tmp_path / "run")[3:] == [("signal", 3), ("checkpoint", 4), ("end", 4)]
    assert len(seen) == 5  # two dispatchers too
    wait_until_workers_are_gone()
    assert trainer.train(settings, tmp_path / "run", resume=True).status == "finished"
    assert records(tmp_path / "run") == records(runs / "ahead")
    assert_same_weights(tmp_path / "run", runs / "ahead", 6)


def test_a_run_ahead_is_evaluated_without_workers(runs):
    chosen, evaluation = trainer.evaluate_run(runs / "ahead", which="last")
    assert chosen.name == "step_000006"
    assert evaluation.metrics["eval/reward"] == records(runs / "ahead")[-1]["eval/reward"]


@pytest.mark.faults
def test_resume_takes_other_workers_and_no_other_bound(runs, tmp_path):
    folder = shutil.copytree(runs / "ahead", tmp_path / "run")
    changed = (
        *AHEAD,
        "rollout.num_workers=2",
        "rollout.worker_resources={num_cpus: 0.5}",
        "reward.timeout=60",
    )
    assert trainer.train(small_config(*changed), folder, resume=True).status == "finished"
    with pytest.raises(ConfigError, match="rollout.max_staleness was 2, now 1"):
        trainer.train(small_config(*AHEAD, "rollout.max_staleness=1"), folder, resume=True)


def workers():
    """Processes of Ray's workers below this one."""
    return [child.pid for child, name in descendants().items() if name.startswith("ray::Flowcorr")]


def wait_until_workers_are_gone():
    """Ray kills them a moment after it was asked to."""
    end = time.monotonic() + 300
    while workers():
        assert time.monotonic() < end, "workers outlive their run"
        time.sleep(0.1)


def test_samples_older_than_the_bound_are_dropped_and_counted(tmp_path):
    settings = small_config("rollout.staleness=1", "trainer.total_steps=3")
    told = []
    run, _ = build_run(settings, on_event=lambda kind, **fields: told.append((kind, fields)))
    run.engine.sync(run.actor.weights.snapshot())
    sample, seen = run.engine.sample, {}
    for step in (1, 2):
        train_step(run, step, lambda phase: None)

    def forgetful(*args, **kwargs):
        """An engine that missed a sync for its second group."""
        rollout = sample(*args, **kwargs)
        versions = torch.where(rollout.group_ids == 1, 0, rollout.policy_versions)
        return replace(rollout, policy_versions=versions)

    run.engine.sample = forgetful
    update = run.actor.update

    def remember(batch, *args, **kwargs):
        seen["groups"] = batch.rollout.group_ids.tolist()
        return update(batch, *args, **kwargs)

    run.actor.update = remember
    values = train_step(run, 3, lambda phase: None).metrics.compute()
    assert seen["groups"] == [0, 0]
    assert values["rollout/dropped_stale_samples"] == 3
    assert (values["rollout/staleness_mean"], values["rollout/staleness_max"]) == (1.5, 2)
    assert told == [("stale_dropped", {"samples": 3, "of": 6, "oldest": 2})]

    run.engine.sample = lambda *args, **kwargs: all_old(sample(*args, **kwargs))
    with pytest.raises(BackendError, match=r" 2 or more .*rollout\.staleness=1, "):
        train_step(run, 4, lambda phase: None)


def all_old(rollout):
    return replace(rollout, policy_versions=torch.zeros_like(rollout.policy_versions))


def test_failed_rewards_are_recorded(tmp_path):
    settings = small_config(
        "reward.terms=[{name: 'ray_tasks:brightness', options: {dark: 300}}]", "reward.on_error=drop_group"
    )
    told = []
    run, _ = build_run(settings, on_event=lambda kind, **fields: told.append((kind, fields)))
    run.engine.sync(run.actor.weights.snapshot())
    with pytest.raises(BackendError, match="6 of 6 samples"):
        train_step(run, 1, lambda phase: None)
    assert told == [("reward_failed", {"samples": 6, "of": 6})]
    strict = replace(settings.reward, on_error="fail")
    run.config = replace(settings, reward=strict)
    with pytest.raises(BackendError, match=r"sample 0 \(prompt ") as caught:
        train_step(run, 1, lambda phase: None)
    kind, fields = told[1]
    assert (kind, fields["error"][:60]) == ("reward_failed", str(caught.value)[:60])
