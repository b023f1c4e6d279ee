from .config import MEASURED, OFF, RolloutCorrectionConfig
from .correct import Correction, compute_rollout_correction_and_rejection_mask
from .modes import ABSOLUTE, EXPONENTIAL, RATIO, RS_MODES, SQUARE, Bounds, Mode
from .presets import PRESETS

__all__ = [
    "ABSOLUTE",
    "EXPONENTIAL",
    "MEASURED",
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
