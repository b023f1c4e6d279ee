"""The correction as the configuration asks for it, on a batch of rollouts."""

import math
from dataclasses import replace

import pytest
import torch

from flowcorr.algorithm import (
    apply_rollout_correction_to_diffusion_batch,
    needs_old_means,
    needs_rollout_means,
)
from flowcorr.algorithm.apply import correct
from flowcorr.algorithm.terms import batch_terms
from flowcorr.config.schema import ActorConfig, AlgorithmConfig, Config
from flowcorr.correction import OFF, RolloutCorrectionConfig
from flowcorr.correction.robust import Noise
from flowcorr.errors import ConfigError
from tests.algorithm.batches import make_batch


def configure(correction, loss_mode="flow_grpo"):
    return Config(
        actor=ActorConfig(loss_mode=loss_mode), algorithm=AlgorithmConfig(rollout_correction=correction)
    )


def test_the_scale_counts_the_latent_elements():
    batch = make_batch([[0.01, -0.02]])
    config = RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=10.0, log_ratio_scale="sum")
    corrected, _ = apply_rollout_correction_to_diffusion_batch(batch, config)
    expected = torch.tensor([[math.exp(0.06), math.exp(-0.12)]])
    torch.testing.assert_close(corrected.rollout_is_weights, expected, rtol=1e-5, atol=0)


def test_the_exact_kl_comes_from_both_means():
    batch = make_batch([[0.0, 0.0], [0.0, 0.0]])
    shift = torch.tensor([[0.1, 0.2], [0.3, 0.4]])
    batch = replace(batch, old_means=batch.rollout.window.means + shift[..., None, None])
    config = RolloutCorrectionConfig(rollout_rs="step_kl", rollout_rs_threshold=0.1)
    corrected, metrics = apply_rollout_correction_to_diffusion_batch(batch, config)
    exact = shift.square() / (2 * 0.25)
    assert metrics.compute()["rollout_corr/exact_kl"] == pytest.approx(exact.mean().item(), rel=1e-4)
    assert corrected.keep.tolist() == [[True, True], [False, False]]


@pytest.mark.parametrize("loss_mode", ["flow_grpo", "grpo_guard"])
def test_the_share_of_terms_outside_the_clip_before_any_update(loss_mode):
    batch = make_batch([[0.0, 0.015], [0.03, -0.05]])
    batch = replace(batch, old_means=batch.rollout.window.means)
    # grpo_guard multiplies the log-ratio by the std, 0.5 here, before it exponentiates.
    expected = {"flow_grpo": 3 / 4, "grpo_guard": 2 / 4}[loss_mode]
    _, metrics = apply_rollout_correction_to_diffusion_batch(
        batch, RolloutCorrectionConfig(), actor_config=ActorConfig(loss_mode=loss_mode, clip_ratio=0.01)
    )
    assert metrics.compute()["rollout_corr/clip_noise_fraction"] == pytest.approx(expected)


def test_a_mode_that_is_left_open_is_an_error():
    with pytest.raises(ConfigError, match="bypass_mode='auto' .*AutoMode"):
        apply_rollout_correction_to_diffusion_batch(
            make_batch([[0.0, 0.0]]), RolloutCorrectionConfig(bypass_mode="auto")
        )


# Of 3 steps that move by x each, the third of which is left out, the loss sees 2 x as a sum and x as a mean. Both stop
# at log(1.01); so do single steps.
@pytest.mark.parametrize("mode", ["seq_sum_k1", "seq_mean_k1", "seq_max_k2", "token_k1"])
@pytest.mark.parametrize(
    ("level", "x"),
    [
        ("step", math.log(1.01)),
        ("trajectory_mean", math.log(1.01)),
        ("trajectory_sum", math.log(1.01) / 2),
    ],
)
def test_learning_widens_a_band_up_to_the_clip_of_the_loss(level, x, mode):
    batch = make_batch([[factor * x] * 3 for factor in (0.99, 1.01, -0.99, -1.01)])
    terms = replace(batch_terms(batch), keep=torch.tensor([True, True, False]).expand(4, 3))
    correction = RolloutCorrectionConfig(
        bypass_mode=True, bypass_scope="trajectory", rollout_rs=mode, rollout_rs_threshold="auto"
    )
    nothing = torch.zeros(10, dtype=torch.float64)
    kept, _ = correct(
        terms,
        correction,
        actor_config=ActorConfig(clip_ratio=0.01, ratio_level=level),
        num_steps=10,
        noise={mode: Noise(centre=nothing, spread=nothing)},
    )
    assert kept.keep[:, :2].tolist() == [[True] * 2, [False] * 2, [True] * 2, [False] * 2]


@pytest.mark.parametrize(
    ("correction", "loss_mode", "old", "rollout"),
    [
        (OFF, "flow_grpo", False, False),
        (OFF, "grpo_guard", True, False),
        (RolloutCorrectionConfig(), "grpo_guard", True, False),
        (RolloutCorrectionConfig(rollout_rs="step_kl", rollout_rs_threshold=0.1), "flow_grpo", True, True),
        (RolloutCorrectionConfig(bypass_mode=True), "flow_grpo", False, False),
        (RolloutCorrectionConfig(bypass_mode=True), "flow_dppo", True, True),
        (RolloutCorrectionConfig(bypass_mode=True, loss_type="reinforce"), "flow_grpo", False, False),
        (RolloutCorrectionConfig(bypass_mode="auto"), "flow_grpo", False, False),
        (RolloutCorrectionConfig(bypass_mode="auto"), "grpo_guard", True, True),
    ],
)
def test_means_are_asked_for_where_they_are_read(correction, loss_mode, old, rollout):
    config = configure(correction, loss_mode)
    assert needs_old_means(config) == old
    assert needs_rollout_means(config) == rollout
