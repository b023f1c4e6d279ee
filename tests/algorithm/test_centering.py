"""Score centering: gradients against formulas in float64, means against integrals."""

import math
from dataclasses import replace

import pytest
import torch

from flowcorr import sde
from flowcorr.algorithm import diffusion_loss
from flowcorr.algorithm.centering import mean_weight
from flowcorr.config.schema import ActorConfig
from flowcorr.correction import RolloutCorrectionConfig
from flowcorr.errors import BatchError, ConfigError
from flowcorr.records import Terms
from flowcorr.sde import Transition, centred_log_prob, log_prob, step_kl

SHAPE = (3, 2, 4)  # samples, steps, latent elements
SIZE = SHAPE[-1]
CAP = 1.05


class Problem:
    """Steps that `q` sampled, under an old policy and a current one, with means that have a graph."""

    def __init__(self, *, seed=0, bypass=False, unscaled=False, gap=0.1):
        draw = torch.Generator().manual_seed(seed)

        def random(*shape):
            return torch.randn(*shape, generator=draw, dtype=torch.float64)

        self.std = 0.4 + 0.1 * random(*SHAPE[:2]).square()
        full = self.std[..., None]
        self.rollout_mean = random(*SHAPE)
        self.old_mean = self.rollout_mean + gap * full * random(*SHAPE)
        self.mean = (self.old_mean + 0.05 * full * random(*SHAPE)).requires_grad_()
        self.following = self.rollout_mean + full * random(*SHAPE)
        self.advantage = random(SHAPE[0], 1).expand(SHAPE[:2])
        self.unscaled = unscaled
        old_mean = self.rollout_mean if bypass else self.old_mean
        self.terms = Terms(
            log_prob=self.scored(self.mean),
            old_log_prob=self.scored(old_mean),
            rollout_log_prob=self.scored(self.rollout_mean),
            advantage=self.advantage,
            std=self.std,
            step=torch.full(SHAPE[:2], 0.1, dtype=torch.float64),
            step_index=torch.arange(SHAPE[1]).expand(SHAPE[:2]),
            old_kl=step_kl(self.mean, old_mean, self.std),
            rollout_kl=step_kl(self.mean, self.rollout_mean, self.std),
            old_rollout_kl=step_kl(old_mean, self.rollout_mean, self.std),
            num_elements=SIZE,
        )

    def scored(self, mean):
        step = Transition(mean=mean, std=self.std, step=self.std)
        return log_prob(self.following, step, cps_unscaled=self.unscaled)

    def gradient(self, output):
        """Of a loss, in the means `[B, T, L]`."""
        return torch.autograd.grad(output.loss_sum, self.mean, retain_graph=True)[0]

    def slope(self, output):
        """Of a loss, in the log-probs `[B, T]`."""
        return torch.autograd.grad(output.loss_sum, self.terms.log_prob, retain_graph=True)[0]

    def score(self, centre):
        """`mean_L((x' - centre) / s^2 . grad mu)` as a gradient in the means."""
        unit = 2 * self.std.square() if self.unscaled else torch.ones_like(self.std)
        return (unit / self.std.square() / SIZE)[..., None] * (self.following - centre)


def correction(**keys):
    return RolloutCorrectionConfig(score_centering=True, **keys)


def without(chosen):
    return replace(chosen, score_centering=False, preset=None)


@pytest.mark.parametrize("unscaled", [False, True])
def test_a_centred_log_prob_has_the_value_of_the_plain_one_and_the_score_at_the_rollouts_mean(unscaled):
    problem = Problem(unscaled=unscaled)
    plain = problem.terms.log_prob
    centred = centred_log_prob(plain, problem.mean, problem.rollout_mean, problem.std, cps_unscaled=unscaled)
    assert torch.equal(centred, plain)
    gradient = torch.autograd.grad(centred.sum(), problem.mean)[0]
    torch.testing.assert_close(gradient, problem.score(problem.rollout_mean))


@pytest.mark.parametrize("kind", ["sde", "cps", "dance_sde"])
def test_it_holds_for_all_transitions(kind):
    """In the velocity, by its own formula: the std does not depend on it, and the mean is linear in it."""
    draw = torch.Generator().manual_seed(1)
    latents, velocity, other, noise = (
        torch.randn(2, 5, generator=draw, dtype=torch.float64) for _ in range(4)
    )
    levels = torch.tensor([0.8, 0.6], dtype=torch.float64), torch.tensor([0.7, 0.4], dtype=torch.float64)
    velocity.requires_grad_()
    step, rollout = (sde.transition(kind, latents, v, *levels, 0.7) for v in (velocity, other))
    following = sde.sample(rollout, noise)
    centred = centred_log_prob(log_prob(following, step), step.mean, rollout.mean, step.std)
    gradient = torch.autograd.grad(centred.sum(), velocity)[0]
    per_unit = torch.autograd.grad(
        sde.transition(kind, latents, velocity, *levels, 0.7).mean.sum(), velocity
    )[0]
    expected = per_unit * (following - rollout.mean) / rollout.std[:, None].square() / 5
    torch.testing.assert_close(gradient, expected)


LOSSES = {
    "flow_grpo": ActorConfig(clip_ratio=10.0),
    "flow_dppo": ActorConfig(loss_mode="flow_dppo", kl_threshold=1e9),
    "importance_cap": ActorConfig(loss_mode="importance_cap", importance_cap=100.0),
    "trajectory_sum": ActorConfig(clip_ratio=10.0, ratio_level="trajectory_sum"),
    "clipped": ActorConfig(clip_ratio=1e-3),
}


@pytest.mark.parametrize("unscaled", [False, True])
@pytest.mark.parametrize("bypass", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_of_every_loss_is_its_slope_times_the_centred_score(name, bypass, unscaled):
    problem = Problem(bypass=bypass, unscaled=unscaled)
    scope = "trajectory" if bypass else "step"
    chosen = correction(bypass_mode=bypass, bypass_scope=scope)
    plain, centred = (
        diffusion_loss(problem.terms, LOSSES[name], one, cps_unscaled=unscaled)
        for one in (without(chosen), chosen)
    )
    assert torch.equal(plain.loss_sum, centred.loss_sum)
    expected = problem.slope(plain)[..., None] * problem.score(problem.rollout_mean)
    torch.testing.assert_close(problem.gradient(centred), expected)
    clipped = problem.slope(plain) == 0
    assert bool(clipped.any()) == (name == "clipped")
    assert not problem.gradient(centred)[clipped].any()  # a clipped term gets no correction


@pytest.mark.parametrize("scale", ["mean", "sqrt", "sum", 2.5])
@pytest.mark.parametrize("cap", [CAP, math.inf])
@pytest.mark.parametrize("normalized", [False, True])
def test_of_weighted_terms_the_mean_weighted_score_is_subtracted(scale, cap, normalized):
    problem = Problem()
    chosen = correction(rollout_is="token", rollout_is_threshold=cap, log_ratio_scale=scale)
    exponent = {"mean": 1.0, "sqrt": math.sqrt(SIZE), "sum": float(SIZE)}.get(scale, scale)
    delta = problem.terms.old_log_prob - problem.terms.rollout_log_prob
    weight = (exponent * delta).exp().clamp(max=cap).detach() / (1.3 if normalized else 1.0)
    terms = replace(problem.terms, weight=weight)
    actor = LOSSES["flow_grpo"]
    plain, centred = (diffusion_loss(terms, actor, one) for one in (without(chosen), chosen))
    assert torch.equal(plain.loss_sum, centred.loss_sum)

    mean, below = mean_weight(terms.old_rollout_kl, torch.full_like(problem.std, exponent), SIZE, cap)
    b = exponent / SIZE * below
    pulled = (mean - b)[..., None] * (problem.rollout_mean - problem.mean)
    pulled = pulled + b[..., None] * (problem.old_mean - problem.mean)
    score = weight[..., None] * problem.score(problem.mean)
    mean_score = pulled / problem.std.square()[..., None] / SIZE / (1.3 if normalized else 1.0)
    slope = problem.slope(plain) / weight
    torch.testing.assert_close(problem.gradient(centred), (slope[..., None] * (score - mean_score)).detach())


def test_weights_of_reinforce_are_the_current_policys_own():
    problem = Problem(bypass=True)
    keys = {"rollout_is": "token", "rollout_is_threshold": CAP, "log_ratio_scale": "sum"}
    chosen = correction(bypass_mode=True, loss_type="reinforce", **keys)
    weight = (
        (SIZE * (problem.terms.log_prob - problem.terms.rollout_log_prob)).exp().clamp(max=CAP)[..., None]
    )
    mean, below = mean_weight(problem.terms.rollout_kl, torch.full_like(problem.std, SIZE), SIZE, CAP)
    pulled = (mean - below)[..., None] * (problem.rollout_mean - problem.mean)
    expected = weight * problem.score(problem.mean) - pulled / problem.std.square()[..., None] / SIZE
    output = diffusion_loss(problem.terms, ActorConfig(), chosen)
    torch.testing.assert_close(
        problem.gradient(output),
        (-problem.advantage[..., None] * expected).flatten(0, 1).view(SHAPE).detach(),
    )


@pytest.mark.parametrize("exponent", [1.0, 4.0, 16.0, 40.0])
@pytest.mark.parametrize("cap", [0.9, 1.0, 1.01, 2.0, math.inf])
@pytest.mark.parametrize("r", [0.0, 0.01, 0.3])
def test_mean_weights_agree_with_integrals(exponent, cap, r):
    """Along the line through both means, on which alone the weight depends."""
    size = 16
    z = torch.linspace(-12, 12, 400_001, dtype=torch.float64)
    density = torch.distributions.Normal(0.0, 1.0).log_prob(z).exp()
    weight = (exponent * (r * z / math.sqrt(size) - r * r / 2)).exp()
    capped = weight.clamp(max=cap)
    mean, below = mean_weight(
        torch.tensor(r * r / 2, dtype=torch.float64), torch.tensor(exponent, dtype=torch.float64), size, cap
    )
    assert mean.item() == pytest.approx(torch.trapezoid(capped * density, z).item(), rel=1e-6)
    # E[min(w, cap) z] is how far the weight tilts the mean, in stds: Stein's lemma.
    tilt = torch.trapezoid(capped * z * density, z).item()
    assert exponent * r / math.sqrt(size) * below.item() == pytest.approx(tilt, rel=1e-5, abs=1e-9)


def test_exact_weights_leave_nothing_to_centre_and_mean_ones_nearly_all():
    kl, one = torch.tensor(0.02, dtype=torch.float64), torch.ones((), dtype=torch.float64)
    mean, below = mean_weight(kl, SIZE * one, SIZE)
    assert (mean - below).item() == 0.0
    assert mean.item() == pytest.approx(1.0, rel=1e-12)
    mean, below = mean_weight(kl, one, SIZE)
    assert (mean - below / SIZE).item() / mean.item() == pytest.approx(1 - 1 / SIZE)


def test_grpo_guard_is_centred_at_the_old_policy_and_with_the_key_at_the_rollouts():
    problem, actor = Problem(), ActorConfig(loss_mode="grpo_guard", clip_ratio=10.0)
    terms = problem.terms
    scale = problem.std[..., None].square() * SIZE
    plain, centred = (diffusion_loss(terms, actor, one) for one in (without(correction()), correction()))

    def expected(centre):
        move = (problem.following - centre) * (problem.mean - problem.old_mean) / scale
        ratio = (move.sum(-1) * problem.std).exp()
        return (-problem.advantage * ratio / terms.step).sum()

    for output, centre in ((plain, problem.old_mean), (centred, problem.rollout_mean)):
        torch.testing.assert_close(output.loss_sum, expected(centre))
        torch.testing.assert_close(
            problem.gradient(output), torch.autograd.grad(expected(centre), problem.mean)[0]
        )
    # The ratio begins at 1, where the current policy is the old one.
    unmoved = replace(
        terms,
        log_prob=terms.old_log_prob,
        old_kl=torch.zeros_like(problem.std),
        rollout_kl=terms.old_rollout_kl,
    )
    metrics = diffusion_loss(unmoved, actor, correction()).metrics.compute()
    assert (metrics["actor/ratio_mean"], metrics["actor/ratio_std"]) == (1.0, 0.0)


def test_in_bypass_mode_grpo_guard_is_centred_already():
    problem, actor = Problem(bypass=True), ActorConfig(loss_mode="grpo_guard", clip_ratio=10.0)
    chosen = correction(bypass_mode=True)
    plain, centred = (diffusion_loss(problem.terms, actor, one) for one in (without(chosen), chosen))
    torch.testing.assert_close(problem.gradient(plain), problem.gradient(centred), rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", LOSSES)
def test_where_both_policies_agree_nothing_changes(name):
    problem = Problem(gap=0.0)
    problem.terms = replace(
        problem.terms, rollout_kl=step_kl(problem.mean, problem.mean.detach(), problem.std)
    )
    outputs = [
        diffusion_loss(problem.terms, LOSSES[name], one) for one in (without(correction()), correction())
    ]
    plain, centred = map(problem.gradient, outputs)
    assert torch.equal(plain, centred)


def test_the_centred_score_has_the_mean_0_under_the_rollout_policy():
    """And the plain one has that of the drift: means over antithetic draws of `q`, which are exact."""
    problem = Problem()
    draw = torch.randn(SHAPE, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    gradients = []
    for sign in (1, -1):
        problem.following = problem.rollout_mean + sign * problem.std[..., None] * draw
        scored = problem.scored(problem.mean)
        centred = centred_log_prob(scored, problem.mean, problem.rollout_mean, problem.std)
        gradients.append(
            [torch.autograd.grad(one.sum(), problem.mean, retain_graph=True)[0] for one in (scored, centred)]
        )
    (plain, centred), (plain_again, centred_again) = gradients
    drift = (problem.rollout_mean - problem.mean) / problem.std[..., None].square() / SIZE
    torch.testing.assert_close((plain + plain_again) / 2, drift.detach())
    torch.testing.assert_close(
        (centred + centred_again) / 2, torch.zeros(SHAPE, dtype=torch.float64), atol=1e-14, rtol=0
    )


def test_without_the_rollouts_means_nothing_is_centred():
    terms = replace(Problem().terms, rollout_kl=None)
    with pytest.raises(BatchError, match=r"score_centering=true .*Rollout\.window\.means, .*with_means"):
        diffusion_loss(terms, ActorConfig(), correction())


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"rollout_is": "sequence"}, "rollout_is='sequence' "),
        (
            {"rollout_is": "token", "rollout_is_threshold": (0.5, 2.0)},
            r"rollout_is_threshold=\[0\.5, 2\.0\] ",
        ),
    ],
)
def test_weights_that_cannot_be_centred_are_refused(keys, named):
    with pytest.raises(ConfigError, match=f"score_centering=true: .*{named}"):
        correction(**keys)


def test_weights_that_multiply_no_score_are_no_hindrance():
    correction(rollout_is="sequence", rollout_is_apply=False)
    correction(rollout_is="sequence", bypass_mode=True, bypass_scope="trajectory")  # the ratio is the weight


def test_a_mean_that_is_not_finite_drops_its_term():
    problem = Problem()
    kl = problem.terms.rollout_kl.clone()
    kl[0, 0] = math.nan
    output = diffusion_loss(replace(problem.terms, rollout_kl=kl), LOSSES["flow_grpo"], correction())
    assert output.count_kept == SHAPE[0] * SHAPE[1] - 1
    assert problem.gradient(output).isfinite().all()
