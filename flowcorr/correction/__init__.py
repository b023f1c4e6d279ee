"""Rollout correction: importance weights, rejection and diagnostics of the rollout-to-training drift."""

from flowcorr.correction.config import OFF, RolloutCorrectionConfig
from flowcorr.correction.correct import Correction, compute_rollout_correction_and_rejection_mask
from flowcorr.correction.presets import PRESETS
from flowcorr.correction.rejection import RS_MODES, Mode

__all__ = [
    "OFF",
    "PRESETS",
    "RS_MODES",
    "Correction",
    "Mode",
    "RolloutCorrectionConfig",
    "compute_rollout_correction_and_rejection_mask",
]
