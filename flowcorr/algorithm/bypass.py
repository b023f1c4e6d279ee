"""Bypass mode: the rollout's own log-probs anchor the ratio, and no pass recomputes them."""

from __future__ import annotations

from dataclasses import replace

from flowcorr.records import ActorBatch


def apply_bypass_mode_to_diffusion_batch(batch: ActorBatch) -> ActorBatch:
    """Set `old_log_probs := rollout.log_probs`, and the old step means to the rollout's if it returned them."""
    # Before any update PPO's ratio is then exp(actor's - engine's log-prob) and not 1: the gap uses up the clip range.
    rollout = batch.rollout
    return replace(batch, old_log_probs=rollout.log_probs, old_means=rollout.window.means)
