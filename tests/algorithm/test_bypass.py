"""Bypass mode: the rollout's log-probs are the old ones."""

from dataclasses import replace

from flowcorr.algorithm import (
    apply_bypass_mode_to_diffusion_batch,
)
from tests.algorithm.batches import make_batch


def test_bypass_takes_the_rollouts_log_probs_and_means():
    batch = replace(make_batch([[0.1, 0.2]]), old_log_probs=None)
    applied = apply_bypass_mode_to_diffusion_batch(batch)
    assert applied.old_log_probs is batch.rollout.log_probs
    assert applied.old_means is batch.rollout.window.means
    assert applied.rollout_is_weights is None
    assert applied.keep is None
    assert batch.old_log_probs is None
