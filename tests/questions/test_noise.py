"""The step noise as the actor's means show it: right in every mode, and each fault at the first training step."""

import math
from dataclasses import replace

import pytest
import torch

from flowcorr import sde
from flowcorr.correction import RolloutCorrectionConfig
from flowcorr.health.rule import Units
from flowcorr.metrics import Metrics
from flowcorr.questions.ask import ask
from flowcorr.questions.compared import Compared
from flowcorr.questions.noise import FirstScores, WindowResiduals, scored_by_sampler
from flowcorr.questions.question import STEP_NOISE
from flowcorr.questions.residual_terms import RESIDUALS
from tests.judging import examine_step
from tests.planted.plants import uniform

STEP = 1
NAMES = {f"rollout/noise_{name}" for name in ("std", "mean", "tails", "shared_by", "z_max")} | {
    "rollout/velocity_distance"
}


def compared(run, rollout, scores):
    return Compared(rollout=rollout, actor=run.actor, training_step=STEP, given_scores=scores)


def measured(run, rollout=None):
    """`rollout/noise_*` of the pass that computes old log-probs, and the gap that goes with it."""
    rollout = run.sample(with_means=False) if rollout is None else rollout
    first_scores = FirstScores(rollout, run.actor, STEP)
    scores = run.actor.log_probs(rollout, observe=first_scores)
    gap = (scores.log_probs - rollout.log_probs).abs().mean().item()
    return {**first_scores.metrics().compute(), "rollout_corr/logprob_abs_diff_mean": gap}


def named(run, values):
    rollout = run.config.rollout
    terms = rollout.prompts_per_step * rollout.n * run.config.sampling.sde_window_size
    elements = run.engine.plan.latent_shape
    return [
        finding.cause
        for finding in examine_step(values, Units(num_terms=terms, num_elements=math.prod(elements)))
    ]


@pytest.mark.parametrize(
    "sampling", [{}, {"sde_type": "cps", "noise_level": 0.5, "cps_unscaled": True}, {"sde_type": "dance_sde"}]
)
def test_noise_of_a_healthy_rollout(make_run, sampling):
    run = make_run(sampling=sampling)
    rollout = run.sample()
    values = measured(run, rollout)
    noise = (rollout.window.next_latents - rollout.window.means) / rollout.window.stds[..., None, None, None]
    noise = noise.double()
    assert values["rollout/noise_std"] == pytest.approx(
        (noise.square().sum() / (noise.numel() - 1)).sqrt().item(), rel=1e-4
    )
    assert values["rollout/noise_mean"] == pytest.approx(noise.mean().item(), abs=1e-5)
    tails = (noise**4 - 6 * noise**2 + 3).mean().item()
    assert values["rollout/noise_tails"] == pytest.approx(tails, abs=1e-3)
    together = noise.flatten(2).sum((0, 1)).square().mean().item()
    assert values["rollout/noise_shared_by"] == pytest.approx(together / noise.shape[:2].numel(), rel=1e-3)
    assert named(run, values) == []


@pytest.mark.parametrize("sampling", [{}, {"sde_type": "cps", "noise_level": 0.5}])
def test_a_longer_velocity_moves_step_means_by_as_large_a_share_of_its_distance(make_run, sampling):
    run = make_run(sampling=sampling)
    rollout = run.sample()
    scores = run.actor.log_probs(rollout, with_means=True)
    first_scores = FirstScores(rollout, run.actor, STEP)
    first_scores(rollout, scores)
    window = rollout.window
    still = sde.transition(
        run.config.sampling.sde_type,
        window.latents,
        0 * scores.means,
        window.sigmas,
        window.sigmas_next,
        run.config.sampling.noise_level,
    ).mean
    kl = sde.step_kl(scores.means + 0.01 * (scores.means - still), scores.means, scores.stds)
    distance = first_scores.metrics().compute()["rollout/velocity_distance"]
    assert (0.01 * distance) ** 2 / 2 == pytest.approx(kl.mean().item(), rel=1e-3)


def test_velocities_of_weights_that_did_not_sample_are_not_measured(make_run):
    run = make_run(rollout={"staleness": 1}, actor={"old_policy": "current"})
    assert "rollout/velocity_distance" not in measured(run)


@pytest.mark.parametrize("emulate", ["fp8", "int4"])
def test_rounding_is_no_fault_of_the_noise(make_run, emulate):
    run = make_run(rollout={"emulate": emulate, "n": 8}, sampling={"guidance_scale": 4.0})
    run.stir()
    values = measured(run)
    assert values["rollout_corr/logprob_abs_diff_mean"] > 1e-4
    assert named(run, values) == []


def larger(noise):
    return 1.1 * noise


FAULTS = {
    "a tenth too large": (larger, "noise_std", 1.1),
    "none at all": (lambda noise: 0 * noise, "noise_std", 0.0),
    "off its mean": (lambda noise: noise + 0.2, "noise_mean", 0.2),
    "uniform": (uniform, "noise_tails", -1.2),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_other_noise_is_named(make_run, monkeypatch, fault):
    change, rule, expected = FAULTS[fault]
    run = make_run(rollout={"n": 8})
    true = sde.step_noise
    monkeypatch.setattr(sde, "step_noise", lambda *args, **kwargs: change(true(*args, **kwargs)))
    values = measured(run)
    assert values[f"rollout/{rule}"] == pytest.approx(expected, abs=0.15)
    assert rule in named(run, values)


@pytest.mark.parametrize(("same", "sharing"), [("member", 4), ("step_index", 2), ("group", 2)])
def test_noise_that_is_shared(make_run, monkeypatch, same, sharing):
    """By the four images of a prompt, the two steps of a sample, or two ranks of which each counts its own prompts."""
    run, true = make_run(sampling={"height": 32, "width": 64}), sde.step_noise

    def shared(shape, groups, members, *, step_index, **kwargs):
        members = [0] * len(members) if same == "member" else members
        groups = [0] * len(groups) if same == "group" else groups
        return true(shape, groups, members, step_index=0 if same == "step_index" else step_index, **kwargs)

    monkeypatch.setattr(sde, "step_noise", shared)
    monkeypatch.setattr(sde, "draw_windows", lambda groups, *_, **__: torch.tensor([[0, 1]] * len(groups)))
    values = measured(run)
    assert values["rollout/noise_shared_by"] == pytest.approx(sharing, rel=0.4)
    assert named(run, values) == ["noise_shared"]


def test_terms_without_a_finite_score_are_left_out(make_run):
    run = make_run()
    rollout = run.sample()
    first_scores, some = (FirstScores(rollout, run.actor, STEP) for _ in range(2))
    scores = run.actor.log_probs(rollout, with_means=True)
    scores.log_probs[2, 1] = scores.means[2, 1] = math.nan
    first_scores(rollout, scores)
    for rows in (slice(0, 2), slice(3, None)):
        some(rollout.select(rows), scores.select(torch.arange(8)[rows]))
    first = rollout.select(slice(2, 3)).step(0)
    one = replace(scores, **{name: getattr(scores, name)[2:3, :1] for name in ("log_probs", "means", "stds")})
    some(first, one)
    assert first_scores.metrics().compute() == pytest.approx(some.metrics().compute(), rel=1e-5)


BYPASS = {"algorithm": {"rollout_correction": RolloutCorrectionConfig(bypass_mode=True)}}


def observed_in_update(run, batch):
    """The first scores that an update shows, and the number of terms that it shows."""
    first_scores, terms = FirstScores(batch.rollout, run.actor, STEP), []

    def observe(part, scores):
        terms.append(part.num_samples * part.num_steps)
        first_scores(part, scores)

    run.actor.update(batch, run.config.algorithm.rollout_correction, training_step=1, observe=observe)
    return first_scores, sum(terms)


@pytest.mark.parametrize("parts", [1, 2])
def test_bypass_observes_what_is_scored_before_the_first_optimizer_step(make_run, parts):
    run = make_run(actor={"mini_batches": parts, "micro_batch_size": 2}, **BYPASS)
    rollout = run.sample()
    batch = replace(run.batch(rollout), old_log_probs=rollout.log_probs)
    first_scores, seen = observed_in_update(run, batch)
    assert seen == rollout.log_probs.numel() // parts
    assert first_scores.metrics().compute().keys() == NAMES


def test_a_second_epoch_is_not_observed_where_the_first_took_no_optimizer_step(make_run):
    run = make_run(actor={"epochs": 2, "micro_batch_size": 2}, **BYPASS)
    rollout = run.sample()
    nothing = torch.zeros_like(rollout.log_probs, dtype=torch.bool)
    batch = replace(run.batch(rollout), old_log_probs=rollout.log_probs, keep=nothing)
    first_scores, seen = observed_in_update(run, batch)
    assert seen == rollout.log_probs.numel()
    once = FirstScores(rollout, run.actor, STEP)
    once(rollout, run.actor.log_probs(rollout, with_means=True))
    assert first_scores.metrics().compute() == pytest.approx(once.metrics().compute(), rel=1e-4)


SEEDED = {
    "a hundredth too large": lambda noise: 1.01 * noise,
    "of another sample": lambda noise: noise.roll(1, 0),
    "rotated": lambda noise: noise.roll(1, -1),
}


@pytest.mark.parametrize("emulate", ["none", "int4"])
@pytest.mark.parametrize("fault", SEEDED)
def test_noise_is_that_of_the_seeds_whatever_the_precision(make_run, fault, emulate):
    run = make_run(rollout={"n": 8, "emulate": emulate}, sampling={"guidance_scale": 4.0})
    run.stir()
    assert measured(run)["rollout/noise_z_max"] < 5
    draw = run.engine.step_noise
    run.engine.step_noise = lambda *ids, **seeds: SEEDED[fault](draw(*ids, **seeds))
    assert measured(run)["rollout/noise_z_max"] > (6 if emulate == "none" else 0)
    assert emulate == "int4" or "seeded_noise" in named(run, measured(run))


def test_latents_of_another_sample_are_named_in_one_batch(make_run):
    run = make_run(rollout={"emulate": "int4"}, sampling={"guidance_scale": 4.0})
    run.stir()
    rollout = run.sample()
    exchanged = rollout.window.next_latents.clone()
    exchanged[[0, 1]] = exchanged[[1, 0]]
    changed = replace(rollout, window=replace(rollout.window, next_latents=exchanged))
    assert measured(run, changed)["rollout/noise_z_max"] > 6


def test_the_noise_of_a_part_of_a_batch_is_judged_alike(make_run):
    """One question for all samples and for those of one worker: here all, so that the numbers are equal."""
    run = make_run()
    rollout = run.sample()
    latents = rollout.window.next_latents.clone()
    latents[0] += 0.1 * (latents[0] - rollout.window.latents[0])
    changed = replace(rollout, window=replace(rollout.window, next_latents=latents))
    scores = run.actor.log_probs(changed, with_means=True)
    one = compared(run, changed, scores)
    metrics = Metrics(ask(one, [STEP_NOISE])).compute()
    assert metrics["rollout/noise_z_max"] == pytest.approx(
        measured(run, changed)["rollout/noise_z_max"], rel=1e-5
    )
    assert one.noise_errors.shape == changed.log_probs.shape
    unscored = replace(scores, log_probs=scores.log_probs.clone().fill_(math.nan))
    assert compared(run, changed, unscored).noise_errors.count_nonzero() == 0


# Residuals -----------------------------------------------------------------------------------------------------


def residual_terms(run, change=None, *, size=slice(None), **which):
    """Mean of each residual of the window's steps, after `change` of the rollout."""
    config = run.config.rollout
    rollout = run.sample()
    rollout = replace(rollout, members=torch.arange(config.n).repeat(config.prompts_per_step))
    rollout = rollout if change is None else change(rollout)
    residuals = WindowResiduals(rollout, **{"noise": True, "velocity": True, **which})
    scores = run.actor.log_probs(rollout, with_means=True)
    parts = [torch.arange(rollout.num_samples)[size]] if size == slice(None) else torch.arange(8).split(size)
    for rows in parts:
        residuals.add(compared(run, rollout.select(rows), scores.select(rows)))
    metrics = Metrics(residuals.metrics())
    names = {name: metrics.parts(f"residual_terms/{name}/{{}}") for name in RESIDUALS}
    return {name: [mean for _, mean, _ in parts] for name, parts in names.items() if parts}


def test_residuals_of_a_healthy_window_are_rounding(make_run):
    for sampling in ({}, {"sde_type": "cps"}, {"sde_type": "dance_sde"}, {"guidance_scale": 4.0}):
        run = make_run(sampling=sampling)
        run.stir()
        found = residual_terms(run)
        assert set(found) == {"step_noise", "step_noise_rounding", "velocity_length", "velocity_common"}
        assert abs(found["step_noise"][0]) < 2e-5
        assert max(map(abs, found["step_noise_rounding"])) < 0.02
        assert abs(found["velocity_length"][0]) < 1e-5
        assert abs(found["velocity_common"][0]) < 1e-9


def test_a_residual_is_the_size_of_its_fault(make_run, monkeypatch):
    true, run = sde.step_noise, make_run()
    for change, noise, rounding in (
        (lambda noise: 1.01 * noise, 0.01, None),
        (lambda noise: noise.bfloat16().float(), 0, [1, None]),
        (lambda noise: noise.half().float(), 0, [None, 1]),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(
                sde, "step_noise", lambda *args, change=change, **seeds: change(true(*args, **seeds))
            )
            rollout = run.sample()
        found = residual_terms(run, lambda _, rollout=rollout: replace(_, window=rollout.window))
        assert found["step_noise"][0] == pytest.approx(noise, abs=2e-4)
        for expected, value in zip(rounding or [], found["step_noise_rounding"], strict=False):
            assert expected is None or value == pytest.approx(expected, abs=0.05)


def test_a_velocity_of_another_length_and_an_error_that_all_prompts_share(make_run):
    run = make_run()

    def longer(rollout):
        scores = run.actor.log_probs(rollout, with_means=True)
        window = rollout.window
        still = sde.transition(
            "sde", window.latents, torch.zeros_like(scores.means), window.sigmas, window.sigmas_next, 0.7
        )
        return replace(
            rollout,
            window=replace(window, next_latents=window.next_latents + 0.02 * (scores.means - still.mean)),
        )

    found = residual_terms(run, longer)
    assert found["velocity_length"][0] == pytest.approx(0.02, rel=1e-3)
    assert 1e-5 < found["velocity_common"][0] < 4e-4  # velocities are alike in part
    assert "velocity_length" not in residual_terms(run, longer, velocity=False)
    assert set(residual_terms(run, longer, noise=False)) == {"velocity_length", "velocity_common"}


def test_residuals_do_not_depend_on_the_parts_of_a_batch(make_run):
    run = make_run()
    run.stir()
    whole, parts = (residual_terms(run, size=size) for size in (slice(None), 3))
    for name, values in whole.items():
        assert parts[name] == pytest.approx(values, rel=1e-4, abs=1e-6)


def test_a_score_that_is_not_finite_leaves_the_residuals_of_the_others(make_run):
    run = make_run()
    rollout = run.sample()
    rollout = replace(rollout, members=torch.arange(4).repeat(2))
    scores = run.actor.log_probs(rollout, with_means=True)
    scores.log_probs[0] = scores.means[0] = math.nan
    residuals = WindowResiduals(rollout, noise=True, velocity=True)
    residuals.add(compared(run, rollout, scores))
    (count, mean, _), *_ = Metrics(residuals.metrics()).parts("residual_terms/step_noise/{}")
    assert (count, abs(mean) < 1e-6) == (2, True)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_group_without_a_finite_score_leaves_the_velocities_of_the_others(make_run, lost):
    run = make_run()
    prompts = {name: rows[[0, 1, 0]] for name, rows in run.conditioning.items()}
    rollout = run.engine.sample(prompts, range(3), training_step=1, with_means=True)
    rollout = replace(rollout, members=torch.arange(4).repeat(3))
    scores = run.actor.log_probs(rollout, with_means=True)
    rows = rollout.group_ids == lost
    scores.log_probs[rows] = scores.means[rows] = math.nan
    residuals = WindowResiduals(rollout, noise=False, velocity=True)
    residuals.add(compared(run, rollout, scores))
    ((count, mean, _),) = Metrics(residuals.metrics()).parts("residual_terms/velocity_common/{}")
    assert (count, abs(mean) < 1e-9) == (1, True)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"rollout": {"staleness": 1}}, False),
        ({"rollout": {"staleness": 1}, "actor": {"old_policy": "behaviour"}}, True),
    ],
)
def test_whose_velocities_are_compared(make_config, changes, expected):
    assert scored_by_sampler(make_config(**changes)) is expected
