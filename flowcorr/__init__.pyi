from . import advantages, algorithm, config, correction, dumps, errors, losses, metrics, sde, trainer
from .advantages import group_advantages
from .algorithm import (
    apply_bypass_mode_to_diffusion_batch,
    apply_rollout_correction_to_diffusion_batch,
    diffusion_loss,
)
from .config import Config, load
from .correction import RolloutCorrectionConfig, compute_rollout_correction_and_rejection_mask
from .dumps import dump
from .dumps.replay import ReplaySamples
from .instruments.notebook import train
from .instruments.watch import Watch, watch

__all__ = [
    "Config",
    "ReplaySamples",
    "RolloutCorrectionConfig",
    "Watch",
    "__version__",
    "advantages",
    "algorithm",
    "apply_bypass_mode_to_diffusion_batch",
    "apply_rollout_correction_to_diffusion_batch",
    "compute_rollout_correction_and_rejection_mask",
    "config",
    "correction",
    "diffusion_loss",
    "dump",
    "dumps",
    "errors",
    "group_advantages",
    "load",
    "losses",
    "metrics",
    "sde",
    "train",
    "trainer",
    "watch",
]

__version__: str
