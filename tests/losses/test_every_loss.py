"""What every loss must hold, on a policy with one parameter for each latent element."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowcorr.errors import BatchError
from flowcorr.losses import LOSSES
from flowcorr.metrics import Metrics
from flowcorr.records import Terms
from flowcorr.sde import Transition, log_prob, step_kl

NAMES = sorted(LOSSES)
RATIO_NAMES = sorted(set(LOSSES) - {"reinforce"})
ELEMENTS = 6


@dataclass(frozen=True, kw_only=True)
class Settings:
    clip_ratio: float = 0.02
    adv_clip_max: float = 5.0
    ratio_level: str = "step"
    kl_threshold: float = 1e-3
    importance_cap: float = 1.01


def problem(*shape, drift=0.0, seed=0):
    """A policy at its parameter, and data sampled under an old policy that it drifted from."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*size):
        return torch.randn(size, dtype=torch.float64, generator=generator)

    theta = torch.zeros(ELEMENTS, dtype=torch.float64, requires_grad=True)
    std = 0.2 + torch.rand(shape, dtype=torch.float64, generator=generator)
    old_mean = randn(*shape, ELEMENTS)
    mean = old_mean + drift * randn(*shape, ELEMENTS) + theta
    reached = old_mean + std[..., None] * randn(*shape, ELEMENTS)
    step = 0.05 + 0.1 * torch.rand(shape, dtype=torch.float64, generator=generator)
    current = Transition(mean=mean, std=std, step=step)
    old = log_prob(reached, Transition(mean=old_mean, std=std, step=step))
    return theta, Terms(
        log_prob=log_prob(reached, current),
        old_log_prob=old,
        rollout_log_prob=old,
        advantage=randn(*shape),
        std=std,
        step=step,
        step_index=torch.zeros(shape, dtype=torch.int64),
        old_kl=step_kl(mean, old_mean, std),
        weight=torch.rand(shape, dtype=torch.float64, generator=generator),
        keep=torch.rand(shape, generator=generator) > 0.3,
    )


def gradient(loss_sum, theta):
    return torch.autograd.grad(loss_sum, theta, retain_graph=True)[0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(5,), (4, 2)])
def test_on_policy_gradient_is_the_policy_gradient(name, shape):
    theta, terms = problem(*shape)
    scale = terms.std / terms.step if name == "grpo_guard" else 1.0
    coefficient = torch.where(terms.keep, -terms.weight * terms.advantage * scale, 0.0)
    expected = gradient((coefficient * terms.log_prob).sum(), theta)
    result = LOSSES[name].objective(terms, Settings())
    torch.testing.assert_close(gradient(result.loss_sum, theta), expected)
    assert result.count_kept.item() == terms.keep.sum().item()
    assert result.count_all.item() == math.prod(shape)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("level", ["step", "trajectory_mean", "trajectory_sum"])
def test_micro_batches_add_up_to_the_batch(name, level):
    theta, terms = problem(6, 3, drift=0.1)
    settings = Settings(ratio_level=level)
    whole = LOSSES[name].objective(terms, settings)
    cuts = [slice(0, 1), slice(1, 4), slice(4, 6)]
    parts = [LOSSES[name].objective(terms.select(cut), settings) for cut in cuts]
    total = torch.stack([piece.loss_sum for piece in parts]).sum()
    torch.testing.assert_close(total, whole.loss_sum)
    torch.testing.assert_close(gradient(total, theta), gradient(whole.loss_sum, theta))
    assert sum(piece.count_kept for piece in parts) == whole.count_kept
    assert sum(piece.count_all for piece in parts) == whole.count_all
    merged = Metrics(*(piece.metrics for piece in parts)).compute()
    assert merged == pytest.approx(whole.metrics.compute(), rel=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_folded_steps_equal_single_steps(name):
    theta, terms = problem(5, 3, drift=0.1)
    whole = LOSSES[name].objective(terms, Settings())
    steps = [LOSSES[name].objective(terms.select((slice(None), t)), Settings()) for t in range(3)]
    total = torch.stack([step.loss_sum for step in steps]).sum()
    torch.testing.assert_close(gradient(total, theta), gradient(whole.loss_sum, theta))
    merged = Metrics(*(step.metrics for step in steps)).compute()
    assert merged == pytest.approx(whole.metrics.compute(), rel=1e-12)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field", ["old_log_prob", "log_prob", "advantage", "weight"])
def test_non_finite_terms_take_no_part(name, value, field):
    theta, terms = problem(6, 2, drift=0.1)
    terms = replace(terms, keep=None)
    bad = torch.zeros(6, 2, dtype=torch.bool)
    bad[1, 0] = bad[4, 1] = True
    spoilt = torch.where(bad, value, getattr(terms, field))
    result = LOSSES[name].objective(replace(terms, **{field: spoilt}), Settings())
    without = LOSSES[name].objective(replace(terms, keep=~bad), Settings())
    torch.testing.assert_close(result.loss_sum, without.loss_sum)
    torch.testing.assert_close(gradient(result.loss_sum, theta), gradient(without.loss_sum, theta))
    assert result.count_all.item() == result.count_kept.item() == 10
    assert result.metrics.compute()["actor/nonfinite_fraction"] == pytest.approx(2 / 12)
    assert without.metrics.compute()["actor/nonfinite_fraction"] == 0.0


@pytest.mark.parametrize("name", NAMES)
def test_a_rejected_term_that_would_overflow_leaves_the_gradient_finite(name):
    theta, terms = problem(4)
    keep = torch.tensor([True, False, True, True])
    far = torch.where(keep, terms.old_log_prob, terms.old_log_prob - 1e4)
    result = LOSSES[name].objective(replace(terms, old_log_prob=far, keep=keep), Settings())
    expected = LOSSES[name].objective(replace(terms, keep=keep), Settings())
    assert torch.isfinite(result.loss_sum)
    torch.testing.assert_close(gradient(result.loss_sum, theta), gradient(expected.loss_sum, theta))


@pytest.mark.parametrize("name", RATIO_NAMES)
@pytest.mark.parametrize("distance", [1e4, -1e4])
def test_a_kept_ratio_cannot_overflow(name, distance):
    theta, terms = problem(4)
    far = terms.old_log_prob + distance
    result = LOSSES[name].objective(replace(terms, old_log_prob=far, keep=None), Settings())
    assert torch.isfinite(result.loss_sum)
    assert torch.isfinite(gradient(result.loss_sum, theta)).all()
    assert all(math.isfinite(value) for value in result.metrics.compute().values())


@pytest.mark.parametrize("name", NAMES)
def test_nothing_kept_is_zero_with_a_zero_gradient(name):
    theta, terms = problem(4, 2)
    result = LOSSES[name].objective(replace(terms, keep=torch.zeros(4, 2, dtype=torch.bool)), Settings())
    assert result.mean("kept").item() == result.mean("all").item() == 0.0
    assert gradient(result.loss_sum, theta).tolist() == [0.0] * ELEMENTS
    assert (result.count_kept.item(), result.count_all.item()) == (0, 8)
    assert result.metrics.compute() == {"actor/nonfinite_fraction": 0.0}


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_detached_and_icepop_zeros_count_as_kept(name):
    theta, terms = problem(4, drift=0.1)
    weight = torch.tensor([0.0, 1.0, 2.0, 0.5], dtype=torch.float64, requires_grad=True)
    result = LOSSES[name].objective(replace(terms, weight=weight * 1.0, keep=None), Settings())
    result.loss_sum.backward()
    assert weight.grad is None
    assert theta.grad is not None
    assert result.count_kept.item() == 4
    ones = LOSSES[name].objective(replace(terms, weight=torch.ones(4, dtype=torch.float64)), Settings())
    nothing = LOSSES[name].objective(replace(terms, weight=None), Settings())
    torch.testing.assert_close(ones.loss_sum, nothing.loss_sum)


@pytest.mark.parametrize("name", NAMES)
def test_advantages_are_clamped(name):
    _, terms = problem(3)
    large = torch.tensor([50.0, -50.0, 1.0], dtype=torch.float64)
    clamped = torch.tensor([5.0, -5.0, 1.0], dtype=torch.float64)
    values = [
        LOSSES[name].objective(replace(terms, advantage=advantage), Settings()).loss_sum
        for advantage in (large, clamped)
    ]
    torch.testing.assert_close(*values)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("field", ["advantage", "old_log_prob", "weight", "keep"])
def test_nothing_broadcasts(name, field):
    _, terms = problem(4, 2)
    column = getattr(terms, field)[:, :1]
    with pytest.raises(BatchError, match=rf"^{field} .*\[4, 1\]; .*\[4, 2\]"):
        LOSSES[name].objective(replace(terms, **{field: column}), Settings())


@pytest.mark.parametrize("name", NAMES)
def test_more_axes_than_samples_and_steps_are_refused(name):
    _, terms = problem(4, 2, 1)
    with pytest.raises(BatchError, match=r"^log_prob .*\[4, 2, 1\]; .*\[b, T\]"):
        LOSSES[name].objective(terms, Settings())


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15)
@given(drift=st.floats(0.0, 0.5), seed=st.integers(0, 50))
def test_gradients_are_those_of_finite_differences(name, drift, seed):
    """In directions that no kink separates from the point, the loss is differentiated as it is written."""
    theta, terms = problem(3, 2, drift=drift, seed=seed)
    options = Settings(clip_ratio=0.9, kl_threshold=1e9, importance_cap=1e9)
    analytic = gradient(LOSSES[name].objective(terms, options).loss_sum, theta)

    def at(offset):
        # Quadratic in the mean: the slope along theta, and the curvature of both is 1 / s^2.
        curved = offset.square().mean() / (2 * terms.std.square())
        moved = {
            "log_prob": terms.log_prob.detach() + slope(terms.log_prob, offset) - curved,
            "old_kl": terms.old_kl.detach() + slope(terms.old_kl, offset) + curved,
        }
        return LOSSES[name].objective(replace(terms, **moved), options).loss_sum.item()

    def slope(values, offset):
        return torch.stack([gradient(value, theta) @ offset for value in values.flatten()]).view_as(values)

    direction = torch.ones(ELEMENTS, dtype=torch.float64)
    numeric = (at(1e-6 * direction) - at(-1e-6 * direction)) / 2e-6
    assert (analytic @ direction).item() == pytest.approx(numeric, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", RATIO_NAMES)
def test_ratio_metrics_are_over_kept_terms(name):
    _, terms = problem(8, 2, drift=0.1)
    terms = replace(terms, keep=terms.keep.index_fill(0, torch.tensor([0]), True))
    values = LOSSES[name].objective(terms, Settings()).metrics.compute()
    log_ratio = (terms.log_prob - terms.old_log_prob).detach()
    assert values["actor/ppo_kl"] == pytest.approx(-log_ratio[terms.keep].mean().item(), rel=1e-12)
    if name == "grpo_guard":
        log_ratio = (log_ratio + terms.old_kl.detach()) * terms.std
    ratio = log_ratio.exp()[terms.keep]
    assert values["actor/ratio_mean"] == pytest.approx(ratio.mean().item(), rel=1e-12)
    assert values["actor/ratio_std"] == pytest.approx(ratio.std().item(), rel=1e-9)
