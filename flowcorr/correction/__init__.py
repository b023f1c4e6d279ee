"""Rollout correction: importance weights, rejection and diagnostics of the rollout-to-training drift."""
