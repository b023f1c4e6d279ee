import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Normal, kl_divergence

from flowcorr.errors import BatchError
from flowcorr.sde import Transition, kl, log_prob, noise_variance, sample, step_kl, transition


def gaussian(mean, std):
    std = torch.as_tensor(std, dtype=torch.float64)
    return Transition(mean=mean, std=std, step=torch.full_like(std, 0.1))


def randn(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_log_prob_is_the_mean_log_density_of_the_elements():
    mean, reached = randn(3, 4, 5), randn(3, 4, 5, seed=1)
    std = [0.1, 0.5, 2.0]
    expected = [Normal(mean[i], std[i]).log_prob(reached[i]).mean().item() for i in range(3)]
    assert log_prob(reached, gaussian(mean, std)).tolist() == pytest.approx(expected, rel=1e-12)


def test_the_normalizer_is_what_include_normalizer_adds():
    mean, reached = randn(2, 6), randn(2, 6, seed=1)
    step = gaussian(mean, [0.3, 0.7])
    without = log_prob(reached, step, include_normalizer=False)
    expected = [-math.log(std) - 0.5 * math.log(2 * math.pi) for std in (0.3, 0.7)]
    assert (log_prob(reached, step) - without).tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("include_normalizer", [True, False])
def test_cps_unscaled_is_the_negative_squared_distance(include_normalizer):
    mean, reached = randn(2, 6), randn(2, 6, seed=1)
    value = log_prob(
        reached, gaussian(mean, [0.3, 0.7]), include_normalizer=include_normalizer, cps_unscaled=True
    )
    torch.testing.assert_close(value, -(reached - mean).square().mean(1))


def test_the_sum_of_a_steps_log_probs_is_its_density():
    mean, other, reached = randn(1, 8), randn(1, 8, seed=1), randn(1, 8, seed=2)
    delta = log_prob(reached, gaussian(mean, [0.4])) - log_prob(reached, gaussian(other, [0.4]))
    densities = [Normal(centre, 0.4).log_prob(reached).sum() for centre in (mean, other)]
    assert math.exp(8 * delta.item()) == pytest.approx((densities[0] - densities[1]).exp().item(), rel=1e-10)


@settings(max_examples=50)
@given(
    shift=st.floats(-3, 3),
    std_p=st.floats(0.05, 5),
    std_q=st.floats(0.05, 5),
)
def test_kl_is_that_of_normal_distributions(shift, std_p, std_q):
    mean = randn(1, 5)
    shifted = mean + shift * randn(1, 5, seed=1)
    expected = kl_divergence(Normal(shifted, std_p), Normal(mean, std_q)).mean().item()
    value = kl(gaussian(shifted, [std_p]), gaussian(mean, [std_q])).item()
    assert value == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_kl_of_equal_stds_is_half_the_squared_shift_however_small():
    shift = 1e-8
    mean = torch.zeros(1, 4, dtype=torch.float64)
    assert kl(gaussian(mean + shift, [0.5]), gaussian(mean, [0.5])).item() == pytest.approx(
        (shift / 0.5) ** 2 / 2
    )


def test_kl_of_a_step_from_itself_is_exactly_zero():
    step = gaussian(randn(3, 4), [0.1, 0.37, 3.0])
    assert kl(step, step).tolist() == [0.0, 0.0, 0.0]


def test_log_ratio_follows_half_r_squared():
    """Sampled under b, delta = -r^2 / 2 + (r / sqrt(D)) z."""
    num_samples, num_elements, std, r = 4000, 64, 0.5, 0.3
    mean = randn(num_samples, num_elements)
    reached = mean + std * randn(num_samples, num_elements, seed=1)
    stds = [std] * num_samples
    delta = log_prob(reached, gaussian(mean + r * std, stds)) - log_prob(reached, gaussian(mean, stds))
    spread = r / math.sqrt(num_elements)
    assert delta.mean().item() == pytest.approx(-(r**2) / 2, abs=4 * spread / math.sqrt(num_samples))
    assert delta.std().item() == pytest.approx(spread, rel=4 / math.sqrt(2 * num_samples))


def test_gradients():
    mean, reached = randn(2, 3).requires_grad_(), randn(2, 3, seed=1)
    other = randn(2, 3, seed=2)
    assert torch.autograd.gradcheck(lambda mean: log_prob(reached, gaussian(mean, [0.4, 0.9])), mean)
    assert torch.autograd.gradcheck(
        lambda mean: kl(gaussian(mean, [0.4, 0.9]), gaussian(other, [0.5, 0.9])), mean
    )


STEP = gaussian(randn(2, 3), [0.4, 0.9])


@pytest.mark.parametrize(
    ("function", "arguments", "named"),
    [
        (log_prob, (randn(1, 3), STEP), r"next_latents .*\[1, 3\]; .*\[2, 3\]"),
        (kl, (gaussian(randn(2, 1), [0.4, 0.9]), STEP), r"transition_p\.mean .*\[2, 1\]; .*\[2, 3\]"),
        (step_kl, (randn(2, 3, 4), randn(2, 3), randn(2, 3)), r"other_mean .*\[2, 3\]; .*\[2, 3, 4\]"),
        (step_kl, (randn(2, 3, 4), randn(2, 3, 4), randn(3)), r"mean .*\[2, 3, 4\]; .*\[3\]"),
    ],
)
def test_shapes_must_agree(function, arguments, named):
    with pytest.raises(BatchError, match=f"^{named}"):
        function(*arguments)


def test_the_kl_of_steps_with_one_std_is_that_of_their_densities():
    mean, other, std = randn(2, 3, 4), randn(2, 3, 4, seed=1), 0.1 + randn(2, 3, seed=2).abs()
    expected = kl_divergence(Normal(mean, std[..., None]), Normal(other, std[..., None])).mean(-1)
    torch.testing.assert_close(step_kl(mean, other, std), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_kl_of_a_mean_that_is_not_finite_is_not_known_and_has_no_gradient(value):
    mean, other, std = randn(3, 4).requires_grad_(), randn(3, 4, seed=1), torch.tensor([0.5, 0.5, 0.0])
    other[0, 2] = value
    kl = step_kl(mean, other, std)
    assert kl.isnan().tolist() == [True, False, True]
    torch.where(kl.isfinite(), kl, 0.0).sum().backward()
    assert not mean.grad[[0, 2]].any()
    assert mean.grad[1].all()


@pytest.mark.parametrize("cps_unscaled", [False, True])
def test_a_log_prob_tells_the_variance_of_its_noise(cps_unscaled):
    draw = torch.Generator().manual_seed(0)
    latents, velocity, noise = (torch.randn(3, 64, generator=draw) for _ in range(3))
    step = transition("sde", latents, velocity, torch.full((3,), 0.8), torch.full((3,), 0.6), 0.7)
    scored = log_prob(sample(step, noise), step, cps_unscaled=cps_unscaled)
    variance = noise_variance(scored, step.std, cps_unscaled=cps_unscaled)
    assert torch.allclose(variance, noise.square().mean(1), rtol=1e-4)
