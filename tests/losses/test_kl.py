import math

import pytest
import torch

from flowcorr.errors import BatchError, ConfigError
from flowcorr.losses import kl_to_reference
from flowcorr.sde import Transition, kl, transition


def randn(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


STD, STEP = torch.tensor([0.3, 0.8]).double(), torch.tensor([0.1, 0.05]).double()


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 2, 2)])
def test_exact_is_the_gaussian_kl(shape):
    mean, ref_mean = randn(2, *shape), randn(2, *shape, seed=1)
    expected = kl(*(Transition(mean=value, std=STD, step=STEP) for value in (mean, ref_mean)))
    torch.testing.assert_close(kl_to_reference(mean, ref_mean, STD, STEP), expected)


def test_whole_windows():
    mean, ref_mean = randn(2, 3, 4), randn(2, 3, 4, seed=1)
    std, step = STD[:, None].expand(2, 3), STEP[:, None].expand(2, 3)
    window = kl_to_reference(mean, ref_mean, std, step)
    assert window.shape == (2, 3)
    torch.testing.assert_close(window[:, 1], kl_to_reference(mean[:, 1], ref_mean[:, 1], STD, STEP))


def test_flow_grpo_weighting_divides_by_the_coefficient_of_the_sde():
    latents, velocity, other = randn(1, 8), randn(1, 8, seed=1), randn(1, 8, seed=2)
    sigma, sigma_next, eta = torch.tensor([0.6]).double(), torch.tensor([0.5]).double(), 0.7
    one, two = (transition("sde", latents, v, sigma, sigma_next, eta) for v in (velocity, other))
    c = eta * math.sqrt(0.6 / 0.4)
    expected = (one.mean - two.mean).square().mean().item() / (2 * c**2)
    value = kl_to_reference(one.mean, two.mean, one.std, one.step, weighting="flow_grpo")
    assert value.item() == pytest.approx(expected, rel=1e-6)


def test_only_the_policy_gets_a_gradient_and_rejected_terms_none():
    mean, ref_mean = randn(2, 4).requires_grad_(), randn(2, 4, seed=1).requires_grad_()
    keep = torch.tensor([True, False])
    spoilt = torch.where(keep[:, None], ref_mean, math.nan)
    value = kl_to_reference(mean, spoilt, STD, STEP, keep=keep)
    value.sum().backward()
    assert value[1] == 0
    assert ref_mean.grad is None
    torch.testing.assert_close(mean.grad[0], (mean - ref_mean)[0].detach() / (4 * STD[0] ** 2))
    assert mean.grad[1].tolist() == [0.0] * 4


def test_bad_input():
    mean = randn(2, 4)
    with pytest.raises(ConfigError, match=r"actor\.kl_weighting='flowgrpo'.*did you mean flow_grpo"):
        kl_to_reference(mean, mean, STD, STEP, weighting="flowgrpo")
    with pytest.raises(BatchError, match="ref_mean has shape"):
        kl_to_reference(mean, mean[:1], STD, STEP)
    with pytest.raises(BatchError, match="must begin with"):
        kl_to_reference(mean, mean, STD[:1], STEP[:1])
    with pytest.raises(BatchError, match="step has shape"):
        kl_to_reference(mean, mean, STD, STEP[:1])
