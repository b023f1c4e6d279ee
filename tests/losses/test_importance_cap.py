import math

import pytest
import torch

from flowcorr.losses import importance_cap
from tests.losses.test_flow_grpo import tensor


@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize(("ratio", "used", "slope"), [(0.1, 0.1, 0.1), (1.4, 1.4, 1.4), (3.0, 1.5, 0.0)])
def test_ratios_are_capped_from_above_only(ratio, used, slope, advantage):
    log_prob = tensor(math.log(ratio)).requires_grad_()
    result = importance_cap(log_prob, tensor(0.0), tensor(advantage), cap=1.5, adv_clip_max=5.0)
    result.loss_sum.backward()
    assert result.loss_sum.item() == pytest.approx(-advantage * used)
    assert log_prob.grad.item() == pytest.approx(-advantage * slope)


def test_metrics_of_the_cap():
    log_prob = tensor(1.0, 2.0, 0.1).log()
    values = importance_cap(
        log_prob, torch.zeros_like(log_prob), torch.ones_like(log_prob), cap=1.5, adv_clip_max=5.0
    ).metrics.compute()
    assert values["actor/pg_clipfrac"] == values["actor/pg_clipfrac_higher"] == pytest.approx(1 / 3)
    assert "actor/pg_clipfrac_lower" not in values
    assert values["actor/ratio_mean"] == pytest.approx(3.1 / 3)


def test_the_cap_may_differ_between_terms():
    log_prob = tensor(2.0, 2.0).log()
    result = importance_cap(
        log_prob, torch.zeros_like(log_prob), tensor(1.0, 1.0), cap=tensor(1.5, 3.0), adv_clip_max=5.0
    )
    assert result.loss_sum.item() == pytest.approx(-3.5)
