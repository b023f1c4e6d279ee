"""What the actor makes of the rollout engine's samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from flowcorr.actor import DiffusionActor
from flowcorr.diagnostics.doctor.trials import r_squared
from flowcorr.errors import BackendError
from flowcorr.records import Rollout, Scores
from flowcorr.rollout import Weights
from flowcorr.trainer.gap_split import behaviour_scores


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gap:
    """What the actor makes of a rollout, `[B, T]` each.

    Attributes:
        log_probs: the actor's, nats per latent element.
        rollout_log_probs: the engine's.
        step_kl: exact KL of each step a latent element, float64.
        stds: full standard deviations of the steps.
        sigmas, step_indices: noise levels before the steps, and their places in the schedule.
    """

    log_probs: Tensor
    rollout_log_probs: Tensor
    step_kl: Tensor
    stds: Tensor
    sigmas: Tensor
    step_indices: Tensor

    @property
    def delta(self) -> Tensor:
        """Actor less rollout, float64."""
        return self.log_probs.double() - self.rollout_log_probs.double()

    def joint_nats(self, num_elements: int) -> float:
        """Mean over samples of the exact KL of the window, by the chain rule."""
        return num_elements * float(self.step_kl.sum(1).mean())

    def select(self, samples: Tensor) -> Gap:
        """The samples where the `[B]` bools are true."""
        return Gap(**{entry.name: getattr(self, entry.name)[samples] for entry in fields(Gap)})

    def columns(self, kept: Tensor) -> Gap:
        """The steps of the window where the `[T]` bools are true."""
        return Gap(**{entry.name: getattr(self, entry.name)[:, kept] for entry in fields(Gap)})

    @staticmethod
    def concatenate(parts: Sequence[Gap]) -> Gap:
        """The samples of all parts."""
        names = [entry.name for entry in fields(Gap)]
        return Gap(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})


def measure_gap(actor: DiffusionActor, rollout: Rollout) -> Gap:
    """The actor's view of a rollout.

    Raises:
        BackendError: the rollout has no step means, or a log-prob is not finite.
    """
    if rollout.window.means is None or rollout.window.stds is None:
        raise BackendError(
            "the rollout engine returns no step means, and the audit computes the exact KL from them"
        )
    return _gap(actor.log_probs(rollout, with_means=True), rollout)


def split_gap(actor: DiffusionActor, rollout: Rollout, history: Sequence[Weights]) -> tuple[Gap, Gap]:
    """The parts of the gap that are the engine's and that are of older weights, see `trainer.gap_split`."""
    behaviour = behaviour_scores(actor, rollout, history, with_means=True)
    window = replace(rollout.window, means=behaviour.means)
    as_scored = replace(rollout, window=window, log_probs=behaviour.log_probs)
    return _gap(behaviour, rollout), measure_gap(actor, as_scored)


def _gap(scores: Scores, rollout: Rollout) -> Gap:
    assert scores.means is not None
    assert rollout.window.means is not None
    assert rollout.window.stds is not None
    if not (scores.log_probs.isfinite() & rollout.log_probs.isfinite()).all():
        raise BackendError(
            "log-probs of the rollout engine or the actor are not finite; flowcorr doctor names the cause"
        )
    return Gap(
        log_probs=scores.log_probs.cpu(),
        rollout_log_probs=rollout.log_probs.cpu(),
        step_kl=r_squared(rollout.window.means, scores.means, rollout.window.stds).double().cpu() / 2,
        stds=rollout.window.stds.cpu(),
        sigmas=rollout.window.sigmas.cpu(),
        step_indices=rollout.window.step_indices.cpu(),
    )
