"""Rollout engines: what samples the trajectories."""

from flowcorr.rollout.base import OnImages, RolloutEngine, Weights, ignore_images
from flowcorr.rollout.in_process import InProcessEngine
from flowcorr.rollout.sampler import decode, sample_ode, sample_sde_window

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
