"""The terms of a loss: clip ranges that differ by step, and ratios of whole windows."""

import math
from dataclasses import replace

import pytest
import torch

from flowcorr.errors import BatchError, ConfigError
from flowcorr.losses import LOSSES, clip_by_term, flow_dppo, flow_grpo, importance_cap
from flowcorr.losses.terms import mask_terms, ratio_stats
from flowcorr.metrics import Metrics
from tests.losses.test_every_loss import Settings, gradient, problem
from tests.losses.test_flow_grpo import loss, tensor

CLIPPED = sorted(name for name, loss in LOSSES.items() if "clip_ratio" in loss.reads)
CLIPS = (0.01, 0.03, 0.1)


def steps(shape, indices):
    """A policy far enough from its data that every clip range cuts some terms."""
    theta, terms = problem(*shape, drift=0.3)
    return theta, replace(terms, step_index=torch.tensor(indices).expand(shape).contiguous())


@pytest.mark.parametrize("name", CLIPPED)
def test_every_step_has_the_range_of_its_index(name):
    theta, terms = steps((6, 3), [2, 0, 1])
    whole = LOSSES[name].objective(terms, Settings(clip_ratio=CLIPS))
    alone = [
        LOSSES[name].objective(terms.select((slice(None), t)), Settings(clip_ratio=CLIPS[index]))
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
    theta, terms = steps((6, 3), [0, 1, 2])
    terms = replace(terms, log_prob=terms.log_prob.to(dtype), old_log_prob=terms.old_log_prob.to(dtype))
    listed, number = (
        LOSSES[name].objective(terms, Settings(clip_ratio=clip, ratio_level=level))
        for clip in ((0.03,) * 3, 0.03)
    )
    assert listed.loss_sum == number.loss_sum
    assert torch.equal(gradient(listed.loss_sum, theta), gradient(number.loss_sum, theta))
    assert listed.metrics.compute() == number.metrics.compute()
    assert number.metrics.compute()["actor/pg_clipfrac"] > 0


def test_one_advantage_per_sample_is_refused_with_its_remedy():
    log_prob, advantage = torch.zeros(4, 2), torch.arange(4.0)
    remedy = r"advantage\[:, None\]\.expand_as\(log_prob\)"
    with pytest.raises(BatchError, match=rf"^advantage .*\[4\]; .*\[4, 2\], .*{remedy}$"):
        mask_terms(log_prob, log_prob, advantage, adv_clip_max=5.0, weight=None, keep=None)
    spread = advantage[:, None].expand_as(log_prob)
    terms = mask_terms(log_prob, log_prob, spread, adv_clip_max=5.0, weight=None, keep=None)
    assert terms.advantage[:, 1].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_the_range_of_a_term_is_that_of_its_step():
    assert clip_by_term(0.5, torch.tensor([0, 1])) == 0.5
    got = clip_by_term(CLIPS, torch.tensor([[2, 0], [1, 1]]))
    assert got.tolist() == [[0.1, 0.01], [0.03, 0.03]]


@pytest.mark.parametrize(("own_loss", "name"), [(flow_grpo, "clip_ratio"), (importance_cap, "cap")])
def test_a_limit_of_ratios_does_not_broadcast(own_loss, name):
    log_prob = torch.zeros(4, 2)
    with pytest.raises(BatchError, match=rf"^{name} .*\[2\]; .*\[4, 2\]"):
        own_loss(log_prob, log_prob, log_prob, **{name: torch.full((2,), 0.1)}, adv_clip_max=5.0)


@pytest.mark.parametrize(("level", "pooled"), [("trajectory_mean", 0.02), ("trajectory_sum", 0.06)])
def test_trajectory_ratios_pool_the_kept_steps(level, pooled):
    log_ratio = tensor(0.01, 0.02, 0.03, 7.0)[None].requires_grad_()
    keep = torch.tensor([[True, True, True, False]])
    result = loss(log_ratio, torch.ones(1, 4).double(), keep=keep, ratio_level=level)
    result.loss_sum.backward()
    assert result.loss_sum.item() == pytest.approx(-3 * math.exp(pooled))
    assert result.count_kept.item() == 3
    share = 1.0 if level == "trajectory_mean" else 3.0
    expected = [-share * math.exp(pooled)] * 3 + [0.0]
    assert log_ratio.grad[0].tolist() == pytest.approx(expected)


def test_trajectory_ratios_need_whole_windows():
    with pytest.raises(BatchError, match=r"^actor\.ratio_level=trajectory_mean .*\[1\]; .*bypass_scope"):
        loss(tensor(0.1), tensor(1.0), ratio_level="trajectory_mean")


def test_a_losss_own_ratio_may_be_anything_where_terms_are_not_kept():
    old = tensor(0.0, 0.0, 0.0)
    new = old + tensor(0.1, math.nan, 0.3)
    terms = mask_terms(new, old, torch.ones_like(old), adv_clip_max=5.0, weight=None, keep=None)
    found = Metrics(ratio_stats(terms, new - old)).compute()
    assert found["ratio_mean"] == pytest.approx((math.exp(0.1) + math.exp(0.3)) / 2)
    assert found["ratio_std"] == pytest.approx((math.exp(0.3) - math.exp(0.1)) / math.sqrt(2))


def test_unknown_ratio_level():
    with pytest.raises(ConfigError, match=r"^actor\.ratio_level='trajectory' .* step, trajectory_mean, "):
        loss(tensor(0.1), tensor(1.0), ratio_level="trajectory")


@pytest.mark.parametrize("value", [-5.0, 0.0, math.nan, True])
@pytest.mark.parametrize(
    ("own_loss", "name", "others"),
    [
        (flow_grpo, "clip_ratio", {"adv_clip_max": 5.0}),
        (flow_grpo, "adv_clip_max", {"clip_ratio": 0.1}),
        (importance_cap, "cap", {"adv_clip_max": 5.0}),
        (flow_dppo, "kl_threshold", {"kl": torch.zeros(2)}),
    ],
)
def test_limits_that_no_loss_can_have(own_loss, name, others, value):
    values = torch.zeros(2)
    with pytest.raises(ConfigError, match=f"^{name}={value} "):
        own_loss(values, values, values, **others, **{name: value})


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8])
def test_a_mask_is_of_bools(dtype):
    values = torch.zeros(2)
    with pytest.raises(BatchError, match=f"^keep .* {dtype}; .*bool"):
        flow_grpo(values, values, values, clip_ratio=0.1, adv_clip_max=5.0, keep=torch.ones(2, dtype=dtype))
