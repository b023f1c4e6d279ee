"""Samples without a picture, from the decoder to the end of a training step."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch

from flowcorr.errors import BackendError
from flowcorr.rewards.statistics import image_statistics
from flowcorr.rollout.sampler import MISSING
from flowcorr.trainer.collect import collect, score
from flowcorr.trainer.evaluate import evaluate
from flowcorr.trainer.images import Shown, labelled
from flowcorr.trainer.setup import build_run
from flowcorr.trainer.step import train_step
from tests.overflow import overflow, overflow_one
from tests.prompts import prompts_of
from tests.trainer.runs import small_config

PLACEMENTS = ("local", "thread")


@pytest.fixture
def prepared():
    """A run whose decoder overflows for one sample of the first training step; overrides -> run, prompts, place."""
    runs = []

    def prepare(*overrides):
        run, data = build_run(small_config(*overrides))
        runs.append(run)
        run.engine.sync(run.actor.weights.for_engine())
        drawn = run.prompts.peek(run.config.rollout.prompts_per_step)
        texts = [prompt.text for prompt in drawn]
        rollout = run.engine.sample(
            run.cache(prompts_of(texts)), range(len(texts)), training_step=1, with_means=False
        )
        return run, data, overflow_one(run.actor.family, rollout.final_latents)

    yield prepare
    for run in runs:
        run.close()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_sample_whose_pixels_overflow_fails_by_name(prepared, placement):
    run, _, place = prepared(f"reward.placement={placement}")
    group, member = divmod(place, 2)
    with pytest.raises(BackendError, match=rf"sample {place} .*VAE .*model\.dtype=float32") as caught:
        train_step(run, 1, lambda phase: None)
    assert f"image {member} of group {group}:" in str(caught.value)
    assert "(1 of 4" in str(caught.value)
    assert "reward.on_error: drop_group" in str(caught.value)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_its_group_is_left_out_under_drop_group(prepared, placement, caplog):
    run, _, place = prepared(
        f"reward.placement={placement}", "reward.on_error=drop_group", "rollout.replay_every=1"
    )
    before = run.actor.weights.snapshot()
    with caplog.at_level(logging.WARNING):
        result = train_step(run, 1, lambda phase: None)
    assert f"image {place % 2} of group {place // 2}:" in caplog.text
    values = result.metrics.compute()
    assert values["reward/failed_samples"] == 1
    assert np.flatnonzero(np.isnan(result.scores)).tolist() == [place]
    assert all(np.isfinite(value) for value in values.values())
    assert values["rollout_corr/replay/decode"] == 0
    assert any(
        not torch.equal(before.tensors[name], now) for name, now in run.actor.weights.parameters.items()
    )
    shown = Shown(images=result.images, prompts=result.prompts, scores=result.scores)
    assert labelled(shown)[place].getpixel((5, 5)) == (255, 0, 255)


def test_no_reward_sees_it_and_no_statistic_does(prepared):
    run, _, place = prepared("reward.on_error=drop_group", "reward.placement=local")
    seen = []

    def reward(images, prompts):
        seen.append(images)
        return np.arange(len(images), dtype=float)

    run.reward = reward
    drawn = run.prompts.next(2)
    samples = collect(run, drawn, range(2), 1)
    output = score(run, samples)
    (images,) = seen
    whole = [row for row in range(4) if row != place]
    assert np.array_equal(images, samples.images[whole])
    assert output.scores[whole].tolist() == [0, 1, 2]
    assert np.flatnonzero(output.failed).tolist() == [place]


def test_where_all_overflow_nothing_is_left(prepared):
    run, _, _ = prepared("reward.on_error=drop_group")
    overflow(run.actor.family.pipeline.vae)
    with pytest.raises(BackendError, match="4 of 4 samples"):
        train_step(run, 1, lambda phase: None)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_latents_that_are_not_finite_fail_like_pixels(prepared, bad):
    run, _, _ = prepared("reward.on_error=drop_group")
    sample = run.engine.sample

    def spoiled(*args, **kwargs):
        rollout = sample(*args, **kwargs)
        rollout.window.latents[0, 1, 0, 0, 0] = bad
        rollout.final_latents[1, 0, 0, 0] = bad
        return replace(rollout, finite_images=torch.ones(4, dtype=torch.bool))

    run.engine.sample = spoiled
    samples = collect(run, run.prompts.next(2), range(2), 1)
    assert sorted(samples.broken) == [0, 1]
    assert "rollout.dtype=float32" in samples.broken[0]
    assert score(run, samples).failed.tolist() == [True, True, False, False]


def test_an_engine_that_does_not_know_is_judged_by_the_trainer(prepared):
    run, _, place = prepared("reward.on_error=drop_group")
    sample = run.engine.sample
    run.engine.sample = lambda *args, **kwargs: replace(sample(*args, **kwargs), finite_images=None)
    samples = collect(run, run.prompts.next(2), range(2), 1)
    assert list(samples.broken) == [place]
    assert "pixels" in samples.broken[place]


def test_an_engine_that_gives_nothing_to_judge_is_refused(prepared):
    run, _, _ = prepared()
    sample = run.engine.sample
    run.engine.sample = lambda *args, **kwargs: replace(
        sample(*args, **kwargs), finite_images=None, final_latents=None
    )
    with pytest.raises(BackendError, match=r"Rollout\.finite_images .*Rollout\.final_latents"):
        collect(run, run.prompts.next(2), range(2), 1)


def test_an_evaluation_follows_the_same_rule():
    run, data = build_run(small_config("reward.on_error=drop_group", "rollout.batch_size=3"))
    family, finals = run.actor.family, []
    decode = family.decode
    family.decode = lambda latents: finals.append(latents) or decode(latents)
    before = evaluate(run, data.heldout)
    family.decode = decode
    assert before.metrics["eval/failed_samples"] == 0
    place = overflow_one(family, torch.cat(finals))
    evaluation = evaluate(run, data.heldout)
    assert np.flatnonzero(np.isnan(evaluation.scores)).tolist() == [place]
    assert (evaluation.images[place] == np.array(MISSING)).all()
    assert evaluation.metrics["eval/failed_samples"] == 1
    assert evaluation.metrics["eval/reward"] == np.delete(evaluation.scores, place).mean()
    statistics = image_statistics(np.delete(evaluation.images, place, axis=0))
    assert evaluation.metrics["eval/image/saturated"] == statistics["saturated"].mean()
    run.config = replace(run.config, reward=replace(run.config.reward, on_error="fail"))
    with pytest.raises(BackendError, match=rf"held-out image {place}: .*VAE .*model\.dtype=float32"):
        evaluate(run, data.heldout)
    run.config = replace(run.config, reward=replace(run.config.reward, on_error="drop_group"))
    overflow(family.pipeline.vae)
    with pytest.raises(BackendError, match="eval/reward .*: 4 of 4 "):
        evaluate(run, data.heldout)
    run.close()


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda rollout: None, r"NoneType; .*flowcorr\.records\.Rollout"),
        (lambda rollout: rollout.only(torch.tensor([0, 1])), r" 2 samples .* \[0\] .* \[0, 1\]: "),
    ],
)
def test_what_is_no_rollout_of_the_groups_ends_the_run(prepared, monkeypatch, spoil, named):
    run, _, _ = prepared()
    sample = run.engine.sample
    monkeypatch.setattr(run.engine, "sample", lambda *args, **given: spoil(sample(*args, **given)))
    with pytest.raises(BackendError, match=named):
        train_step(run, 1, lambda phase: None)
