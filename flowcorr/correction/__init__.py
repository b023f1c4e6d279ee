"""Rollout correction: importance weights, rejection and diagnostics of the rollout-to-training drift."""

from flowcorr.correction.config import OFF, RolloutCorrectionConfig
from flowcorr.correction.correct import Correction, compute_rollout_correction_and_rejection_mask
from flowcorr.correction.presets import PRESETS
from flowcorr.correction.rejection import ABSOLUTE, EXPONENTIAL, RATIO, RS_MODES, SQUARE, Bounds, Mode

__all__ = [
    "ABSOLUTE",
    "EXPONENTIAL",
    "OFF",
    "PRESETS",
    "RATIO",
    "RS_MODES",
    "SQUARE",
    "Bounds",
    "Correction",
    "Mode",
    "RolloutCorrectionConfig",
    "compute_rollout_correction_and_rejection_mask",
]
