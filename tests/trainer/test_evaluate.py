"""Evaluations, in a run and of a finished one."""

import json
from dataclasses import replace

import numpy as np
import pytest
import tiny_pipelines

from flowcorr import config, trainer
from flowcorr.actor.adamw import AdamW
from flowcorr.errors import BackendError, CheckpointError, ConfigError
from flowcorr.trackers.jsonl import read_metrics
from flowcorr.trainer import checkpoint
from tests.shallow import SHALLOW
from tests.trainer.runs import records, small_config

WORDS = {
    "cat": "animal",
    "dog": "animal",
    "cow": "animal",
    "red": "colour",
    "blue": "colour",
    "green": "colour",
}


@pytest.fixture
def tagged(tmp_path, monkeypatch):
    """`tagged(*overrides)`: a run of one step on prompts of two tags, of which a user's reward scores one."""
    lines = [json.dumps({"prompt": word, "tag": tag}) for word, tag in WORDS.items()]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    (tmp_path / "test.jsonl").write_text(
        '{"prompt": "pig", "tag": "animal"}\n{"prompt": "grey", "tag": "colour"}'
    )
    (tmp_path / "zoo.py").write_text(
        "def zoo(images, prompts):\n"
        "    assert {prompt.tag for prompt in prompts} == {'animal'}\n"
        "    return [3.0] * len(prompts)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def load(*overrides):
        return config.load(
            "tiny_jpeg_lora",
            [
                f"data.path={tmp_path / 'train.jsonl'}",
                f"data.heldout_path={tmp_path / 'test.jsonl'}",
                "reward.terms=[{name: jpeg_compressibility}, {name: 'zoo:zoo', tags: [animal]}]",
                f"model.path={SHALLOW}",
                "sampling.height=16",
                "sampling.width=32",
                "sampling.num_inference_steps=3",
                "sampling.sde_window_range=[0, 3]",
                "rollout.prompts_per_step=6",
                "rollout.n=2",
                "trainer.total_steps=1",
                "trainer.eval_num_inference_steps=2",
                *overrides,
            ],
        )

    return load


def test_the_mean_of_a_term_is_that_of_the_prompts_that_it_scores(tagged, tmp_path):
    trainer.train(tagged(), tmp_path / "run")
    for prefix in ("reward", "eval"):
        records = read_metrics(tmp_path / "run" / "metrics.jsonl")
        record = next(record for record in records if f"{prefix}/zoo" in record)
        assert record[f"{prefix}/zoo"] == 3.0
        total = record["reward/mean"] if prefix == "reward" else record["eval/reward"]
        assert total == pytest.approx(1.5 + record[f"{prefix}/jpeg_compressibility"])  # half of the prompts


def test_a_gold_reward_of_evaluations_scores_no_training_step(tagged, tmp_path):
    gold = (
        "reward.gold=[{name: jpeg_incompressibility}]",
        "reward.terms=[{name: jpeg_compressibility}]",
        "reward.gold_every=evaluation",
    )
    trainer.train(tagged(*gold), tmp_path / "run")
    first, second = records(tmp_path / "run")
    assert not [name for name in second if name.startswith("reward/gold/")]
    for record in (first, second):
        assert record["eval/gold/jpeg_incompressibility"] == pytest.approx(-record["eval/reward"])


@pytest.fixture
def picky(tagged, tmp_path):
    """`picky(words, *overrides)`: a run of which a reward, that is 3 elsewhere, is NaN on these held-out words."""
    (tmp_path / "picky.py").write_text(
        "def picky(images, prompts, words):\n"
        "    return [float('nan') if prompt.text in words else 3.0 for prompt in prompts]\n"
    )

    def load(words, *overrides, key="reward.terms"):
        terms = f"{key}=[{{name: 'picky:picky', options: {{words: {json.dumps(words)}}}}}]"
        jpeg = "reward.terms=[{name: jpeg_compressibility}]"
        return tagged(jpeg, terms, "reward.on_error=drop_group", *overrides)

    return load


def test_images_that_the_reward_cannot_score_are_left_out_of_the_means(picky, tmp_path):
    trainer.train(picky(["pig"]), tmp_path / "run")
    for record in records(tmp_path / "run"):
        assert (record["eval/reward"], record["eval/reward_std"], record["eval/failed_samples"]) == (3, 0, 1)
        assert record["eval/scored_images"] == 1
    evaluation = trainer.evaluate_run(tmp_path / "run")[1]
    assert np.isnan(evaluation.scores).tolist() == [False, True]  # grey, pig
    assert np.isfinite(list(evaluation.metrics.values())).all()


def test_an_image_that_gold_cannot_score_is_left_out_for_all_rewards(picky, tmp_path):
    settings = picky(["pig"], "reward.gold_every=evaluation", key="reward.gold")
    trainer.train(settings, tmp_path / "run")
    evaluation = trainer.evaluate_run(tmp_path / "run")[1]
    assert np.isnan(evaluation.scores).tolist() == [False, True]  # grey, pig
    assert evaluation.metrics["eval/reward"] == evaluation.scores[0]
    assert evaluation.metrics["eval/gold/picky"] == 3
    assert evaluation.metrics["eval/failed_samples"] == 1


ANIMALS = "{name: 'picky:picky', tags: [animal], options: {words: [pig]}}"


@pytest.mark.parametrize(
    ("words", "overrides", "named"),
    [
        (["pig", "grey"], [], "eval/reward .*: 2 of 2 "),
        (
            [],
            [
                f"reward.terms=[{{name: jpeg_compressibility}}, {ANIMALS}]",
                "trainer.best_metric=eval/picky",
            ],
            "eval/picky .*: 1 of 2 ",
        ),
    ],
)
def test_an_evaluation_without_a_score_of_the_best_metric_says_so(picky, tmp_path, words, overrides, named):
    with pytest.raises(BackendError, match=rf"{named}.*data\.heldout_path"):
        trainer.train(picky(words, *overrides), tmp_path / "run")


def test_tags_are_checked_before_a_model_is_loaded(tagged, tmp_path):
    settings = tagged("reward.terms=[{name: 'zoo:zoo', tags: [animal]}]", "model.path=nowhere")
    with pytest.raises(ConfigError, match=r"reward\.terms .* tag 'colour';"):
        trainer.train(settings, tmp_path / "run")


def test_evaluate_run_finds_best_last_and_a_folder(finished):
    scores = {
        record["step"]: record["eval/reward"] for record in records(finished) if "eval/reward" in record
    }
    best = max(scores, key=scores.get)
    for which, step in (("best", best), ("last", 4), (str(finished / "checkpoints" / "step_000002"), 2)):
        chosen, evaluation = trainer.evaluate_run(finished, which=which)
        assert chosen.name == f"step_{step:06d}"
        assert evaluation.metrics["eval/reward"] == scores[step]
        assert evaluation.images.shape == (4, 16, 32, 3)
    sampled_elsewhere = ("rollout.name=vllm_omni", "rollout.engine={max_num_seqs: 2}")
    assert (
        trainer.evaluate_run(finished, overrides=sampled_elsewhere)[1].metrics["eval/reward"] == scores[best]
    )


def test_evaluate_run_rounds_guidance_as_the_run_does(tmp_path):
    """An engine in bfloat16 feeds FLUX a guidance scale of 3.3 as 3.296, and so does the run's trainer."""
    tiny_pipelines.build_tiny_flux(tmp_path / "model")
    keys = (f"model.path={tmp_path / 'model'}", "sampling.guidance_scale=3.3", "rollout.dtype=bfloat16")
    size = ("sampling.height=32", "sampling.width=32", "trainer.total_steps=1")
    result = trainer.train(small_config(*keys, *size), tmp_path / "run")
    assert trainer.evaluate_run(tmp_path / "run", which="last")[1].metrics == result.metrics


def test_an_evaluation_keeps_the_images_that_are_shown(finished, monkeypatch):
    monkeypatch.setattr("flowcorr.trainer.evaluate.MAX_PICTURES", 3)
    found = trainer.evaluate_run(finished)[1]
    assert (len(found.images), len(found.scores)) == (3, 4)


def test_an_evaluation_may_have_its_own_size(finished):
    size = ("trainer.eval_height=16", "trainer.eval_width=48")
    assert trainer.evaluate_run(finished, overrides=size)[1].images.shape == (4, 16, 48, 3)


def test_an_evaluation_restores_no_optimizer(finished, monkeypatch):
    """Its moments are as large as two copies of the weights."""

    def refuse(self, state):
        raise AssertionError

    monkeypatch.setattr(AdamW, "load_state", refuse)
    assert trainer.evaluate_run(finished, which="last")[1].metrics


@pytest.mark.parametrize(
    ("which", "overrides", "error", "named"),
    [
        (
            "last",
            ["model.lora.rank=2"],
            CheckpointError,
            r"step_000004 .*to_q\.lora_A.* \[4, 96\] .* \[2, 96\]$",
        ),
        ("latest", [], CheckpointError, "checkpoint='latest' .*; give best, last "),
        (
            "best",
            ["trainer.eval_height=17"],
            ConfigError,
            r"trainer\.eval_height=17, trainer\.eval_width=None: .* 16$",
        ),
    ],
)
def test_evaluate_run_refuses_what_does_not_fit(finished, which, overrides, error, named):
    with pytest.raises(error, match=named):
        trainer.evaluate_run(finished, which=which, overrides=overrides)


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        ({"best": "x"}, "best='x' .* null$"),
        ({"best": [-1, 0.5]}, r"best=\[-1, 0\.5\] .* null$"),
        ({"best": ["../..", 0.5]}, r"best=\['\.\./\.\.', 0\.5\] .* null$"),
        ({"best": None, "version": None}, "KeyError: 'version'$"),
    ],
)
def test_a_checkpoint_of_a_stranger_is_one_line(facts, named, finished):
    """Its digests are right, and its facts are not."""
    state = checkpoint.load_latest(finished / "checkpoints")[1]
    facts = {**state.facts, **facts}
    facts = {name: value for name, value in facts.items() if value is not None or name == "best"}
    checkpoint.save(finished / "checkpoints", replace(state, facts=facts), lambda folder: None)
    with pytest.raises(CheckpointError, match=f"step_000004 is damaged: {named}"):
        trainer.evaluate_run(finished)
