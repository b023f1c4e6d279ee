import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowcorr.errors import BatchError, ConfigError
from flowcorr.sde import TRANSITIONS, added_noise, kl, log_prob, sample, transition

KINDS = sorted(TRANSITIONS)


def problem(*shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, dtype=dtype, generator=generator) for _ in range(2))


def column(*values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


def test_sde_against_hand_computed_numbers():
    # sigma .5 -> .4, eta .7: c^2 = .49 (.5 / .5) = .49, drift = .49 * .1 / (2 * .5) = .049.
    step = transition("sde", column([2.0]), column([1.0]), column(0.5), column(0.4), 0.7)
    assert step.mean.item() == pytest.approx(2.0 * (1 - 0.049) - 1.0 * (0.1 + 0.5 * 0.049), rel=1e-12)
    assert step.std.item() == pytest.approx(0.7 * math.sqrt(0.1), rel=1e-12)
    assert step.step.item() == pytest.approx(0.1, rel=1e-12)


def test_cps_against_hand_computed_numbers():
    # x0 = 2 - .5 = 1.5, x1 = 2 + .5 = 2.5, s = .4 sin(pi / 4), mean = .6 x0 + .4 cos(pi / 4) x1.
    step = transition("cps", column([2.0]), column([1.0]), column(0.5), column(0.4), 0.5)
    assert step.std.item() == pytest.approx(0.4 * math.sqrt(0.5), rel=1e-12)
    assert step.mean.item() == pytest.approx(0.9 + 0.4 * math.sqrt(0.5) * 2.5, rel=1e-12)


def test_dance_sde_against_hand_computed_numbers():
    # score = -(2 - .5 * 1.5) / .25 = -5; mean = 2 - .1 + .09 / 2 * .1 * -5.
    step = transition("dance_sde", column([2.0]), column([1.0]), column(0.5), column(0.4), 0.3)
    assert step.mean.item() == pytest.approx(1.9 - 0.0225, rel=1e-12)
    assert step.std.item() == pytest.approx(0.3 * math.sqrt(0.1), rel=1e-12)


@pytest.mark.parametrize("sigma_max", [None, 0.9, torch.tensor([0.9, 0.9])])
def test_sde_starts_from_pure_noise_with_a_finite_std_and_gradient(sigma_max):
    latents, velocity = problem(2, 3)
    velocity.requires_grad_()
    sigma = column(1.0, 0.5).requires_grad_()
    step = transition("sde", latents, velocity, sigma, column(0.9, 0.4), 0.7, sigma_max=sigma_max)
    expected = 0.7 * math.sqrt(1.0 / (1.0 - 0.9)) * math.sqrt(0.1)
    assert step.std.tolist() == pytest.approx([expected, 0.7 * math.sqrt(0.1)], rel=1e-6)
    gradients = torch.autograd.grad(step.mean.sum() + step.std.sum(), [velocity, sigma])
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


def test_sigma_max_stands_in_only_where_sigma_is_one():
    latents, velocity = problem(2, 3)
    sigmas = column(1.0, 0.95), column(0.9, 0.9)
    near, far = (transition("sde", latents, velocity, *sigmas, 0.7, sigma_max=top) for top in (0.9, 0.98))
    assert far.std[0] > near.std[0]
    assert far.std[1] == near.std[1]


def shifted(shift, num_steps):
    """The table of a flow-match Euler scheduler with a constant shift."""
    levels = torch.linspace(1, 1 / num_steps, num_steps, dtype=torch.float64)
    levels = shift * levels / (1 + (shift - 1) * levels)
    return torch.cat([levels, levels.new_zeros(1)]).float()


def std_of(sigmas, kind="sde"):
    """The stds of all steps of a table, at noise level 0.7."""
    flat = torch.zeros(len(sigmas) - 1, 2)
    return transition(kind, flat, flat, sigmas[:-1], sigmas[1:], 0.7).std


@pytest.mark.parametrize("num_steps", [2, 3, 4, 8, 20, 50, 200])
@pytest.mark.parametrize("shift", [0.5, 1.0, 3.0, 12.0, 60.0])
def test_tables_that_begin_at_one_have_the_std_of_the_paper_to_the_bit(shift, num_steps):
    table = shifted(shift, num_steps)
    sigma, after = table[:-1], table[1:]
    c = 0.7 * torch.sqrt(sigma / (1 - torch.where(sigma == 1, after, sigma)))
    assert torch.equal(std_of(table), c * torch.sqrt(sigma - after))


@pytest.mark.parametrize(
    "first", [0.9999, 0.999999, 1 - 2**-24, 1 - 2**-11, 1 - 2**-8, 0.999, 1.0000001, 1.0005]
)
@pytest.mark.parametrize("num_steps", [4, 10])
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_a_first_level_that_is_nearly_one_counts_as_one(shift, num_steps, first):
    table = shifted(shift, num_steps)
    nearly = torch.cat([torch.tensor([first]), table[1:]])
    assert std_of(nearly)[0].item() == pytest.approx(std_of(table)[0].item(), rel=0.1)
    assert torch.equal(std_of(nearly)[1:], std_of(table)[1:])


@given(first=st.floats(1 - 2**-8, 1.001), step=st.floats(1e-4, 1))
def test_no_std_near_one_explodes(first, step):
    first = first if step > 1e-2 else min(first, 1.0)
    after = max(0.0, min(first, 1.0) - step)
    assert std_of(torch.tensor([first, after])).item() <= 1.6 * 0.7


def euler(latents, velocity, sigma, sigma_next):
    return latents - (sigma - sigma_next)[:, None] * velocity


@pytest.mark.parametrize("kind", ["sde", "dance_sde"])
def test_without_noise_the_mean_is_the_euler_step(kind):
    latents, velocity = problem(3, 4)
    sigmas = column(1.0, 0.7, 0.2), column(0.8, 0.5, 0.0)
    step = transition(kind, latents, velocity, *sigmas, 1e-8)
    torch.testing.assert_close(step.mean, euler(latents, velocity, *sigmas))
    assert (step.std < 1e-7).all()


def test_cps_without_noise_keeps_data_and_noise_as_the_euler_step_does():
    latents, velocity = problem(3, 4)
    sigmas = column(1.0, 0.7, 0.2), column(0.8, 0.5, 0.1)
    step = transition("cps", latents, velocity, *sigmas, 1e-8)
    torch.testing.assert_close(step.mean, euler(latents, velocity, *sigmas))


@settings(max_examples=50)
@given(sigma=st.floats(0.05, 1.0), share=st.floats(0.01, 0.99), eta=st.floats(0.01, 1.0))
def test_cps_keeps_the_total_noise_level(sigma, share, eta):
    # With x = x1 (no data) and v = x1, the mean is the kept noise alone.
    sigma_next = sigma * share
    unit = torch.ones(1, 1, dtype=torch.float64)
    step = transition("cps", unit * sigma, unit, column(sigma), column(sigma_next), eta)
    assert step.mean.item() ** 2 + step.std.item() ** 2 == pytest.approx(sigma_next**2, rel=1e-9)


def propagated_moments(kind, num_steps, *, data_mean=1.5, data_std=0.6, start=0.95, end=0.05):
    """Mean and variance after `num_steps` from the flow's own at `start`, and those the flow has at `end`.

    For Gaussian data the velocity is linear in x, so a step is, and moments pass through it exactly.
    """

    def moments(sigma):
        return (1 - sigma) * data_mean, (1 - sigma) ** 2 * data_std**2 + sigma**2

    sigmas = torch.linspace(start, end, num_steps + 1, dtype=torch.float64)
    mean, variance = moments(sigmas[0])
    for sigma, sigma_next in itertools.pairwise(sigmas):
        x = (mean + column(0.0, 1.0))[:, None]
        flow_mean, flow_variance = moments(sigma)
        # E[x1 - x0 | x] of jointly Gaussian variables.
        velocity = -data_mean + (sigma - (1 - sigma) * data_std**2) / flow_variance * (x - flow_mean)
        step = transition(kind, x, velocity, sigma.expand(2), sigma_next.expand(2), 0.8)
        mean, slope = step.mean[0, 0], step.mean[1, 0] - step.mean[0, 0]
        variance = slope**2 * variance + step.std[0] ** 2
    return torch.stack([mean, variance]), torch.stack(moments(sigmas[-1]))


@pytest.mark.parametrize("kind", ["sde", "dance_sde"])
def test_fine_steps_keep_the_marginal_distribution(kind):
    coarse, exact = propagated_moments(kind, 200)
    fine, _ = propagated_moments(kind, 400)
    torch.testing.assert_close(fine, exact, rtol=0.02, atol=0.0)
    # Euler-Maruyama is of weak order one, so that nothing remains in the limit.
    torch.testing.assert_close(2 * fine - coarse, exact, rtol=5e-4, atol=0.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(7,), (5, 3), (2, 4, 4), (2, 3, 4, 4)])
def test_any_latent_rank_gives_each_sample_its_own_step(kind, shape):
    latents, velocity = problem(3, *shape)
    sigma, sigma_next = column(1.0, 0.6, 0.3), column(0.8, 0.5, 0.1)
    whole = transition(kind, latents, velocity, sigma, sigma_next, 0.5)
    log_probs = log_prob(latents, whole)
    assert whole.mean.shape == latents.shape
    assert log_probs.shape == (3,)
    for i in range(3):
        alone = transition(
            kind, latents[i : i + 1], velocity[i : i + 1], sigma[i : i + 1], sigma_next[i : i + 1], 0.5
        )
        torch.testing.assert_close(whole.mean[i : i + 1], alone.mean)
        torch.testing.assert_close(log_probs[i : i + 1], log_prob(latents[i : i + 1], alone))


@pytest.mark.parametrize("kind", KINDS)
def test_whole_windows_equal_their_steps(kind):
    latents, velocity = problem(2, 3, 4, 5)
    sigma = column(0.9, 0.8, 0.7).expand(2, 3)
    window = transition(kind, latents, velocity, sigma, sigma - 0.1, 0.5)
    assert log_prob(latents + 0.1, window).shape == (2, 3)
    for t in range(3):
        step = transition(kind, latents[:, t], velocity[:, t], sigma[:, t], sigma[:, t] - 0.1, 0.5)
        torch.testing.assert_close(log_prob(latents + 0.1, window)[:, t], log_prob(latents[:, t] + 0.1, step))
        torch.testing.assert_close(kl(window, window)[:, t], torch.zeros(2, dtype=torch.float64))


@pytest.mark.parametrize("kind", KINDS)
def test_noise_level_may_differ_between_samples(kind):
    latents, velocity = problem(2, 3)
    sigmas = column(0.9, 0.9), column(0.7, 0.7)
    both = transition(kind, latents, velocity, *sigmas, column(0.3, 0.6))
    for i, eta in enumerate((0.3, 0.6)):
        torch.testing.assert_close(both.std[i], transition(kind, latents, velocity, *sigmas, eta).std[i])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("given_dtype", "expected"),
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float64, torch.float64)],
)
def test_arithmetic_is_float32_or_better(kind, given_dtype, expected):
    latents, velocity = problem(2, 8)
    sigmas = column(0.9, 0.5), column(0.8, 0.4)
    low = latents.to(given_dtype), velocity.to(given_dtype)
    step = transition(kind, *low, *sigmas, 0.5)
    assert {step.mean.dtype, step.std.dtype, step.step.dtype} == {expected}
    assert log_prob(low[0], step).dtype == expected
    exact = transition(kind, low[0].double(), low[1].double(), *sigmas, 0.5)
    torch.testing.assert_close(step.mean.double(), exact.mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_of_the_log_prob(kind):
    latents, velocity = problem(2, 4)
    velocity.requires_grad_()

    def of_velocity(velocity):
        return log_prob(latents, transition(kind, latents, velocity, column(1.0, 0.5), column(0.8, 0.3), 0.6))

    assert torch.autograd.gradcheck(of_velocity, velocity)


@pytest.mark.parametrize("kind", KINDS)
def test_samples_have_the_transitions_moments(kind):
    generator = torch.Generator().manual_seed(0)
    latents, velocity = (tensor.expand(1, 20000) for tensor in problem(1, 1))
    step = transition(kind, latents, velocity, column(0.8), column(0.6), 0.5)
    drawn = sample(step, torch.randn(latents.shape, dtype=torch.float64, generator=generator))
    assert drawn.std().item() == pytest.approx(step.std.item(), rel=0.03)
    assert drawn.mean().item() == pytest.approx(step.mean[0, 0].item(), abs=0.02)


def test_unknown_kind_names_the_nearest():
    latents, velocity = problem(1, 2)
    with pytest.raises(ConfigError, match=r"sampling\.sde_type='dance-sde' .*dance_sde\?"):
        transition("dance-sde", latents, velocity, column(0.5), column(0.4), 0.7)


@pytest.mark.parametrize(
    ("kind", "eta"), [("cps", 1.5), ("cps", 0.0), ("sde", 0.0), ("sde", math.nan), ("dance_sde", -1)]
)
def test_noise_levels_without_a_density_are_refused(kind, eta):
    latents, velocity = problem(1, 2)
    with pytest.raises(ConfigError, match=rf"sampling\.noise_level={eta} .*sampling\.sde_type={kind};"):
        transition(kind, latents, velocity, column(0.5), column(0.4), eta)


def test_cps_at_noise_level_one_is_all_fresh_noise():
    latents, velocity = problem(1, 2)
    step = transition("cps", latents, velocity, column(0.5), column(0.4), 1.0)
    assert step.std.item() == pytest.approx(0.4)
    torch.testing.assert_close(step.mean, 0.6 * (latents - 0.5 * velocity))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("sigma", "sigma_next", "named"),
    [
        (0.4, 0.4, r"descend: sigma=0\.4 and sigma_next=0\.4;"),
        (900.0, 800.0, r"^sigma=900\.0 and sigma_next=800\.0 .*timesteps"),
        (0.1, -0.1, r"^sigma=0\.1 and sigma_next=-0\.1 .* 1 and 0;"),
        (1.0005, 1.0, r"density .* 1 .*sigma=1\.0005 and sigma_next=1\.0;"),
        (1e-5, 0.0, r"density .* 0\.0001: sigma=1e-05 and sigma_next=0\.0;"),
        (1e-6, 1e-7, r"density .* 0\.0001: sigma=1e-06 and sigma_next=1e-07;"),
    ],
)
def test_noise_levels_of_no_step_are_refused(kind, sigma, sigma_next, named):
    latents, velocity = problem(2, 2)
    with pytest.raises(BatchError, match=named):
        transition(kind, latents, velocity, column(0.5, sigma), column(0.4, sigma_next), 0.7)


@pytest.mark.parametrize("number", [0.5, torch.tensor(0.5)], ids=["float", "tensor"])
@pytest.mark.parametrize("name", ["sigma", "sigma_next"])
def test_one_noise_level_for_all_samples_is_refused(name, number):
    """With it, log-probs would be means over the batch."""
    latents, velocity = problem(2, 2)
    levels = {"sigma": column(0.5, 0.5), "sigma_next": column(0.4, 0.4)} | {name: number}
    with pytest.raises(BatchError, match=rf"^{name}=0\.5 is one number; .*\[B\]"):
        transition("sde", latents, velocity, **levels, noise_level=0.7)


@pytest.mark.parametrize("last", [0.0, 1e-8, 1e-5])
def test_cps_cannot_take_the_last_step(last):
    latents, velocity = problem(1, 2)
    with pytest.raises(BatchError, match=f"cps .*sigma_next={last:g},"):
        transition("cps", latents, velocity, column(0.5), column(last), 0.7)


@settings(max_examples=50)
@given(
    latent_shape=st.sampled_from([(2, 3), (1, 3), (2, 4)]),
    velocity_shape=st.sampled_from([(2, 3), (1, 3), (2, 1)]),
    num_sigmas=st.integers(1, 3),
    num_next=st.integers(1, 3),
)
def test_nothing_broadcasts(latent_shape, velocity_shape, num_sigmas, num_next):
    arguments = torch.ones(latent_shape), torch.ones(velocity_shape), torch.full((num_sigmas,), 0.5)
    fits = latent_shape == velocity_shape and num_sigmas == num_next == latent_shape[0]
    if fits:
        assert transition("sde", *arguments, torch.full((num_next,), 0.4), 0.7).mean.shape == latent_shape
    else:
        with pytest.raises(BatchError, match="has shape"):
            transition("sde", *arguments, torch.full((num_next,), 0.4), 0.7)


def test_latents_need_an_axis_of_elements():
    with pytest.raises(BatchError, match=r"^sigma .*\[2\] and latents \[2\];"):
        transition("sde", torch.ones(2), torch.ones(2), torch.full((2,), 0.5), torch.full((2,), 0.4), 0.7)


def test_noise_must_have_the_latents_shape():
    latents, velocity = problem(2, 3)
    step = transition("sde", latents, velocity, column(0.5, 0.5), column(0.4, 0.4), 0.7)
    with pytest.raises(BatchError, match=r"^noise .*\[1, 3\]; .*\[2, 3\]"):
        sample(step, torch.ones(1, 3))


def test_added_noise_is_that_of_the_sample():
    draw = torch.Generator().manual_seed(0)
    latents, velocity, noise = (torch.randn(3, 2, 4, 8, generator=draw) for _ in range(3))
    step = transition("sde", latents, velocity, torch.full((3, 2), 0.8), torch.full((3, 2), 0.6), 0.7)
    assert torch.allclose(added_noise(sample(step, noise), step), noise, atol=1e-5)
