"""Rollout correction: importance weights, rejection and diagnostics of the rollout-to-training drift."""

from flowcorr.correction.config import RolloutCorrectionConfig
from flowcorr.correction.correct import Correction, compute_rollout_correction_and_rejection_mask
from flowcorr.correction.presets import PRESETS

__all__ = [
    "PRESETS",
    "Correction",
    "RolloutCorrectionConfig",
    "compute_rollout_correction_and_rejection_mask",
]
