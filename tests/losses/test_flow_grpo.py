import math

import pytest
import torch

from flowcorr.losses import flow_grpo


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def loss(log_ratio, advantage, **options):
    old = torch.full_like(log_ratio, -1.4)
    defaults = {"clip_ratio": 0.1, "adv_clip_max": 5.0}
    return flow_grpo(old + log_ratio, old, advantage, **(defaults | options))


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "slope"),
    [
        (1.05, 2.0, -2.1, -2.1),  # within the range: unclipped
        (1.5, 2.0, -2.2, 0.0),  # risen far enough
        (1.5, -2.0, 3.0, 3.0),  # risen where it should fall: unclipped
        (0.5, 2.0, -1.0, -1.0),  # fallen where it should rise: unclipped
        (0.5, -2.0, 1.8, 0.0),  # fallen far enough
    ],
)
def test_each_branch_of_the_clip(ratio, advantage, expected, slope):
    log_ratio = tensor(math.log(ratio)).requires_grad_()
    result = loss(log_ratio, tensor(advantage))
    result.loss_sum.backward()
    assert result.loss_sum.item() == pytest.approx(expected)
    assert log_ratio.grad.item() == pytest.approx(slope)


def test_sum_weights_and_denominators():
    log_ratio = tensor(0.0, math.log(1.05), 0.0)
    keep = torch.tensor([True, True, False])
    result = loss(log_ratio, tensor(1.0, 2.0, 3.0), weight=tensor(2.0, 0.5, 9.0), keep=keep)
    total = -1.0 * 2.0 - 2.0 * 1.05 * 0.5
    assert result.loss_sum.item() == pytest.approx(total)
    assert result.mean("kept").item() == pytest.approx(total / 2)
    assert result.mean("all").item() == pytest.approx(total / 3)


def test_clip_fractions_say_on_which_side():
    ratios = tensor(1.5, 1.2, 0.5, 1.0, 3.0)
    keep = torch.tensor([True, True, True, True, False])
    values = loss(ratios.log(), tensor(1.0, -1.0, 1.0, 1.0, 1.0), keep=keep).metrics.compute()
    assert values["actor/pg_clipfrac"] == pytest.approx(3 / 4)
    assert values["actor/pg_clipfrac_higher"] == pytest.approx(2 / 4)
    assert values["actor/pg_clipfrac_lower"] == pytest.approx(1 / 4)


def test_one_term_has_no_spread():
    values = loss(tensor(0.01), tensor(1.0)).metrics.compute()
    assert values["actor/ratio_std"] == 0.0
    assert values["actor/ratio_mean"] == pytest.approx(math.exp(0.01))


def test_metrics_resolve_ratios_that_float32_cannot():
    log_ratio = tensor(1e-9, 3e-9)
    values = loss(log_ratio, tensor(1.0, 1.0)).metrics.compute()
    assert values["actor/ratio_mean"] - 1 == pytest.approx(2e-9, rel=1e-6)
    assert values["actor/ratio_std"] == pytest.approx(math.sqrt(2) * 1e-9, rel=1e-6)


def test_the_clip_may_differ_between_terms():
    log_ratio, advantage = tensor(0.2, 0.2).exp().log(), tensor(1.0, 1.0)
    both = loss(log_ratio, advantage, clip_ratio=tensor(0.05, 0.1)).loss_sum
    assert both.item() == pytest.approx(-1.05 - 1.1)


def test_float32_stays_float32():
    result = flow_grpo(torch.zeros(2), torch.zeros(2), torch.ones(2), clip_ratio=0.1, adv_clip_max=5.0)
    assert result.loss_sum.dtype == torch.float32
