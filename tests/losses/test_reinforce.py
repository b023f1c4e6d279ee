import math

import pytest
import torch

from flowcorr.losses import reinforce
from tests.losses.test_flow_grpo import tensor


def test_against_hand_computed_numbers():
    log_prob = tensor(-1.0, -2.0, -3.0).requires_grad_()
    keep = torch.tensor([True, True, False])
    result = reinforce(
        log_prob, tensor(1.0, -2.0, 1.0), adv_clip_max=1.5, weight=tensor(0.5, 2.0, 1.0), keep=keep
    )
    result.loss_sum.backward()
    assert result.loss_sum.item() == pytest.approx(0.5 * 1.0 - 2.0 * 1.5 * 2.0)
    assert log_prob.grad.tolist() == pytest.approx([-0.5, 3.0, 0.0])
    assert (result.count_all.item(), result.count_kept.item()) == (3, 2)


def test_old_log_probs_add_metrics_and_nothing_else():
    log_prob, old = tensor(-1.0, -2.0), tensor(-1.1, -1.9)
    plain = reinforce(log_prob, tensor(1.0, 2.0), adv_clip_max=5.0)
    watched = reinforce(log_prob, tensor(1.0, 2.0), adv_clip_max=5.0, old_log_prob=old)
    assert plain.loss_sum == watched.loss_sum
    assert plain.metrics.compute() == {"actor/nonfinite_fraction": 0.0}
    values = watched.metrics.compute()
    assert values["actor/ppo_kl"] == pytest.approx(0.0, abs=1e-12)
    assert values["actor/ratio_mean"] == pytest.approx((math.exp(0.1) + math.exp(-0.1)) / 2)
    assert "actor/pg_clipfrac" not in values


def test_a_term_without_a_finite_old_log_prob_is_left_out():
    log_prob, old = tensor(-1.0, -2.0), tensor(math.nan, -1.9)
    result = reinforce(log_prob, tensor(1.0, 2.0), adv_clip_max=5.0, old_log_prob=old)
    assert (result.loss_sum.item(), result.count_all.item()) == (4.0, 1)
