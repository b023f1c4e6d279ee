"""The flow against densities, quadrature, full latents and its own closed forms: then its table can be trusted."""

from __future__ import annotations

import csv
import math
from dataclasses import replace

import linear_flow as ground
import pytest
import torch
from linear_flow import LinearFlow
from torch.distributions import Normal, kl_divergence

from flowcorr import sde
from flowcorr.algorithm import (
    apply_bypass_mode_to_diffusion_batch,
    apply_rollout_correction_to_diffusion_batch,
    diffusion_loss,
)
from flowcorr.algorithm.terms import batch_terms
from flowcorr.config.schema import ActorConfig
from flowcorr.correction import PRESETS, RolloutCorrectionConfig
from flowcorr.errors import ConfigError
from flowcorr.records import ActorBatch, Scores
from tests.examples.scripts import load
from tests.rollouts import make_rollout

SAMPLES = 20000
ARMS = {f"{arm.name}-{arm.scale}": arm for arm in ground.arms()}


def within(values: torch.Tensor, expected: float | torch.Tensor, errors: float = 5.0) -> bool:
    """Whether the mean over the first axis is as expected, within so many standard errors."""
    deviation = (values.mean(0) - expected).abs()
    return bool((deviation <= errors * values.std(0) / math.sqrt(len(values))).all())


def uncapped(level: str | None, scale: str) -> RolloutCorrectionConfig:
    if level is None:
        return RolloutCorrectionConfig()
    return RolloutCorrectionConfig(
        rollout_is=level, rollout_is_threshold=math.inf, log_ratio_scale=scale, rollout_rs_denominator="all"
    )


@pytest.mark.parametrize("num_elements", [16, 512, 16384])
@pytest.mark.parametrize("alignment", [0.0, 0.3, -1.0])
def test_log_ratio_is_normal_with_the_mean_and_spread_of_the_closed_form(num_elements, alignment):
    flow = LinearFlow(num_elements=num_elements, r=0.03, alignment=alignment)
    trajectories = ground.simulate(flow, ground.draw(SAMPLES, 2))
    delta = trajectories.target_log_prob - trajectories.rollout_log_prob
    z = ((delta + flow.r**2 / 2) * math.sqrt(num_elements) / flow.r).flatten()
    assert within(z, 0.0)
    assert within(z.square(), 1.0)
    assert within(z**3, 0.0)
    assert within(z**4, 3.0)
    steps = (torch.arange(len(z)) + 0.5) / len(z)  # Kolmogorov-Smirnov; 1.95 is exceeded once in a thousand
    assert (torch.special.ndtr(z.sort().values) - steps).abs().max() * math.sqrt(len(z)) < 1.95


def test_half_r_squared_is_the_exact_kl_a_latent_element():
    flow = LinearFlow(num_elements=16, r=0.2, alignment=0.4)
    shifted = Normal(flow.shift, torch.ones(3, dtype=torch.float64))
    exact = kl_divergence(shifted, Normal(torch.zeros(3, dtype=torch.float64), 1.0)).sum() / 16
    assert float(exact) == pytest.approx(flow.r**2 / 2, rel=1e-12)


@pytest.mark.parametrize(
    ("num_elements", "num_steps", "r"), [(16, 1, 0.1), (512, 2, 0.02), (16384, 10, 0.003)]
)
def test_chi_squared_is_that_of_the_densities(num_elements, num_steps, r):
    # Along the shift's direction both policies are normals of unit variance, sqrt(D) r apart.
    x = torch.linspace(-15, 15, 60001, dtype=torch.float64)
    target, rollout = Normal(0 * x[0], 1.0), Normal(r * math.sqrt(num_elements) + 0 * x[0], 1.0)
    square = torch.trapezoid((2 * target.log_prob(x) - rollout.log_prob(x)).exp(), x)
    flow = LinearFlow(num_elements=num_elements, num_steps=num_steps, r=r)
    assert 1 + ground.chi_squared(flow) == pytest.approx(float(square) ** num_steps, rel=1e-9)
    assert ground.chi_squared(flow) == pytest.approx(math.expm1(num_steps * num_elements * r**2))


@pytest.mark.parametrize("scale", ["mean", "sqrt", "sum"])
def test_effective_sample_size_is_the_expected_one(scale):
    flow = LinearFlow(num_elements=64, num_steps=3, r=0.04)
    trajectories = ground.simulate(flow, ground.draw(SAMPLES, 3, seed=1))
    weights = ground.estimate(flow, trajectories, uncapped("sequence", scale)).metrics
    measured = 1 / weights["rollout_corr/rollout_is_eff_sample_size"] - 1
    assert measured == pytest.approx(ground.chi_squared(flow, scale), rel=0.08)


@pytest.mark.parametrize(("num_elements", "r"), [(16, 0.1), (512, 0.05), (16384, 0.03)])
def test_mean_capped_weight_is_that_of_a_log_normal(num_elements, r):
    flow = LinearFlow(num_elements=num_elements, num_steps=2, r=r)
    config = RolloutCorrectionConfig.from_preset("decoupled_seq_is", log_ratio_scale="sum")
    trajectories = ground.simulate(flow, ground.draw(SAMPLES, 2, seed=2))
    mean = ground.estimate(flow, trajectories, config).metrics["rollout_corr/rollout_is_mean"]
    nats = 2 * num_elements * r**2  # variance of the log-weight, whose mean is minus half of it
    spread, edge, phi = math.sqrt(nats), math.log(2.0), Normal(0.0, 1.0).cdf

    def below(shift: float) -> float:
        return float(phi(torch.tensor((edge + shift) / spread)))

    expected = below(-nats / 2) + 2 * (1 - below(nats / 2))  # E[w; w < 2] + 2 P(w > 2)
    assert mean == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("num_steps", [1, 2, 10])
def test_truth_is_the_pathwise_gradient_of_the_target_policy(num_steps):
    noise, steps = ground.draw(SAMPLES, num_steps, seed=3), ground.steps_of(num_steps)
    theta = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    sigmas = torch.linspace(1, 0, ground.SCHEDULE_STEPS + 1, dtype=torch.float64)
    latents = noise.start.clone()
    for t in range(num_steps):
        sigma, sigma_next = sigmas[t].expand(SAMPLES), sigmas[t + 1].expand(SAMPLES)
        velocity = ground.velocity(latents, theta, sigmas[t])
        step = sde.transition("sde", latents, velocity, sigma, sigma_next, ground.NOISE_LEVEL)
        latents = sde.sample(step, noise.steps[:, t, :2])
    y = latents * steps.reach[-1]  # a unit at the last step's end is a unit of the last latent
    assert within(y.detach().square(), 1.0)
    rewards = y[:, 0] - y.square().sum(1) / 2
    # Of this linear flow, d y / d theta is the same for every sample: the reward's slope carries all the noise.
    (lever,) = torch.autograd.grad(y[:, 0].mean(), theta, retain_graph=True)
    (gradient,) = torch.autograd.grad(rewards.mean(), theta)
    flow = LinearFlow(num_elements=16, num_steps=num_steps)
    assert float(lever[0]) == pytest.approx(float(flow.truth[0]), rel=1e-9)
    assert (gradient - flow.truth).abs().max() < 5 * float(lever[0]) / math.sqrt(SAMPLES)


@pytest.mark.parametrize("level", [None, "token", "sequence", "geometric"])
@pytest.mark.parametrize("scale", ["mean", "sqrt", "sum"])
def test_estimates_have_the_expectation_of_the_closed_form(level, scale):
    flow = LinearFlow(num_elements=16, num_steps=3, r=0.08, alignment=-0.8)
    trajectories = ground.simulate(flow, ground.draw(60000, 3, seed=4))
    estimates = ground.estimate(flow, trajectories, uncapped(level, scale))
    assert within(estimates.batches(1), ground.expected_gradient(flow, level, scale))
    assert within(trajectories.twin, flow.truth)


def test_closed_form_says_what_weights_can_fix():
    flow = LinearFlow(num_elements=512, num_steps=2, r=0.02, alignment=1.0)
    bias = {
        level: ground.expected_gradient(flow, level) - flow.truth for level in (None, "token", "sequence")
    }
    assert bias["sequence"].abs().max() < 1e-12
    assert 0 < bias["token"].norm() < bias[None].norm()
    one_step = replace(flow, num_steps=1)
    torch.testing.assert_close(ground.expected_gradient(one_step, "token"), one_step.truth)
    linear = replace(flow, curvature=0.0)  # its gradient is the same wherever the samples come from
    torch.testing.assert_close(ground.expected_gradient(linear), linear.truth)


def test_token_weights_leave_the_share_of_the_other_steps():
    flow = LinearFlow(num_elements=512, num_steps=2, r=0.01, alignment=1.0)
    steps, shift = ground.steps_of(2), flow.shift[:2]
    travel, part = steps.reach * steps.std, steps.reach * steps.lever
    # The term of a step sees the other step's shift, in the states before it or in the steps after it.
    left = -(part * travel.flip(0)).sum() * shift
    torch.testing.assert_close(ground.expected_gradient(flow, "token") - flow.truth, left)


@pytest.mark.parametrize("name", ARMS)
def test_without_mismatch_every_correction_is_the_uncorrected_gradient(name):
    flow = LinearFlow(num_elements=512, num_steps=2)
    trajectories = ground.simulate(flow, ground.draw(256, 2))
    estimates = ground.estimate(flow, trajectories, ARMS[name].config)
    torch.testing.assert_close(estimates.gradient, trajectories.twin, rtol=1e-9, atol=1e-12)
    quality = ground.assess(flow, trajectories, estimates, 16)
    assert (quality.kept, quality.mean_weight, quality.ess) == (1.0, 1.0, 1.0)
    assert quality.bias == pytest.approx(0.0, abs=1e-9)
    assert quality.worth == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize("by_state", [False, True])
@pytest.mark.parametrize("name", ARMS)
def test_estimate_is_the_gradient_of_the_trainers_loss_on_full_latents(name, by_state):
    """All `D` elements, the SDE's own log-probs, the batch functions and autograd down to `theta`."""
    config, samples, num_steps = ARMS[name].config, 24, 3
    flow = LinearFlow(num_elements=16, num_steps=num_steps, r=0.02, alignment=0.6, by_state=by_state)
    noise = ground.draw(samples, num_steps, seed=5)
    trajectories = ground.simulate(flow, noise)

    generator = torch.Generator().manual_seed(6)
    basis = torch.linalg.qr(torch.randn(16, 16, dtype=torch.float64, generator=generator)).Q
    rest = torch.randn(samples, num_steps, 13, dtype=torch.float64, generator=generator)
    noises = torch.cat((noise.steps, rest), -1) @ basis.T
    starts = torch.cat((noise.start, torch.randn(samples, 14, dtype=torch.float64, generator=generator)), -1)
    theta = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    data_mean = basis[:, :2] @ theta
    sigmas = torch.linspace(1, 0, ground.SCHEDULE_STEPS + 1, dtype=torch.float64).expand(samples, -1)

    latents, steps, drifted_steps = [starts @ basis.T], [], []
    for t in range(num_steps):
        velocity = ground.velocity(latents[-1], data_mean, sigmas[0, t])
        step = sde.transition(
            "sde", latents[-1], velocity, sigmas[:, t], sigmas[:, t + 1], ground.NOISE_LEVEL
        )
        shift = trajectories.shift[:, t] @ basis[:, :3].T
        drifted = replace(step, mean=step.mean.detach() + step.std[:, None] * shift)
        latents.append(sde.sample(drifted, noises[:, t]))
        drifted_steps.append(drifted)
        steps.append(step)
    log_prob, rollout_log_prob = (
        torch.stack([sde.log_prob(latents[t + 1], taken[t]) for t in range(num_steps)], 1)
        for taken in (steps, drifted_steps)
    )
    torch.testing.assert_close(
        log_prob.detach() - rollout_log_prob,
        trajectories.target_log_prob - trajectories.rollout_log_prob,
        rtol=1e-9,
        atol=1e-12,
    )

    index = torch.arange(num_steps).expand(samples, -1)
    rollout = make_rollout(
        samples,
        num_steps,
        latents=torch.stack(latents[:-1], 1),
        next_latents=torch.stack(latents[1:], 1),
        step_indices=index,
        sigmas=sigmas[:, :num_steps],
        sigmas_next=sigmas[:, 1 : num_steps + 1],
        log_probs=rollout_log_prob,
        means=torch.stack([step.mean for step in drifted_steps], 1),
        stds=torch.stack([step.std for step in drifted_steps], 1),
    )
    batch = ActorBatch(
        rollout=rollout,
        advantages=trajectories.advantage,
        old_log_probs=log_prob.detach(),
        old_means=torch.stack([step.mean.detach() for step in steps], 1),
    )
    if config.bypass_mode:
        batch = apply_bypass_mode_to_diffusion_batch(batch)
    else:
        batch, _ = apply_rollout_correction_to_diffusion_batch(batch, config)
    scores = Scores(
        log_probs=log_prob,
        means=torch.stack([step.mean for step in steps], 1),
        stds=torch.stack([step.std for step in steps], 1),
    )
    terms = batch_terms(batch, scores, centres=config.score_centering)
    if config.bypass_mode and config.bypass_scope == "step":
        terms = terms.per_term()
    actor = ActorConfig(clip_ratio=ground.DEFAULT_CLIP, adv_clip_max=1e9)
    loss = diffusion_loss(terms, actor, config, num_steps=num_steps)
    (gradient,) = torch.autograd.grad(loss.mean(config.rollout_rs_denominator), theta, allow_unused=True)
    expected = ground.estimate(flow, trajectories, config).batches(samples)[0]
    torch.testing.assert_close(-gradient * 16 * num_steps, expected, rtol=1e-6, atol=1e-9)
    if ARMS[name].scale in ("-", "mean"):  # wider scales may reject all of so few samples
        assert expected.abs().max() > 0


@pytest.mark.parametrize(
    ("bypass", "decoupled"),
    [
        ("bypass_pg_is", "decoupled_seq_is"),
        ("bypass_pg_token_icepop", "decoupled_token_icepop"),
        ("bypass_pg_geo_rs_seq_tis", "decoupled_geo_rs_seq_tis"),
    ],
)
def test_reinforce_in_bypass_is_decoupled_at_the_first_update(bypass, decoupled):
    flow = LinearFlow(num_elements=512, r=0.02, alignment=0.5)
    trajectories = ground.simulate(flow, ground.draw(256, 2))
    gradients = [
        ground.estimate(flow, trajectories, RolloutCorrectionConfig.from_preset(name, log_ratio_scale="sum"))
        for name in (bypass, decoupled)
    ]
    torch.testing.assert_close(gradients[0].gradient, gradients[1].gradient, rtol=1e-9, atol=1e-12)


def test_batches_divide_by_the_terms_that_count():
    estimates = ground.Estimates(
        gradient=torch.tensor([[1.0, 0.0], [5.0, 2.0], [5.0, 5.0], [0.0, 0.0], [9.0, 9.0]]),
        counted=torch.tensor([2, 2, 0, 0, 2]),
        metrics={},
        num_steps=2,
    )
    assert estimates.batches(2).tolist() == [[3.0, 1.0], [10.0, 10.0]]


def test_halved_gradient_is_biased_and_worth_as_much():
    flow = LinearFlow(num_elements=512)
    trajectories = ground.simulate(flow, ground.draw(4096, 2))
    whole = ground.estimate(flow, trajectories, RolloutCorrectionConfig())
    quality = ground.assess(flow, trajectories, replace(whole, gradient=whole.gradient / 2), 32)
    assert quality.bias_along == pytest.approx(-0.5, abs=1e-9)
    assert quality.bias_across == pytest.approx(0.0, abs=1e-9)
    assert quality.variance == pytest.approx(quality.on_policy_variance / 4)
    assert quality.mse == pytest.approx(quality.variance + 0.25, abs=5 * quality.mse_se)
    assert quality.worth == pytest.approx(1.0)


def test_half_the_samples_are_worth_a_half():
    flow = LinearFlow(num_elements=512)
    trajectories = ground.simulate(flow, ground.draw(40000, 2, seed=7))
    whole = ground.estimate(flow, trajectories, RolloutCorrectionConfig())
    every_other = (torch.arange(40000) % 2)[:, None] * whole.gradient * 2
    quality = ground.assess(flow, trajectories, replace(whole, gradient=every_other), 40)
    assert abs(quality.bias_along) < 5 * quality.bias_along_se
    assert quality.worth == pytest.approx(0.5, abs=5 * quality.worth_se)
    assert quality.worth_se < 0.05


def test_centering_leaves_the_bias_and_lowers_the_variance():
    """One shift for all states, and advantages of mean 0, which cancel what centering subtracts."""
    flow = LinearFlow(num_elements=16384, num_steps=2, r=0.1, alignment=-1.0)
    trajectories = ground.simulate(flow, ground.draw(8192, 2, seed=11))
    plain, centred, exact, centred_exact = (
        ground.assess(flow, trajectories, ground.estimate(flow, trajectories, ARMS[name].config), 64)
        for name in ("disabled--", "centred--", "decoupled_token_is-sum", "centred_token_is-sum")
    )
    assert abs(plain.bias_along - centred.bias_along) < 4 * plain.bias_along_se
    assert centred.variance < 0.6 * plain.variance
    assert centred_exact.variance == pytest.approx(exact.variance)  # exact weights leave nothing to centre


@pytest.mark.parametrize("num_steps", [1, 2, 10])
@pytest.mark.parametrize(("r", "alignment"), [(0.01, 1.0), (0.02, -1.0), (0.03, 0.3)])
def test_a_shift_by_state_has_the_bias_of_the_closed_form(num_steps, r, alignment):
    flow = LinearFlow(num_elements=64, num_steps=num_steps, r=r, alignment=alignment, by_state=True)
    trajectories = ground.simulate(flow, ground.draw(60000, num_steps, seed=12))
    assert within(trajectories.advantage, 0.0)
    for name, centred in (("disabled--", False), ("centred--", True)):
        estimates = ground.estimate(flow, trajectories, ARMS[name].config)
        assert within(estimates.batches(1), ground.expected_gradient_by_state(flow, centred=centred))


def test_centering_takes_most_of_the_bias_of_a_shift_by_state():
    """The drift goes: all of it in a window of one step. Later steps stay the engine's."""
    flow = LinearFlow(num_elements=512, num_steps=2, r=0.01, alignment=1.0, by_state=True)

    def bias(flow, *, centred):
        return (
            ground.expected_gradient_by_state(flow, centred=centred) - flow.truth
        ).norm() / flow.truth.norm()

    assert bias(flow, centred=True) < 0.2 * bias(flow, centred=False)
    one_step = replace(flow, num_steps=1)
    assert bias(one_step, centred=True) < 1e-12
    assert bias(one_step, centred=False) > 0.1


def test_a_shift_by_state_has_mean_0_and_the_same_size_as_one_for_all_states():
    flow = LinearFlow(num_elements=512, num_steps=3, r=0.001, alignment=0.5, by_state=True)
    shift = ground.simulate(flow, ground.draw(SAMPLES, 3, seed=13)).shift
    assert within(shift.flatten(1), 0.0)
    assert within(shift.square().sum(2) / 512, flow.r**2)


def test_arms_cover_every_preset_that_is_no_alias():
    names = {arm.name for arm in ARMS.values()}
    assert names - {"exact_seq_is", *ground.CENTRED.values()} == set(PRESETS)
    assert {arm.scale for arm in ARMS.values()} == {"-", "mean", "sqrt", "sum"}


@pytest.mark.parametrize(
    "bad", [{"num_elements": 2}, {"num_steps": 0}, {"num_steps": 11}, {"r": -0.1}, {"alignment": 1.5}]
)
def test_bad_settings_are_refused(bad):
    (key,) = bad
    with pytest.raises(ConfigError, match=key):
        LinearFlow(**{"num_elements": 16, **bad})


def test_unknown_level_is_refused():
    with pytest.raises(ConfigError, match=r"'sequense' .* sequence\?"):
        ground.expected_gradient(LinearFlow(num_elements=16), "sequense")


@pytest.mark.system
def test_example_writes_its_files(tmp_path, monkeypatch, capsys):
    example = load("ground_truth/run")
    monkeypatch.setattr(example, "WINDOWS", (2,))
    monkeypatch.setattr(example, "SIZES", (512, 16384))
    pictures = []
    monkeypatch.setattr("matplotlib.pyplot.close", pictures.append)
    example.main(tmp_path, samples=2048, shifts=[1e-2, 3e-2])
    with (tmp_path / "ground_truth.csv").open() as file:
        rows = list(csv.DictReader(file))
    settings = 1 + 2 * (2 + 2 + 2)  # none; in a random direction at two sizes, ahead, behind; by state
    assert len(rows) == settings * len(ARMS) * len(example.BATCHES)
    uncorrected = [row for row in rows if row["preset"] == "disabled" and row["n"] == "64"]
    for row in uncorrected:
        assert float(row["bias"]) == pytest.approx(
            float(row["exact_bias_none"]), abs=5 * float(row["bias_se"])
        )
    assert "\n| uncorrected" in (tmp_path / "table.md").read_text()
    assert (tmp_path / "ground_truth.png").stat().st_size > 10_000
    for axes in pictures[0].axes:
        highest = max(max(line.get_ydata()) for line in axes.lines)
        assert highest < axes.get_ylim()[1], axes.get_title()  # nothing is cut off
    assert str(tmp_path) in capsys.readouterr().out
