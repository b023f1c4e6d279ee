"""The two modes of rollout correction, and the loss that both end in."""

from flowcorr.algorithm.apply import needs_old_means, needs_rollout_means
from flowcorr.algorithm.auto_mode import AutoMode
from flowcorr.algorithm.bands import MeasuredBands
from flowcorr.algorithm.bypass import apply_bypass_mode_to_diffusion_batch
from flowcorr.algorithm.decoupled import apply_rollout_correction_to_diffusion_batch
from flowcorr.algorithm.diffusion_loss import diffusion_loss
from flowcorr.algorithm.score_drift import drift_squares

__all__ = [
    "AutoMode",
    "MeasuredBands",
    "apply_bypass_mode_to_diffusion_batch",
    "apply_rollout_correction_to_diffusion_batch",
    "diffusion_loss",
    "drift_squares",
    "needs_old_means",
    "needs_rollout_means",
]
