"""How far the ratios of every loss start from 1."""

import pytest
import torch

from flowcorr.config.schema import ActorConfig
from flowcorr.instruments.clip_noise import ratio_distance


@pytest.mark.parametrize(
    ("actor", "expected"),
    [
        ({}, [[0.2, 0.1]]),
        ({"loss_mode": "grpo_guard"}, [[0.15, 0.1]]),
        ({"ratio_level": "trajectory_mean"}, [[0.05, 0.05]]),
        ({"ratio_level": "trajectory_sum"}, [[0.1, 0.1]]),
    ],
)
def test_distance_is_of_the_ratio_that_the_loss_uses(actor, expected):
    steps = torch.tensor([[0.2, -0.1]], dtype=torch.float64)
    kl = torch.tensor([[0.1, 0.3]], dtype=torch.float64)
    found = ratio_distance(steps, kl, torch.full((1, 2), 0.5), ActorConfig(**actor))
    sign = torch.tensor([[1.0, 1.0 if actor else -1.0]], dtype=torch.float64)
    log_ratio = sign * torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(found, log_ratio.expm1().abs())
