"""A family as an engine with processes of its own has it: a transformer's configuration, a VAE, and nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowcorr.errors import ConfigError
from flowcorr.models.base import Guidance, ModelFamily


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerFacts:
    """`ModelFamily.transformer` in an engine: the class there is the engine's, and has the configuration in common."""

    config: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """`ModelFamily.pipeline` in an engine."""

    transformer: TransformerFacts
    vae: Any


def as_in_engine(family: ModelFamily) -> ModelFamily:
    """The family with all that `velocity` and `decode` may read in an engine, and in this process' memory."""
    facts = TransformerFacts(config=family.transformer.config)
    return type(family)(EngineParts(transformer=facts, vae=family.pipeline.vae), dtype=family.dtype)


@contextlib.contextmanager
def explained(family: ModelFamily) -> Iterator[None]:
    """Context that turns a family's access to an attribute that engines lack into an error that names it.

    Raises:
        ConfigError: it reads an attribute that `EngineParts` or `TransformerFacts` lacks.
    """
    try:
        yield
    except AttributeError as error:
        if not isinstance(error.obj, EngineParts | TransformerFacts):
            raise
        lacking = "self.pipeline" if isinstance(error.obj, EngineParts) else "self.transformer"
        raise ConfigError(
            f"model.family={family.place()}: predict, guide or decode reads {lacking}.{error.name}, which the engine "
            "does not have: there, self.pipeline has vae and transformer, and self.transformer has config. Compute it "
            "from these, in a function of your own"
        ) from error


def check_in_engine(
    family: ModelFamily,
    latents: Tensor,
    timesteps: Tensor,
    conditioning: Mapping[str, Tensor],
    guidance: Guidance,
) -> None:
    """Compute one velocity and decode latents as an engine does, to raise before the engine starts.

    Args:
        family: in this process.
        latents: `[1, *L]`.
        timesteps: `[1]`.
        conditioning: `{name: [1, ...]}`.
        guidance: of the run.

    Raises:
        ConfigError: see `explained`.
    """
    with explained(family), torch.no_grad():
        in_engine = as_in_engine(family)
        in_engine.velocity(family.transformer, latents, timesteps, conditioning, guidance)
        in_engine.decode(latents)
