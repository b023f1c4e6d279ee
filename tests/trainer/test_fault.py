"""Runs that a fault of the engine stops: what is kept, and how they go on."""

import json
from dataclasses import replace

import pytest
import torch

from flowcorr import dumps, trainer
from flowcorr.config import Engine
from flowcorr.errors import RolloutFault
from flowcorr.rollout import InProcessEngine
from flowcorr.trainer import checkpoint
from flowcorr.trainer.events import read_events
from tests.trainer.runs import Recorder, assert_same_run, checkpoints, records, small_config

STEP = 3
BYPASS = "algorithm.rollout_correction.preset=bypass_ppo_clip"


def wrong_log_probs(rollout):
    return replace(rollout, log_probs=rollout.log_probs + 1e-3)


def moved_latents(rollout):
    """The last step's latents move after it, and nothing that follows from them does."""
    latents = rollout.window.next_latents.clone()
    latents[:, -1] += 0.2 * (latents[:, -1] - rollout.window.latents[:, -1])
    return replace(rollout, window=replace(rollout.window, next_latents=latents))


def other_images(rollout):
    return replace(rollout, images=rollout.images.flip(0))


FAULTS = {"log_prob_error": wrong_log_probs, "seeded_noise": moved_latents, "replay_decode": other_images}


class Breaking(InProcessEngine):
    """It breaks at a training step; without `fault` it is sound."""

    fault = staticmethod(lambda rollout: rollout)

    def sample(self, conditioning, groups, *, training_step, **options):
        rollout = super().sample(conditioning, groups, training_step=training_step, **options)
        return self.fault(rollout) if training_step >= STEP else rollout


def build(config, family, *, merge, base, probe):
    return Breaking(family, config.rollout, config.sampling, seed=config.trainer.seed, merge=merge, base=base)


ENGINE = Engine(build="tests.trainer.test_fault:build", shares_weights=True)
NAME = "rollout.name=tests.trainer.test_fault:ENGINE"


def broken_by(monkeypatch, fault):
    monkeypatch.setattr(Breaking, "fault", staticmethod(fault))


def stopped(settings, folder, **keywords):
    with pytest.raises(RolloutFault) as caught:
        trainer.train(settings, folder, **keywords)
    return caught.value


@pytest.mark.parametrize("mode", [(), (BYPASS,)])
@pytest.mark.parametrize("cause", FAULTS)
def test_the_state_before_a_fault_is_kept_and_resumes_to_equal_bits(cause, mode, tmp_path, monkeypatch):
    settings = small_config(NAME, "trainer.save_every=99", *mode)
    recorder = Recorder()
    with monkeypatch.context() as planted:
        broken_by(planted, FAULTS[cause])
        fault = stopped(settings, tmp_path / "run", observer=recorder)
    assert fault.step == STEP
    assert cause in [finding.cause for finding in fault.findings]
    assert recorder.steps == [1, 2]
    assert checkpoints(tmp_path / "run")[-1] == f"step_{STEP - 1:06d}"
    assert records(tmp_path / "run")[-1]["step"] == STEP - 1

    trainer.train(settings, tmp_path / "run", resume=True)
    trainer.train(settings, tmp_path / "whole")
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_the_evidence_and_the_reason_are_on_disk(tmp_path, monkeypatch):
    broken_by(monkeypatch, wrong_log_probs)
    fault = stopped(small_config(NAME), tmp_path)
    record = json.loads((tmp_path / "fault" / "metrics.json").read_text())
    assert record["step"] == STEP
    assert record["metrics"]["rollout/log_prob_error"] == pytest.approx(1e-3, rel=1e-2)
    assert record["metrics"]["reward/mean"] == fault.metrics["reward/mean"]
    step = dumps.load(dumps.files(tmp_path / "fault")[STEP])
    gap = step.old_log_probs - step.rollout_log_probs
    torch.testing.assert_close(gap, torch.full_like(gap, -1e-3), rtol=0, atol=1e-5)
    (event,) = (event for event in read_events(tmp_path / "events.jsonl") if event["kind"] == "fault")
    assert "log_prob_error" in event["causes"]
    assert str(fault) in (tmp_path / "failure.txt").read_text()


def test_trained_base_weights_are_kept_as_they_were_before_the_update(tmp_path, monkeypatch):
    settings = small_config(NAME, "model.lora.rank=0", "trainer.save_every=99")
    with monkeypatch.context() as planted:
        broken_by(planted, wrong_log_probs)
        stopped(settings, tmp_path / "run")
    assert checkpoints(tmp_path / "run")[-1] == f"step_{STEP - 1:06d}"
    trainer.train(settings, tmp_path / "run", resume=True)
    trainer.train(settings, tmp_path / "whole")
    ours, theirs = (
        checkpoint.load_latest(folder / "checkpoints")[1].tensors
        for folder in (tmp_path / "run", tmp_path / "whole")
    )
    assert {name for name in theirs if not torch.equal(ours[name], theirs[name])} == set()


def test_a_run_that_only_warns_trains_on(tmp_path, monkeypatch):
    broken_by(monkeypatch, wrong_log_probs)
    recorder = Recorder()
    trainer.train(small_config(NAME, "trainer.on_fault=warn"), tmp_path, observer=recorder)
    assert recorder.steps == [1, 2, 3, 4]
    assert records(tmp_path)[-1]["rollout/log_prob_error"] > 1e-4


def test_a_stopped_run_may_go_on_with_a_warning(tmp_path, monkeypatch):
    broken_by(monkeypatch, wrong_log_probs)
    stopped(small_config(NAME), tmp_path)
    recorder = Recorder()
    trainer.train(small_config(NAME, "trainer.on_fault=warn"), tmp_path, resume=True, observer=recorder)
    assert recorder.steps == [3, 4]
