"""The actor's scores of the rollout engine's samples.

A gap is the `Terms` `[B, T]` of samples on the CPU. Its `old_log_prob` is the actor's, and its `old_rollout_kl`, in
float64, the exact KL of the actor from the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from flowcorr.actor import DiffusionActor
from flowcorr.algorithm.terms import batch_terms
from flowcorr.errors import BackendError
from flowcorr.questions.gap_split import behaviour_scores
from flowcorr.records import ActorBatch, Rollout, Scores, Terms
from flowcorr.rollout import Weights


def measure_gap(actor: DiffusionActor, rollout: Rollout) -> Terms:
    """The actor's view of a rollout.

    Raises:
        BackendError: the rollout has no step means, or a log-prob is not finite.
    """
    if rollout.window.means is None or rollout.window.stds is None:
        raise BackendError(
            "the rollout engine returns no Window.means or no Window.stds, from which the audit computes the exact KL"
        )
    return _gap(actor.log_probs(rollout, with_means=True), rollout)


def split_gap(actor: DiffusionActor, rollout: Rollout, history: Sequence[Weights]) -> tuple[Terms, Terms]:
    """Split the gap into the part of the engine and the part of older weights, see `questions.gap_split`."""
    behaviour = behaviour_scores(actor, rollout, history, with_means=True)
    window = replace(rollout.window, means=behaviour.means)
    as_scored = replace(rollout, window=window, log_probs=behaviour.log_probs)
    return _gap(behaviour, rollout), measure_gap(actor, as_scored)


def _gap(scores: Scores, rollout: Rollout) -> Terms:
    for side, log_probs in (("rollout engine", rollout.log_probs), ("actor", scores.log_probs)):
        if not log_probs.isfinite().all():
            count = int((~log_probs.isfinite()).sum())
            raise BackendError(
                f"{count} of {log_probs.numel()} log-probs of the {side} are not finite; flowcorr doctor says why"
            )
    batch = ActorBatch(
        rollout=rollout,
        advantages=torch.zeros_like(rollout.log_probs[:, 0]),
        old_log_probs=scores.log_probs,
        old_means=scores.means,
    )
    terms = batch_terms(batch).to("cpu")
    assert terms.old_rollout_kl is not None, "both have step means"
    return replace(terms, old_rollout_kl=terms.old_rollout_kl.double())
