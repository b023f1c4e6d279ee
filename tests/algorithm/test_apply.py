import math
from dataclasses import replace

import pytest
import torch

from flowcorr.algorithm import (
    apply_bypass_mode_to_diffusion_batch,
    apply_rollout_correction_to_diffusion_batch,
    needs_old_means,
    needs_rollout_means,
)
from flowcorr.config.schema import ActorConfig, AlgorithmConfig, Config
from flowcorr.correction import RolloutCorrectionConfig
from flowcorr.errors import BatchError, ConfigError
from flowcorr.records import ActorBatch, Rollout

SHAPE = (2, 3)


def make_batch(delta, **options):
    """A batch whose old log-probs are `delta` `[B, T]` above the rollout's."""
    delta = torch.as_tensor(delta)
    samples, steps = delta.shape
    draw = torch.Generator().manual_seed(0)
    log_probs = -1.2 + 0.1 * torch.randn(samples, steps, generator=draw)
    rollout = Rollout(
        latents=torch.randn(samples, steps, *SHAPE, generator=draw),
        next_latents=torch.randn(samples, steps, *SHAPE, generator=draw),
        step_indices=torch.arange(steps).expand(samples, steps),
        timesteps=torch.full((samples, steps), 500.0),
        sigmas=torch.full((samples, steps), 0.5),
        sigmas_next=torch.full((samples, steps), 0.4),
        log_probs=log_probs,
        means=torch.randn(samples, steps, *SHAPE, generator=draw),
        stds=torch.full((samples, steps), 0.5),
        group_ids=torch.zeros(samples, dtype=torch.int64),
        policy_versions=torch.zeros(samples, dtype=torch.int64),
    )
    return ActorBatch(
        rollout=rollout, advantages=torch.ones(samples), old_log_probs=log_probs + delta, **options
    )


def configure(correction, loss_mode="flow_grpo"):
    return Config(
        actor=ActorConfig(loss_mode=loss_mode), algorithm=AlgorithmConfig(rollout_correction=correction)
    )


def test_bypass_takes_the_rollouts_log_probs_and_means():
    batch = replace(make_batch([[0.1, 0.2]]), old_log_probs=None)
    applied = apply_bypass_mode_to_diffusion_batch(batch)
    assert applied.old_log_probs is batch.rollout.log_probs
    assert applied.old_means is batch.rollout.means
    assert applied.rollout_is_weights is None
    assert applied.keep is None
    assert batch.old_log_probs is None


def test_correction_weighs_and_rejects():
    batch = make_batch([[0.0, math.log(1.5)], [math.log(3.0), math.log(0.4)], [math.log(1.1), 0.0]])
    config = RolloutCorrectionConfig(
        rollout_is="token", rollout_is_threshold=2.0, rollout_rs="token_k1", rollout_rs_threshold=2.0
    )
    corrected, metrics = apply_rollout_correction_to_diffusion_batch(batch, config)
    torch.testing.assert_close(
        corrected.rollout_is_weights, torch.tensor([[1.0, 1.5], [2.0, 0.4], [1.1, 1.0]]), rtol=1e-5, atol=0
    )
    assert corrected.keep.tolist() == [[True, True], [False, False], [True, True]]
    values = metrics.compute()
    assert values["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(2 / 6)
    assert values["rollout_corr/rollout_is_max"] == pytest.approx(2.0)
    assert {name.partition("/")[0] for name in values} == {"rollout_corr"}


def test_the_scale_counts_the_latent_elements():
    batch = make_batch([[0.01, -0.02]])
    config = RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=10.0, log_ratio_scale="sum")
    corrected, _ = apply_rollout_correction_to_diffusion_batch(batch, config)
    expected = torch.tensor([[math.exp(0.06), math.exp(-0.12)]])
    torch.testing.assert_close(corrected.rollout_is_weights, expected, rtol=1e-5, atol=0)


def test_terms_rejected_before_stay_rejected():
    keep = torch.tensor([[True, False], [True, True]])
    batch = make_batch([[0.0, 0.1], [0.0, 9.0]], keep=keep)
    config = RolloutCorrectionConfig(rollout_rs="token_k1", rollout_rs_threshold=2.0)
    corrected, metrics = apply_rollout_correction_to_diffusion_batch(batch, config)
    assert corrected.keep.tolist() == [[True, False], [True, False]]
    assert metrics.compute()["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("groups", "advantages", "keep"),
    [
        ("none", [-1.0, -0.5, 1.5, -2.0, 2.0], [1, 1, 0, 1, 0]),
        ("recentre", [-0.25, 0.25, 2.25, 0.0, 4.0], [1, 1, 0, 1, 0]),
        ("drop_small", [-0.25, 0.25, 2.25, -2.0, 2.0], [1, 1, 0, 0, 0]),
    ],
)
def test_groups_after_rejection(groups, advantages, keep):
    far = math.log(3.0)
    batch = make_batch([[0.0, 0.0], [0.0, 0.0], [far, far], [0.0, 0.0], [far, far]])
    batch = replace(
        batch,
        rollout=replace(batch.rollout, group_ids=torch.tensor([7, 7, 7, 3, 3])),
        advantages=torch.tensor([-1.0, -0.5, 1.5, -2.0, 2.0]),
    )
    config = RolloutCorrectionConfig(
        rollout_rs="seq_mean_k1", rollout_rs_threshold=2.0, rejection_groups=groups
    )
    corrected, metrics = apply_rollout_correction_to_diffusion_batch(batch, config)
    assert corrected.advantages.tolist() == advantages
    assert corrected.keep.tolist() == [[bool(kept)] * 2 for kept in keep]
    values = metrics.compute()
    assert values["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(2 / 5)
    assert ("rollout_corr/dropped_group_fraction" in values) == (groups != "none")
    if groups == "drop_small":
        assert values["rollout_corr/dropped_group_fraction"] == 0.5
        assert values["rollout_corr/partial_group_fraction"] == 0.5


def test_the_exact_kl_comes_from_both_means():
    batch = make_batch([[0.0, 0.0], [0.0, 0.0]])
    shift = torch.tensor([[0.1, 0.2], [0.3, 0.4]])
    batch = replace(batch, old_means=batch.rollout.means + shift[..., None, None])
    config = RolloutCorrectionConfig(rollout_rs="step_kl", rollout_rs_threshold=0.1)
    corrected, metrics = apply_rollout_correction_to_diffusion_batch(batch, config)
    exact = shift.square() / (2 * 0.25)
    assert metrics.compute()["rollout_corr/exact_kl"] == pytest.approx(exact.mean().item(), rel=1e-4)
    assert corrected.keep.tolist() == [[True, True], [False, False]]


def test_weights_that_are_not_applied_are_measured():
    config = RolloutCorrectionConfig(rollout_is="token", rollout_is_apply=False)
    corrected, metrics = apply_rollout_correction_to_diffusion_batch(make_batch([[0.1, 0.2]]), config)
    assert corrected.rollout_is_weights is None
    assert metrics.compute()["rollout_corr/rollout_is_mean"] > 1


@pytest.mark.parametrize("loss_mode", ["flow_grpo", "grpo_guard"])
def test_the_share_of_terms_outside_the_clip_before_any_update(loss_mode):
    batch = make_batch([[0.0, 0.015], [0.03, -0.05]])
    batch = replace(batch, old_means=batch.rollout.means)
    # grpo_guard multiplies the log-ratio by the std, 0.5 here, before it exponentiates.
    expected = {"flow_grpo": 3 / 4, "grpo_guard": 2 / 4}[loss_mode]
    _, metrics = apply_rollout_correction_to_diffusion_batch(
        batch, RolloutCorrectionConfig(), actor_config=ActorConfig(loss_mode=loss_mode, clip_ratio=0.01)
    )
    assert metrics.compute()["rollout_corr/clip_noise_fraction"] == pytest.approx(expected)


def test_missing_old_log_probs_are_an_error():
    batch = replace(make_batch([[0.0, 0.0]]), old_log_probs=None)
    with pytest.raises(BatchError, match=r"batch\.old_log_probs is None; recompute.*bypass_mode: true"):
        apply_rollout_correction_to_diffusion_batch(batch, RolloutCorrectionConfig())


def test_a_mode_that_is_left_open_is_an_error():
    with pytest.raises(
        ConfigError, match=r"bypass_mode='auto' cannot correct a single batch; take .*AutoMode"
    ):
        apply_rollout_correction_to_diffusion_batch(
            make_batch([[0.0, 0.0]]), RolloutCorrectionConfig(bypass_mode="auto")
        )


def test_old_log_probs_of_another_shape_are_an_error():
    batch = make_batch([[0.0, 0.0], [0.0, 0.0]])
    with pytest.raises(BatchError, match="nothing is broadcast"):
        apply_rollout_correction_to_diffusion_batch(
            replace(batch, old_log_probs=batch.old_log_probs[:, :1]), RolloutCorrectionConfig()
        )


@pytest.mark.parametrize(
    ("correction", "loss_mode", "old", "rollout"),
    [
        (None, "flow_grpo", False, False),
        (None, "grpo_guard", True, False),
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
