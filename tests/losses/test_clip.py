"""Clip ranges that differ by step, and ratios that are taken relative to a centre."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowcorr.errors import BatchError
from flowcorr.losses import LOSSES, UNCLIPPED, clip_by_term, flow_grpo, grpo_guard
from tests.losses.test_every_loss import Settings, changed, gradient, part, problem

CLIPPED = sorted(set(LOSSES) - UNCLIPPED)
CLIPS = (0.01, 0.03, 0.1)


def steps(shape, indices):
    """A policy far enough from its data that every clip range cuts some terms."""
    theta, policy, batch = problem(*shape, drift=0.3)
    return theta, policy, changed(batch, step_index=torch.tensor(indices).expand(shape).contiguous())


def same(one, other, theta, **tolerance):
    torch.testing.assert_close(one.loss_sum, other.loss_sum, **tolerance)
    torch.testing.assert_close(gradient(one.loss_sum, theta), gradient(other.loss_sum, theta), **tolerance)
    assert one.metrics.compute() == pytest.approx(
        other.metrics.compute(), rel=tolerance.get("rtol", 1e-12), abs=1e-12
    )


# By step -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CLIPPED)
def test_every_step_has_the_range_of_its_index(name):
    theta, policy, batch = steps((6, 3), [2, 0, 1])
    whole = LOSSES[name](policy, batch, Settings(clip_ratio=CLIPS))
    alone = [
        LOSSES[name](
            part(policy, (slice(None), t)), part(batch, (slice(None), t)), Settings(clip_ratio=CLIPS[index])
        )
        for t, index in enumerate((2, 0, 1))
    ]
    total = torch.stack([output.loss_sum for output in alone]).sum()
    torch.testing.assert_close(whole.loss_sum, total)
    torch.testing.assert_close(gradient(whole.loss_sum, theta), gradient(total, theta))
    cut = [output.metrics.compute()["actor/pg_clipfrac"] * output.count_kept.item() for output in alone]
    assert whole.metrics.compute()["actor/pg_clipfrac"] == pytest.approx(sum(cut) / whole.count_kept.item())
    assert len({round(share, 6) for share in cut}) > 1


@pytest.mark.parametrize("name", CLIPPED)
@pytest.mark.parametrize("level", ["step", "trajectory_mean", "trajectory_sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_list_of_one_number_is_that_number(name, level, dtype):
    theta, policy, batch = steps((6, 3), [0, 1, 2])
    policy = changed(policy, log_prob=policy.log_prob.to(dtype))
    batch = changed(batch, old_log_prob=batch.old_log_prob.to(dtype))
    listed, number = (
        LOSSES[name](policy, batch, Settings(clip_ratio=clip, ratio_level=level)) for clip in ((0.03,) * 3, 0.03)
    )  # fmt: skip
    assert listed.loss_sum == number.loss_sum
    assert torch.equal(gradient(listed.loss_sum, theta), gradient(number.loss_sum, theta))
    assert listed.metrics.compute() == number.metrics.compute()
    assert number.metrics.compute()["actor/pg_clipfrac"] > 0


def test_the_range_of_a_term_is_that_of_its_step():
    assert clip_by_term(0.5, torch.tensor([0, 1])) == 0.5
    got = clip_by_term(CLIPS, torch.tensor([[2, 0], [1, 1]]))
    assert got.tolist() == [[0.1, 0.01], [0.03, 0.03]]


@pytest.mark.parametrize("option", ["clip_ratio", "clip_center"])
def test_neither_range_nor_centre_broadcasts(option):
    log_prob = torch.zeros(4, 2)
    options = {"clip_ratio": 0.1, "adv_clip_max": 5.0, option: torch.full((2,), 0.1)}
    with pytest.raises(BatchError, match=rf"{option} has shape \[2\]; it must be \[4, 2\]"):
        flow_grpo(log_prob, log_prob, log_prob, **options)


# Centres -------------------------------------------------------------------------------------------------


@given(
    center=st.floats(-0.2, 0.2),
    name=st.sampled_from(CLIPPED),
    level=st.sampled_from(["step", "trajectory_mean", "trajectory_sum"]),
)
def test_a_centre_undoes_a_shift_of_the_old_log_probs(center, name, level):
    theta, policy, batch = steps((5, 2), [0, 1])
    options = (
        Settings(clip_ratio=CLIPS, ratio_level=level) if level == "step" else Settings(ratio_level=level)
    )
    centers = torch.tensor([center, -2 * center], dtype=torch.float64).expand(5, 2)
    plain = LOSSES[name](policy, batch, options)
    shifted = changed(batch, old_log_prob=batch.old_log_prob - centers, clip_center=centers)
    same(LOSSES[name](policy, shifted, options), plain, theta, rtol=1e-7, atol=1e-9)


def test_a_centre_is_detached():
    center = torch.tensor([0.1, 0.1], requires_grad=True)
    log_prob = torch.zeros(2, requires_grad=True)
    flow_grpo(
        log_prob, torch.zeros(2), torch.ones(2), clip_ratio=0.5, adv_clip_max=5.0, clip_center=center * 1.0
    ).loss_sum.backward()
    assert center.grad is None
    assert log_prob.grad.tolist() == pytest.approx([-math.exp(-0.1)] * 2)


def test_a_rejected_term_may_have_any_centre():
    log_prob = torch.zeros(2, requires_grad=True)
    result = flow_grpo(
        log_prob, torch.zeros(2), torch.ones(2), clip_ratio=0.5, adv_clip_max=5.0,
        keep=torch.tensor([True, False]), clip_center=torch.tensor([0.0, 1e4]),
    )  # fmt: skip
    result.loss_sum.backward()
    assert result.loss_sum.item() == -1.0
    assert log_prob.grad.tolist() == [-1.0, 0.0]


def test_guards_centre_is_taken_off_before_its_scale():
    result = grpo_guard(
        torch.tensor([-1.0]), torch.tensor([-1.02]), torch.tensor([1.0]),
        mean=torch.tensor([[0.3, 0.1]]), old_mean=torch.tensor([[0.1, 0.1]]), std=torch.tensor([0.5]),
        step=torch.tensor([0.1]), clip_ratio=0.5, adv_clip_max=5.0, clip_center=torch.tensor([0.05]),
    )  # fmt: skip
    # The bias is .02 / (2 * .25) = .04.
    assert result.loss_sum.item() == pytest.approx(-math.exp((0.02 - 0.05 + 0.04) * 0.5) / 0.1)
