import math

import pytest
import torch

from flowcorr.errors import BatchError
from flowcorr.losses import grpo_guard
from flowcorr.sde import Transition, log_prob, step_kl
from tests.losses.test_flow_grpo import tensor

OPTIONS = {"clip_ratio": 0.5, "adv_clip_max": 5.0}


def test_against_hand_computed_numbers():
    mean, old_mean = tensor([0.3, 0.1], [0.0, 0.4]), tensor([0.1, 0.1], [0.0, 0.0])
    std, step = tensor(0.5, 0.2), tensor(0.1, 0.05)
    log_prob, old = tensor(-1.0, -1.1), tensor(-1.02, -1.0)
    result = grpo_guard(
        log_prob, old, tensor(1.0, -2.0), kl=step_kl(mean, old_mean, std), std=std, step=step, **OPTIONS
    )
    # Biases: .02 / (2 * .25) = .04 and .08 / (2 * .04) = 1.
    first = -math.exp((0.02 + 0.04) * 0.5) / 0.1
    second = 2.0 * math.exp((-0.1 + 1.0) * 0.2) / 0.05
    assert result.loss_sum.item() == pytest.approx(first + second, rel=1e-12)


def test_the_bias_centres_the_ratio():
    """Sampled under the old policy, log_ratio + bias has mean 0, where log_ratio alone has -r^2 / 2."""
    generator = torch.Generator().manual_seed(0)
    num_samples, num_elements, r = 4000, 16, 1.0
    noise = torch.randn(num_samples, num_elements, dtype=torch.float64, generator=generator)
    std = torch.full((num_samples,), 0.3, dtype=torch.float64)
    old_mean = torch.zeros_like(noise)
    mean = old_mean + r * 0.3
    log_probs = [log_prob(0.3 * noise, Transition(mean=m, std=std, step=std)) for m in (mean, old_mean)]
    values = grpo_guard(
        *log_probs, torch.ones_like(std), kl=step_kl(mean, old_mean, std), std=std, step=std, **OPTIONS
    ).metrics.compute()
    assert values["actor/ppo_kl"] == pytest.approx(r**2 / 2, abs=0.02)
    # The mean of a lognormal ratio of spread s r / sqrt(D).
    spread = 0.3 * r / math.sqrt(num_elements)
    assert values["actor/ratio_mean"] == pytest.approx(
        math.exp(spread**2 / 2), abs=4 * spread / num_samples**0.5
    )


def test_the_bias_is_differentiated():
    mean = tensor([0.3, 0.1]).requires_grad_()
    arguments = tensor(-1.0), tensor(-1.0), tensor(1.0)
    kl = step_kl(mean, tensor([0.1, 0.1]), tensor(0.5))
    grpo_guard(*arguments, kl=kl, std=tensor(0.5), step=tensor(0.1), **OPTIONS).loss_sum.backward()
    # d bias / d mean = (mean - old_mean) / (D s^2) = [.4, 0]; d loss / d bias = -ratio s / step.
    ratio = math.exp(0.04 * 0.5)
    assert mean.grad[0].tolist() == pytest.approx([-ratio * 0.5 / 0.1 * 0.4, 0.0])


def test_a_non_finite_old_mean_leaves_the_gradient_finite():
    mean = tensor([0.3, 0.1], [0.2, 0.2]).requires_grad_()
    result = grpo_guard(
        tensor(-1.0, -1.0),
        tensor(-1.0, -1.0),
        tensor(1.0, 1.0),
        kl=step_kl(mean, tensor([0.1, math.nan], [0.1, 0.1]), tensor(0.5, 0.5)),
        std=tensor(0.5, 0.5),
        step=tensor(0.1, 0.1),
        **OPTIONS,
    )
    result.loss_sum.backward()
    assert mean.grad[0].tolist() == [0.0, 0.0]
    assert (mean.grad[1] != 0).all()
    assert result.count_all.item() == 1
    assert result.metrics.compute()["actor/nonfinite_fraction"] == 0.5


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"kl": None}, r"kl .*sde\.step_kl"),
        ({"kl": torch.zeros(1)}, r"kl .*\[1\]; .*\[2\]"),
        ({"std": torch.ones(1)}, r"std .*\[1\]; .*\[2\]"),
        ({"step": torch.ones(2, 1)}, r"step .*\[2, 1\]; .*\[2\]"),
    ],
)
def test_shapes_of_kl_stds_and_steps(change, named):
    arguments = {"kl": torch.zeros(2), "std": torch.ones(2), "step": torch.ones(2)}
    with pytest.raises(BatchError, match=f"^{named}"):
        grpo_guard(torch.zeros(2), torch.zeros(2), torch.ones(2), **(arguments | change), **OPTIONS)


@pytest.mark.parametrize("column", ["std", "step"])
@pytest.mark.parametrize("bad", [math.nan, 0.0, -0.1, math.inf])
def test_a_step_without_a_size_is_not_finite_and_takes_no_part(column, bad):
    columns = {"kl": torch.zeros(2), "std": torch.ones(2), "step": torch.ones(2)}
    columns[column] = torch.tensor([bad, 1.0])
    log_prob = torch.zeros(2).requires_grad_()
    result = grpo_guard(log_prob, torch.zeros(2), torch.ones(2), **columns, **OPTIONS)
    (slope,) = torch.autograd.grad(result.loss_sum, log_prob)
    assert (result.count_kept, result.loss_sum, slope.tolist()) == (1, -1, [0, -1])
    assert result.metrics.compute()["actor/nonfinite_fraction"] == 0.5
