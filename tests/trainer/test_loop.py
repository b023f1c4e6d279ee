"""Whole runs: what they leave in their folder."""

import gc
import json
import math

import torch

from flowcorr import config, trainer
from flowcorr.health.table import find_metric
from flowcorr.rewards.combine import BUILT_IN_METRICS
from flowcorr.trackers.jsonl import read_metrics
from flowcorr.trainer import checkpoint
from flowcorr.trainer.evaluate import Evaluation
from tests.shallow import SHALLOW
from tests.trainer.runs import Recorder, checkpoints, small_config


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
    assert names == BUILT_IN_METRICS - {
        "image/motion",
        "learned_advantage",
    }  # of videos, of rollout.n_learned


def test_a_negative_prompt_in_every_line_is_that_of_the_recipe(tmp_path):
    """In sampling, scoring, replays and evaluations; with another one all of these differ."""
    losses, scores = {}, {}
    for name, of_lines, of_recipe in (
        ("lines", "dog", "sun"),
        ("recipe", None, "dog"),
        ("other", None, "sun"),
    ):
        own = {} if of_lines is None else {"negative_prompt": of_lines}
        file = tmp_path / f"{name}.jsonl"
        file.write_text(
            "\n".join(
                json.dumps({"prompt": text, **own}) for text in ("cat", "elk", "bee", "owl", "ant", "fox")
            )
        )
        trainer.train(
            small_config(
                f"data.path={file}",
                "data.heldout_fraction=0.3",
                "data.num_train=2048",
                "sampling.guidance_scale=3",
                f"sampling.negative_prompt={of_recipe}",
                "rollout.replay_every=1",
                "trainer.total_steps=1",
            ),
            tmp_path / name,
        )
        first = read_metrics(tmp_path / name / "metrics.jsonl")
        losses[name] = [
            first[1][key]
            for key in ("reward/mean", "actor/grad_norm", "rollout_corr/kl", "rollout_corr/replay/before")
        ]
        scores[name] = [record["eval/reward"] for record in first]
    assert (losses["lines"], scores["lines"]) == (losses["recipe"], scores["recipe"])
    assert losses["lines"][1] != losses["other"][1]
    assert scores["lines"] != scores["other"]


def test_every_metric_of_a_run_is_explained(plain_runs):
    logged = {name for record in read_metrics(plain_runs[0] / "metrics.jsonl") for name in record}
    assert {name for name in logged - {"step", "time"} if find_metric(name) is None} == set()


def test_the_images_of_an_evaluation_are_not_kept_while_training_goes_on(tmp_path):
    def num_evaluations():
        return sum(isinstance(entry, Evaluation) for entry in gc.get_objects())

    before, during = num_evaluations(), []
    observer = Recorder(1, lambda: during.append(num_evaluations()))
    result = trainer.train(small_config("trainer.total_steps=1"), tmp_path, observer=observer)
    assert during == [before]
    assert result.metrics == observer.evals[1]


def test_adapter_loads_into_the_pipeline(plain_runs):
    from diffusers import StableDiffusion3Pipeline

    folder = plain_runs[0] / "checkpoints" / "step_000004"
    pipe = StableDiffusion3Pipeline.from_pretrained(SHALLOW)
    pipe.load_lora_weights(folder)
    loaded = {name: value for name, value in pipe.transformer.named_parameters() if ".lora_" in name}
    trained, lora = checkpoint.load(folder).group("weights"), small_config().model.lora
    assert len(loaded) == len(trained) > 0
    for name, value in trained.items():
        peer = next(other for key, other in loaded.items() if key.replace("default_0", "default") == name)
        scale = (
            lora.alpha / lora.rank if ".lora_B." in name else 1.0
        )  # saved at full strength: alpha is the rank
        torch.testing.assert_close(peer, scale * value, rtol=0, atol=0)


def test_bypass_spends_no_time_on_old_log_probs(tmp_path):
    settings = small_config(
        "algorithm.rollout_correction.preset=bypass_ppo_clip",
        "trainer.total_steps=1",
        "trainer.image_every=1",
    )
    recorder = Recorder()
    trainer.train(settings, tmp_path, observer=recorder)
    assert read_metrics(tmp_path / "metrics.jsonl")[1]["timing/old_log_prob"] == 0
    assert recorder.phases == ["evaluation", "rollout", "reward", "replay", "update", "sync", "evaluation"]
    assert (tmp_path / "images" / "rollout_000001_00.png").is_file()


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
