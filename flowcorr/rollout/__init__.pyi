from .base import OnImages, RolloutEngine, Weights, ignore_images
from .in_process import InProcessEngine
from .sampler import decode, sample_ode, sample_sde_window

__all__ = [
    "InProcessEngine",
    "OnImages",
    "RolloutEngine",
    "Weights",
    "decode",
    "ignore_images",
    "sample_ode",
    "sample_sde_window",
]
