"""Training steps with the real engine, and whole images that are sampled again."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flowcorr.config import RewardTerm
from flowcorr.data import PromptStream
from flowcorr.health.rules import units_of
from flowcorr.models.prompt_cache import PromptCache
from flowcorr.records import Prompt
from flowcorr.rewards import build_reward
from flowcorr.rollout import decode
from flowcorr.trackers.jsonl import read_metrics
from flowcorr.trainer.run import TrainingRun
from flowcorr.trainer.step import train_step
from tests.judging import examine_step

pytestmark = [pytest.mark.vllm_omni, pytest.mark.filterwarnings("ignore")]

TINY_PIPELINES = Path(__file__).parents[2] / "tiny_pipelines.py"


def training_run(stack):
    prompts = [Prompt(text=text) for text in ("cat", "dog", "owl", "fox")]
    # Planted faults are to be named by their rules, not to stop the step.
    return TrainingRun(
        config=replace(stack.config, trainer=replace(stack.config.trainer, on_fault="warn")),
        actor=stack.actor,
        engine=stack.engine,
        cache=PromptCache(stack.family, stack.actor.guidance, prompts),
        prompts=PromptStream(prompts, seed=0),
        reward=build_reward((RewardTerm(name="jpeg_compressibility"),)),
    )


def test_training_steps(start):
    connected = training_run(stack := start("sd3"))
    first = train_step(connected, 1, lambda phase: None).metrics.compute()
    second = train_step(connected, 2, lambda phase: None).metrics.compute()
    assert stack.engine.version == stack.actor.weights.version == 2
    for values in (first, second):
        assert values["actor/grad_norm"] > 0
        assert values["actor/ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert stack.mismatch(stack.sample()).mean() <= 1e-6


def test_the_extremes_of_many_images_with_one_step_after_the_window_are_learned_from(start, monkeypatch):
    """Two of four images a prompt; the log-probs and the replay are exact beside the engine's longer step."""
    rollout, sampling = {"n_learned": 2, "replay_every": 1}, {"post_window_stride": 2}
    run = training_run(stack := start("tiny_ocr", rollout=rollout, sampling=sampling))
    update, batches = stack.actor.update, []

    def recorded(batch, *arguments, **settings):
        batches.append(batch)
        return update(batch, *arguments, **settings)

    monkeypatch.setattr(stack.actor, "update", recorded)
    metrics = train_step(run, 1, lambda phase: None).metrics.compute()
    (batch,) = batches
    assert batch.rollout.group_ids.tolist() == [0, 0, 1, 1]
    assert metrics["rollout_corr/logprob_abs_diff_mean"] <= 1e-6
    assert metrics["actor/grad_norm"] > 0
    units = units_of(run.config, metrics)
    assert [finding.cause for finding in examine_step(metrics, units) if finding.level == "serious"] == []


def broken_replay_rules(run):
    values = train_step(run, 1, lambda phase: None).metrics.compute()
    replayed = {name.rpartition("/")[2] for name in values if name.startswith("rollout_corr/replay/")}
    assert replayed == {"before", "window", "after", "decode", "reward"}  # windows are consecutive
    findings = examine_step(values, units_of(run.config, values))
    return [finding.cause for finding in findings if finding.cause.startswith("replay")]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_whole_images_are_replayed_to_rounding(start, dtype):
    stack = start("tiny_ocr", dtype=dtype, rollout={"replay_every": 1})
    assert broken_replay_rules(training_run(stack)) == []


def test_faults_outside_the_log_probs_are_named_by_their_leg(start, monkeypatch):
    run = training_run(start("tiny_ocr", rollout={"replay_every": 1}))
    pipeline = "flowcorr.rollout.vllm_omni.pipeline"
    with monkeypatch.context() as patch:
        patch.setattr(f"{pipeline}.decode", lambda family, final: decode(family, 1.25 * final))
        assert broken_replay_rules(run) == ["replay_decode"]
    schedule = run.engine.plan.schedule
    sigmas = (*schedule.sigmas[:4], 0.5 * schedule.sigmas[4], 0.0)  # windows end at step 3
    run.engine.plan = replace(run.engine.plan, schedule=replace(schedule, sigmas=sigmas))
    assert broken_replay_rules(run) == ["replay_after"]


def test_each_rank_has_an_engine_of_its_own(tmp_path):
    printed = subprocess.run(
        [sys.executable, str(TINY_PIPELINES), "sd3", str(tmp_path / "sd3")],
        capture_output=True,
        text=True,
        check=True,
    )
    launch = [
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        "-m",
        "flowcorr",
        "train",
        "sd35_medium_ocr_lora",
    ]
    keys = [*printed.stdout.split(), "rollout.name=vllm_omni", "trainer.total_steps=2"]
    done = subprocess.run(
        [sys.executable, *launch, *keys, "--out", str(tmp_path / "run")],
        capture_output=True, text=True, timeout=1200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    gaps = [row["rollout_corr/logprob_abs_diff_mean"] for row in rows if "actor/updates" in row]
    assert len(gaps) == 2
    assert max(gaps) <= 1e-6
