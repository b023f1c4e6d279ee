"""Replays of whole images: each fault outside the log-probs is named by its leg, and by no other."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from flowcorr import distributed, sde
from flowcorr.config import RewardTerm
from flowcorr.data import PromptStream
from flowcorr.errors import BackendError
from flowcorr.health.rules import HealthMonitor, units_of
from flowcorr.metrics import Metrics
from flowcorr.models import SamplingPlan
from flowcorr.questions.residual_terms import RESIDUALS
from flowcorr.records import Prompt
from flowcorr.rewards import build_reward
from flowcorr.trainer.collect import collect, score
from flowcorr.trainer.measurements import measure_replay, replays
from flowcorr.trainer.run import TrainingRun
from flowcorr.trainer.step import train_step
from tests.conftest import small_config, start_run
from tests.instruments.doctor.faults import separate
from tests.judging import examine_step
from tests.overflow import overflow
from tests.planted.mistakes import exchanged
from tests.planted.plants import (
    at_steps,
    feeding,
    noisy,
    returning,
    sampling_with,
    scheduled,
    vae_configured,
)
from tests.planted.table import equal_tail
from tests.shallow import SHALLOW

TEXTS = ["cat", "dog"]
PROMPTS = [Prompt(text=text) for text in TEXTS]
LEGS = ("before", "between", "after", "decode", "reward")
STEP = 3  # its windows begin at steps 2 and 1
SCATTERED_STEP = 5  # its scattered windows are the steps 2, 5, 7 and 1, 4, 6
SCATTERED = {"sde_window_size": 3, "sde_window_range": (0, 8), "sde_window_layout": "scattered"}


def training(sampling=None, path=SHALLOW, model=None, **rollout):
    """A training run on two prompts, whose engine has a pipeline of its own."""
    config = small_config(
        model={"path": path, **(model or {})},
        sampling={"num_inference_steps": 8, "sde_window_range": (1, 4), **(sampling or {})},
        rollout={"n": 2, "replay_every": 1, **rollout},
        trainer={"on_fault": "warn"},  # planted faults are to be named, not to stop the step
    )
    connected = start_run(config)
    embeds = connected.conditioning
    run = TrainingRun(
        config=config,
        actor=connected.actor,
        engine=separate(connected),
        cache=lambda prompts: {
            name: rows[[TEXTS.index(prompt.text) for prompt in prompts]] for name, rows in embeds.items()
        },
        prompts=PromptStream(PROMPTS, seed=0),
        reward=build_reward((RewardTerm(name="jpeg_compressibility"),)),
    )
    connected.stir()
    run.engine.sync(run.actor.weights.snapshot())
    return run


@pytest.fixture
def make_training():
    return training


def replayed(run, step=STEP):
    """`rollout_corr/replay/*` of a step's samples."""
    samples = collect(run, PROMPTS, range(2), step)
    scored = score(run, samples)
    stats, _ = measure_replay(run, samples, scored, step)
    return Metrics(stats).compute()


def named(run, step=STEP):
    return judged(run, replayed(run, step))


def judged(run, metrics):
    return [finding.cause for finding in examine_step(metrics, units_of(run.config, {}))]


# Faults ------------------------------------------------------------------------------------------------------


def swapped(steps):
    """The samples of both prompts get each other's embeddings at these steps."""

    def change(velocity, transformer, latents, timesteps, conditioning, guidance):
        other = {name: rows.flip(0) for name, rows in conditioning.items()}
        return velocity(transformer, latents, timesteps, other, guidance)

    return in_engine(at_steps(lambda engine: steps, change))


def in_engine(plant):
    return lambda run: plant(run.engine)


def other_images(run):
    """The reward sees the images of a batch in another order than the trainer."""
    true, calls = run.reward, []

    def reward(images, prompts):
        calls.append(len(images))
        return true(images[::-1] if len(calls) == 1 else images, prompts)

    run.reward = reward


FAULTS = {
    "prompt embeddings swapped after step 5": (swapped(range(5, 8)), "after"),
    "prompt embeddings swapped in the first step": (swapped(range(1)), "before"),
    "an Euler tail with another schedule": (in_engine(scheduled(equal_tail)), "after"),
    "a decoder without its scaling factor": (
        in_engine(vae_configured(lambda vae: {"scaling_factor": 1.0})),
        "decode",
    ),
    "images of two samples exchanged": (in_engine(returning(images=exchanged)), "decode"),
    "a reward that sees other images": (other_images, "reward"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_by_its_leg_and_by_no_other(fault, make_training):
    plant, leg = FAULTS[fault]
    run = make_training()
    plant(run)
    assert named(run) == [f"replay_{leg}"]


def test_an_engine_that_takes_all_steps_where_longer_ones_are_asked_for_is_named(make_training):
    run = make_training({"post_window_stride": 2})
    assert named(run) == []
    all_steps = replace(run.config.sampling, post_window_stride=1)
    run.engine.plan = SamplingPlan.of(run.engine.family, all_steps)
    assert named(run) == ["replay_after"]


@pytest.mark.parametrize("fault", [fault for fault, (_, leg) in FAULTS.items() if "schedule" not in fault])
def test_rounding_does_not_hide_it(fault, make_training):
    plant, leg = FAULTS[fault]
    run = make_training(path="tiny_ocr", dtype="bfloat16", emulate="fp8")
    plant(run)
    assert named(run) == [f"replay_{leg}"]


@pytest.mark.parametrize("noise_range", [None, (0, 8)])
def test_a_fault_between_the_steps_of_a_window_is_named(make_training, noise_range):
    run = make_training({**SCATTERED, "sde_noise_range": noise_range})
    swapped(range(3, 4))(run)
    assert named(run, SCATTERED_STEP) == ["replay_between"]


@pytest.mark.parametrize(
    ("sampling", "step"),
    [
        ({}, STEP),
        ({"post_window_stride": 3}, STEP),
        (SCATTERED, SCATTERED_STEP),
        ({**SCATTERED, "sde_noise_range": (0, 8)}, SCATTERED_STEP),
    ],
)
@pytest.mark.parametrize("rollout", [{}, {"dtype": "bfloat16"}, {"emulate": "fp8"}, {"emulate": "int8"}])
def test_nothing_is_named_where_only_rounding_differs(rollout, sampling, step, make_training):
    run = make_training(sampling, **rollout)
    values = replayed(run, step)
    # A consecutive window has no steps between its own.
    legs = [leg for leg in (*LEGS, "window") if "sde_window_layout" in sampling or leg != "between"]
    assert sorted(values) == sorted(f"rollout_corr/replay/{leg}" for leg in legs)
    assert judged(run, values) == []
    assert values["rollout_corr/replay/reward"] == 0
    if rollout:
        assert 1e-3 < values["rollout_corr/replay/window"] < 0.1
        assert values["rollout_corr/replay/after"] > 0.1  # rounding in the window is a unit of that outside


def truncated(run):
    """The model gets timesteps that are half a unit of 1000 too small, as truncation to integers makes them."""
    feeding(lambda timesteps: timesteps - 0.5)(run.engine)


def clamped(run):
    returning(next_latents=lambda rollout: rollout.window.next_latents.clamp(-2.5, 2.5))(run.engine)


def larger_noise(run):
    def change(rollout):
        window = rollout.window
        return window.next_latents + 0.01 * (window.next_latents - window.means)

    sample = run.engine.sample
    run.engine.sample = lambda *args, **kwargs: sample(*args, **{**kwargs, "with_means": True})
    returning(next_latents=change)(run.engine)


@pytest.mark.parametrize("fault", [truncated, clamped, larger_noise])
def test_a_small_fault_of_the_window_is_named_and_no_other_leg(fault, make_training):
    run = make_training()
    fault(run)
    values = replayed(run)
    assert 1e-4 < values["rollout_corr/replay/window"] < 0.3
    assert judged(run, values) == ["replay_window"]


def test_a_broken_window_is_no_unit_of_the_other_legs(make_training):
    """Else prompts that are swapped at all steps but one would be an error of 1 outside the window."""
    run = make_training()
    swapped(range(8))(run)
    values = replayed(run)
    assert values["rollout_corr/replay/window"] > 0.1
    assert values["rollout_corr/replay/after"] > 1e3
    assert judged(run, values) == ["replay_window"]


def test_a_decoder_of_the_trainer_that_overflows_is_named(make_training):
    run = make_training()
    vae = run.actor.family.pipeline.vae = copy.deepcopy(run.actor.family.pipeline.vae)
    overflow(vae)
    values = replayed(run)
    assert values["rollout_corr/replay/decode"] == math.inf
    assert not [name for name in values if "residual_terms/image" in name]
    assert judged(run, values) == ["replay_decode"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("factor", [0.95, 1.05])
def test_a_decoder_a_twentieth_off_is_named_in_every_precision(factor, dtype, make_training):
    run = make_training(path="tiny_ocr", model={"dtype": dtype}, dtype=dtype)
    assert named(run) == []
    vae_configured(lambda vae: {"scaling_factor": factor * vae.scaling_factor})(run.engine)
    assert named(run) == ["replay_decode"]


def test_noise_that_nobody_seeded_is_told_from_faults(make_training):
    run = make_training()
    run.engine.seed += 1
    assert named(run) == ["replay_window"]


@pytest.mark.parametrize(
    ("layout", "share"),
    [({}, 0.0), ({"sde_window_layout": "consecutive"}, 1.0), ({"window_per": "sample"}, 0.5)],
)
def test_windows_are_those_that_the_seeds_give(layout, share, make_training):
    run = make_training(SCATTERED)
    sampling_with(**layout)(run.engine)
    values = collect(run, PROMPTS, range(2), SCATTERED_STEP).metrics.compute()
    assert values["rollout/other_windows"] >= share
    assert judged(run, values) == (["windows"] if share else [])


def test_a_version_that_was_never_sent_stops_the_first_step(make_training):
    run = make_training()
    returning(policy_versions=lambda rollout: rollout.policy_versions + 1)(run.engine)
    with pytest.raises(BackendError, match=r"version 2 .* version 1: Rollout\.policy_versions"):
        collect(run, PROMPTS, range(2), STEP)


def test_an_engine_without_final_latents_is_an_error(make_training):
    run = make_training()
    sample = run.engine.sample
    run.engine.sample = lambda *args, **kwargs: replace(sample(*args, **kwargs), final_latents=None)
    with pytest.raises(BackendError, match=r"Rollout\.final_latents, .*rollout\.replay_every: 0"):
        replayed(run)


def test_an_engine_that_resizes_its_images_is_an_error(make_training):
    run = make_training()
    sample = run.engine.sample

    def cropped(*args, **kwargs):
        rollout = sample(*args, **kwargs)
        return replace(rollout, images=rollout.images[:, :8])

    run.engine.sample = cropped
    with pytest.raises(BackendError, match=r" \[8, 32, 3\], .* \[16, 32, 3\] .*Rollout\.images "):
        replayed(run)


def test_failed_scores_are_left_out(make_training):
    run = make_training()
    run.config = replace(run.config, reward=replace(run.config.reward, on_error="drop_group"))
    run.reward = lambda images, prompts: [np.nan if prompt.text == "cat" else 1.0 for prompt in prompts]
    assert replayed(run)["rollout_corr/replay/reward"] == 0
    run.reward = lambda images, prompts: [np.nan] * len(prompts)
    assert "rollout_corr/replay/reward" not in replayed(run)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_training_step_replays_on_schedule_and_learns_the_same(staleness, make_training):
    learned = []
    for every in (0, 2):
        run = make_training(staleness=staleness, replay_every=every)
        values = [train_step(run, step, lambda phase: None).metrics.compute() for step in (1, 2)]
        learned.append(run.actor.weights.snapshot().tensors)
        found = [[name for name in record if "replay" in name] for record in values]
        assert [bool(names) for names in found] == [every > 0] * 2
        if every:
            assert {f"rollout_corr/replay/{leg}" for leg in LEGS if leg != "between"} < set(found[1])
            assert "timing/replay" in found[1]
            assert values[1]["rollout_corr/replay/window"] < 1e-4  # under the weights that sampled
    for name, tensor in learned[0].items():
        assert torch.equal(tensor, learned[1][name])


def first_step(lost):
    """The replay's metrics of a training step in which the second rank loses its samples."""
    run = training(prompts_per_step=2, staleness=1)
    run.config = replace(run.config, reward=replace(run.config.reward, on_error="drop_group"))
    if distributed.rank() == 1:
        LOST[lost](run.engine)
    metrics = train_step(run, 1, lambda phase: None).metrics
    assert metrics.parts("residual_terms/velocity_length/{}")
    return {name: value for name, value in metrics.compute().items() if "/replay/" in name}


LOST = {
    "not finite": returning(final_latents=lambda rollout: math.nan * rollout.final_latents),
    "partly too old": returning(
        policy_versions=lambda rollout: rollout.policy_versions - torch.tensor([9, 0])
    ),
}


@pytest.mark.parametrize("lost", LOST)
def test_a_rank_that_lost_its_samples_replays_none(lost, two_ranks):
    first, second = two_ranks.call(first_step, lost, timeout=60)
    assert first == second
    assert first["rollout_corr/replay/window"] < 1e-4


@pytest.mark.parametrize(("every", "steps"), [(0, []), (1, [1, 2, 3, 4]), (2, [1, 2, 4])])
def test_schedule(every, steps, make_config):
    settings = make_config(rollout={"replay_every": every})
    assert [step for step in range(1, 5) if replays(settings, step)] == steps


# Residuals -----------------------------------------------------------------------------------------------------


def residual(run, name, step=STEP):
    """The mean of a residual over the replays of a step, the largest of its channels."""
    samples = collect(run, PROMPTS, range(2), step)
    scored = score(run, samples)
    stats, window = measure_replay(run, samples, scored, step)
    parts = Metrics(stats, window.metrics()).parts(f"residual_terms/{name}/{{}}")
    return max((mean for _, mean, _ in parts), key=abs, default=None)


IMAGES = {
    "brighter": (lambda images: images + 2, "image_level", 2.0),
    "more contrast": (lambda images: 1.05 * (images - 128) + 128, "image_contrast", 0.05),
    "blurred": (
        lambda images: torch.nn.functional.avg_pool2d(images.permute(0, 3, 1, 2), 3, 1, 1).permute(
            0, 2, 3, 1
        ),
        "image_detail",
        -1.1,
    ),
    "red and blue exchanged": (lambda images: images.flip(-1), "image_channels", 1.0),
}


@pytest.mark.parametrize("fault", IMAGES)
def test_a_residual_of_images_is_the_size_of_its_fault(fault, make_training):
    change, name, size = IMAGES[fault]
    run = make_training(path="tiny_ocr")
    assert abs(residual(run, name)) < 1e-3
    returning(images=lambda rollout: change(rollout.images.float()).round().clamp(0, 255).byte())(run.engine)
    assert residual(run, name) == pytest.approx(size, rel=0.3)


def test_a_residual_of_the_path_is_the_size_of_its_fault(make_training, monkeypatch):
    run, true = make_training(sampling={"sde_window_range": (2, 4)}), sde.initial_noise
    assert abs(residual(run, "path_before")) < 1e-5
    assert abs(residual(run, "path_after")) < 1e-5
    sample = run.engine.sample

    def larger(*args, **kwargs):
        with monkeypatch.context() as patch:
            patch.setattr(sde, "initial_noise", lambda *args, **kwargs: 1.02 * true(*args, **kwargs))
            return sample(*args, **kwargs)

    run.engine.sample = larger
    assert residual(run, "path_before") == pytest.approx(0.02, rel=0.5)
    run.engine.sample = lambda *args, **kwargs: shorter(sample(*args, **kwargs))
    assert residual(run, "path_after") == pytest.approx(-0.05, rel=0.3)


def shorter(rollout):
    """The way after the window ends early."""
    last = rollout.window.next_latents[:, -1]
    return replace(rollout, final_latents=last + 0.95 * (rollout.final_latents - last))


def test_stale_weights_are_compared_where_they_sampled(make_training):
    run = make_training(staleness=1)
    assert abs(residual(run, "velocity_length")) < 1e-5
    assert (
        residual(make_training(), "velocity_length") is None
    )  # each training step measures it of all samples


RUNS = {
    "nothing": (lambda engine: None, None),
    "step noise 1 % too large": (noisy(lambda noise: 1.01 * noise), "step_noise"),
    "red and blue exchanged": (returning(images=lambda rollout: rollout.images.flip(-1)), "image_channels"),
    "the VAE's scale 10 % off": (
        vae_configured(lambda vae: {"scaling_factor": 1.1 * vae.scaling_factor}),
        "image_level",
    ),
}


@pytest.mark.parametrize("fault", RUNS)
def test_a_run_in_bfloat16_with_guidance_names_a_fault_within_four_steps(fault, make_training):
    plant, rule = RUNS[fault]
    run = make_training(
        path="tiny_ocr", model={"dtype": "bfloat16"}, sampling={"guidance_scale": 4.0}, dtype="bfloat16"
    )
    plant(run.engine)
    monitor, named = None, set()
    for step in range(1, 5):
        metrics = train_step(run, step, lambda phase: None).metrics.compute()
        monitor = monitor or HealthMonitor(units_of(run.config, metrics))
        named |= {finding.cause for finding in monitor.update(metrics)}
        if rule in named:
            break
    found = named & set(RESIDUALS)
    assert rule in found if rule else not found
