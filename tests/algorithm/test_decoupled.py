"""Decoupled mode: a whole batch is corrected once."""

import math
from dataclasses import replace

import pytest
import torch

from flowcorr.algorithm import (
    apply_rollout_correction_to_diffusion_batch,
)
from flowcorr.correction import OFF, RolloutCorrectionConfig
from flowcorr.errors import BatchError, ConfigError
from tests.algorithm.batches import make_batch


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


def test_missing_old_log_probs_are_an_error():
    batch = replace(make_batch([[0.0, 0.0]]), old_log_probs=None)
    with pytest.raises(BatchError, match=r"^batch\.old_log_probs .*bypass_mode: true"):
        apply_rollout_correction_to_diffusion_batch(batch, RolloutCorrectionConfig())


def test_a_correction_that_the_loss_applies_is_refused():
    config = RolloutCorrectionConfig(bypass_mode=True, loss_type="reinforce", rollout_is="token")
    with pytest.raises(ConfigError, match=r"rollout_correction\.bypass_mode=true .*apply_bypass_mode_to"):
        apply_rollout_correction_to_diffusion_batch(make_batch([[0.0, 0.1]]), config)


def test_no_correction_leaves_the_batch_as_it_is():
    batch = make_batch([[0.1, 0.2], [3.0, -3.0]])
    corrected, metrics = apply_rollout_correction_to_diffusion_batch(batch, OFF)
    assert corrected.rollout_is_weights is None
    assert corrected.keep is None
    assert torch.equal(corrected.advantages, batch.advantages)
    assert metrics.compute() == {}
