import math

import pytest
import torch

from flowcorr.losses import flow_dppo
from tests.losses.test_flow_grpo import tensor


def loss(log_ratio, advantage, shift, **options):
    """Both policies' means are `shift` apart in each element, with a std of .5: a KL of 2 shift^2."""
    old = torch.full_like(log_ratio, -1.4)
    kl = 2 * torch.as_tensor(shift, dtype=torch.float64).square().expand(log_ratio.shape)
    arguments = {"kl": kl, "kl_threshold": 0.02}
    return flow_dppo(old + log_ratio, old, advantage, **(arguments | options))


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "shift", "dropped"),
    [
        (0.3, 1.0, 0.2, True),  # far, and rising further
        (-0.3, -1.0, 0.2, True),  # far, and falling further
        (-0.3, 1.0, 0.2, False),  # far, and coming back
        (0.3, -1.0, 0.2, False),  # far, and coming back
        (0.3, 1.0, 0.05, False),  # near, whatever the ratio
        (0.0, 1.0, 0.2, False),  # far, in no direction
    ],
)
def test_only_terms_that_leave_the_region_are_dropped(log_ratio, advantage, shift, dropped):
    log_ratio = tensor(log_ratio).requires_grad_()
    result = loss(log_ratio, tensor(advantage), [shift])
    result.loss_sum.backward()
    expected = 0.0 if dropped else -advantage * math.exp(log_ratio.item())
    assert result.loss_sum.item() == pytest.approx(expected)
    assert log_ratio.grad.item() == pytest.approx(expected)
    assert result.count_kept.item() == 1
    assert result.metrics.compute()["actor/pg_clipfrac"] == float(dropped)


def test_the_exact_kl_is_logged():
    values = loss(tensor(0.1, 0.1), tensor(1.0, 1.0), [0.05, 0.2]).metrics.compute()
    assert values["actor/exact_kl"] == pytest.approx((0.005 + 0.08) / 2)
    assert values["actor/pg_clipfrac_higher"] == 0.5
    assert values["actor/pg_clipfrac_lower"] == 0.0


@pytest.mark.parametrize(("level", "dropped"), [("step", 1), ("trajectory_mean", 0), ("trajectory_sum", 2)])
def test_the_region_is_of_the_ratios_level(level, dropped):
    # KLs .0002 and .0242: one step passes .02, their mean does not, their sum does.
    result = loss(tensor(0.1, 0.1)[None], torch.ones(1, 2).double(), [[0.01, 0.11]], ratio_level=level)
    assert result.metrics.compute()["actor/pg_clipfrac"] == pytest.approx(dropped / 2)


def test_the_kl_gets_no_gradient():
    kl = tensor(0.01).requires_grad_()
    log_prob = tensor(0.1).requires_grad_()
    result = loss(log_prob, tensor(1.0), [0.0], kl=kl)
    result.loss_sum.backward()
    assert kl.grad is None
