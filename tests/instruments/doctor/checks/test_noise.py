import math
from dataclasses import replace

import pytest
import torch
from instruments.doctor.faults import assert_named, check, jitter, separate

from flowcorr import sde
from flowcorr.instruments.doctor.checks import noise as checks
from flowcorr.instruments.doctor.checks.noise import check_captured_noise, check_noise
from flowcorr.instruments.doctor.exam import Exam
from flowcorr.instruments.doctor.trials import run_trials
from flowcorr.instruments.page import exit_code
from flowcorr.questions.question import ERRORS
from tests.planted.plants import forgets_the_seed, seeds_by_place, uniform

TRUE = sde.step_noise


def for_all_steps(*args, **kwargs):
    return TRUE(*args, **{**kwargs, "step_index": 0})


def for_all_training_steps(*args, **kwargs):
    return TRUE(*args, **{**kwargs, "training_step": 0})


def for_all_images(shape, groups, members, **kwargs):
    return TRUE(shape, groups, [0] * len(members), **kwargs)


def for_all_prompts(shape, groups, members, **kwargs):
    return TRUE(shape, [0] * len(groups), members, **kwargs)


def scaled(factor):
    return lambda *args, **kwargs: factor * TRUE(*args, **kwargs)


def shifted(amount):
    return lambda *args, **kwargs: TRUE(*args, **kwargs) + amount


FAULTS = {
    "one for all steps": (for_all_steps, {}, "correlation over the steps of a sample"),
    "one for all training steps": (for_all_training_steps, {}, "correlation over training steps"),
    "one for all images of a prompt": (for_all_images, {}, "correlation over the images of a prompt"),
    "one for all images, from one initial noise": (
        for_all_images,
        {"rollout": {"same_initial_noise": True}},
        "correlation over the images of a prompt",
    ),
    "one for all prompts": (for_all_prompts, {}, "correlation over prompts"),
    "none at all": (scaled(0.0), {}, "std"),
    "a tenth too large": (scaled(1.1), {}, "std"),
    "off its mean": (shifted(0.1), {}, "mean"),
    "uniform": (lambda *args, **kwargs: uniform(TRUE(*args, **kwargs)), {}, "fourth moment"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_other_noise(small_run, monkeypatch, fault):
    noise, sections, named = FAULTS[fault]
    run = small_run(**sections)
    monkeypatch.setattr(sde, "step_noise", noise)
    assert_named(check(run, run.engine), "noise", fault=named)


def test_one_initial_noise_of_a_prompt_is_no_fault(small_run):
    run = small_run(rollout={"same_initial_noise": True})
    assert check(run, run.engine).causes() == []


class Drawn:
    """The noise of two rollouts, as `check_noise` sees it: latents of unit stds around means of 0."""

    def __init__(self, run, samples, change):
        trials = run_trials(run.actor, run.engine, run.conditioning)
        draw = torch.Generator().manual_seed(1)
        self.exam = Exam(
            actor=run.actor,
            engine=run.engine,
            trials=replace(
                trials,
                base=self.trial(trials.base, samples, change, draw),
                moved=self.trial(trials.moved, samples, change, draw),
            ),
        )

    @staticmethod
    def trial(trial, samples, change, draw):
        rollout = trial.rollout
        repeats = samples // rollout.num_samples
        latents = rollout.window.latents.repeat_interleave(repeats, 0)
        rollout = rollout.select(torch.arange(rollout.num_samples).repeat_interleave(repeats))
        window = replace(
            rollout.window,
            next_latents=change(torch.randn(latents.shape, generator=draw)),
            means=torch.zeros_like(latents),
            stds=torch.ones(latents.shape[:2]),
        )
        return replace(trial, rollout=replace(rollout, window=window))


@pytest.mark.parametrize(
    ("samples", "deviation", "status"),
    [
        (4, 0.0, "healthy"),
        (160, 0.0, "healthy"),
        (16, 0.05, "serious"),
        (4, 0.01, "healthy"),
        (400, 0.01, "serious"),
    ],
)
def test_the_smallest_deviation_depends_on_the_elements(shared_run, samples, deviation, status):
    """Two rollouts of B samples with 2 steps of 512 elements: 1 % shows with B = 400, and 5 % with B = 16."""
    finding = check_noise(Drawn(shared_run, samples, lambda noise: (1 + deviation) * noise).exam)
    assert finding.level == status
    if not deviation:
        smallest = ERRORS / math.sqrt(2 * 2 * samples * 2 * 512)
        assert finding.numbers["least_std_error"] == pytest.approx(smallest)


def test_false_alarms_are_rare(shared_run):
    """1000 exams of right noise reach `z = 6` in none; their limit is `checks.FALSE_ALARMS` of them."""
    draw = torch.Generator().manual_seed(0)
    largest = 0.0
    for _ in range(1000):
        noise = torch.randn(16, 64, generator=draw)
        correlation, _ = checks.largest_correlation(noise)
        largest = max(largest, math.sqrt(-63 * math.log(1 - correlation**2)))
    assert 3.0 < largest < math.sqrt(2 * math.log(120 / checks.FALSE_ALARMS))


def test_noise_without_a_seed(small_run):
    run = small_run()
    engine = separate(run)
    forgets_the_seed(engine)
    assert_named(check(run, engine), "determinism")


def test_noise_by_place_in_the_batch(small_run):
    run = small_run()
    engine = separate(run)
    seeds_by_place(engine)
    assert_named(check(run, engine), "batch_shape")


def test_kernels_without_a_fixed_order_warn(small_run):
    run = small_run()
    engine = separate(run)
    jitter(1e-6)(engine)
    report = check(run, engine)
    assert report.causes("warning") == ["determinism"]
    assert exit_code(report) == 1


# Captured samples ------------------------------------------------------------------------------------------


def test_noise_of_a_step_before(captured_of):
    found = check_captured_noise(captured_of(earlier={1: captured_of().stack.samples}))
    assert (found.cause, found.numbers["drawn_at_step"]) == ("noise_reused", 1)


def test_samples_of_one_prompt_may_share_their_noise(captured_of, captured):
    same = captured["initial_noise"].clone()
    same[1] = same[0]
    found = check_captured_noise(captured_of(initial_noise=same, prompts=("cat", "cat", "sun", "bee") * 2))
    assert found.level == "healthy"


@pytest.mark.parametrize(("errors", "level"), [(5.0, "healthy"), (7.0, "serious")])
def test_noise_that_samples_share_is_as_uncertain_as_one_draw(errors, level, captured_of, captured):
    """Four samples of one noise, whose mean is so many standard errors of a single draw away from 0."""
    drawn = captured["initial_noise"][:1]
    drawn = (drawn - drawn.mean()) / drawn.std() + errors / math.sqrt(drawn.numel())
    found = check_captured_noise(captured_of(initial_noise=drawn.expand(8, -1, -1, -1), prompts=["cat"] * 8))
    assert found.level == level


def test_noise_that_is_not_standard_normal(captured_of, captured):
    found = check_captured_noise(captured_of(initial_noise=captured["initial_noise"] * 1.3))
    assert (found.cause, found.level) == ("noise_scale", "serious")
