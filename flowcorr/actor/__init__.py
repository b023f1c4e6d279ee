"""The diffusion actor, in three parts: `scoring`, `update` and `weights`."""

from flowcorr.actor.actor import DiffusionActor

__all__ = ["DiffusionActor"]
