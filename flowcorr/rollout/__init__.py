"""Rollout engines: what samples the trajectories."""

from flowcorr.rollout.base import RolloutEngine, Weights
from flowcorr.rollout.in_process import InProcessEngine
from flowcorr.rollout.sampler import decode, sample_ode, sample_sde_window

__all__ = ["InProcessEngine", "RolloutEngine", "Weights", "decode", "sample_ode", "sample_sde_window"]
