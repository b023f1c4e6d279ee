"""The diffusion actor, in three parts: `scoring`, `update` and `weights`."""

from flowcorr.actor.actor import DiffusionActor
from flowcorr.actor.scoring import Scores

__all__ = ["DiffusionActor", "Scores"]
