"""Two drifts, apart: what the rollout engine computes otherwise, and how far the weights have moved since.

The weights that sampled are the *behaviour*. With their log-probs as the training stack has them, the gap is a sum:

    current - rollout = (behaviour - rollout) + (current - behaviour) = engine + staleness

The engine's part is rounding, which points anywhere and ends where both stacks compute alike; staleness lies along
what was learned, and grows with the learning rate. They ask for different remedies: see `diagnostics.audit_advice`.

Samples come from the engine, so that `kl` of its part has the exact KL as its mean; that of staleness has not, but the
two add up. `exact_kl` is right for both, and adds up only as far as the two point in unrelated directions.

An engine keeps the weights that sampled a batch until the batch has been learned from (`RolloutEngine.history`).
Adapters are small; versions of full weights are dear: `rollout.lag + 1` copies of the transformer on its device, or in
main memory with Ray, which a stale engine keeps anyway, and one more while the present weights make way for others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flowcorr import distributed
from flowcorr.actor import DiffusionActor, Scores
from flowcorr.algorithm import needs_old_means
from flowcorr.algorithm.apply import exact_kl
from flowcorr.config.schema import Config
from flowcorr.correction.diagnostics import drift_metrics
from flowcorr.errors import BackendError
from flowcorr.metrics import Metrics
from flowcorr.records import ActorBatch, Rollout
from flowcorr.rollout import Weights

if TYPE_CHECKING:
    from flowcorr.trainer.step import Parts


def measures_drifts(config: Config, step: int) -> bool:
    """Whether the parts of the gap are measured at a training step: on schedule, and where there can be two."""
    every = config.rollout.drift_every
    measured = every > 0 and config.rollout.lag > 0 and config.algorithm.rollout_correction is not None
    return measured and step % every == 0


def measure_drifts(parts: Parts, batch: ActorBatch) -> Metrics:
    """`rollout_corr/engine/*` and `rollout_corr/staleness/*` of the whole batch, before anything is learned from it.

    Both are over the terms in which all three policies are finite, so that their means add up to that of the gap.

    Args:
        parts: the run's parts.
        batch: as the update gets it; what it has recomputed is not computed again.

    Raises:
        BackendError: the engine does not keep the weights that sampled.
    """
    actor, rollout = parts.actor, batch.rollout
    assert actor.correction is not None, "`measures_drifts` wants a correction"
    assert batch.old_log_probs is not None
    with_means = rollout.means is not None
    known: dict[str, Scores] = {}
    if not actor.correction.bypass_mode:
        old = Scores(log_probs=batch.old_log_probs, means=batch.old_means)
        known[parts.config.actor.old_policy] = old
    current = known.get("current") or actor.log_probs(rollout, with_means=with_means)
    behaviour = known.get("behaviour") or behaviour_scores(
        actor, rollout, parts.engine.history, with_means=with_means
    )
    sampled = Scores(log_probs=rollout.log_probs, means=rollout.means)
    mask = (current.log_probs + behaviour.log_probs + sampled.log_probs).isfinite()
    metrics = [
        drift_metrics(
            target.log_probs,
            source.log_probs,
            mask=mask,
            step_kl=_exact_kl(target, source, rollout.stds),
            prefix=f"rollout_corr/{name}/",
        )
        for name, target, source in (("engine", behaviour, sampled), ("staleness", current, behaviour))
    ]
    return Metrics.merged(metrics)


def with_old_scores(parts: Parts, batch: ActorBatch) -> ActorBatch:
    """The batch with the scores of the policy that anchors the clip range, as `actor.old_policy` names it.

    Raises:
        BackendError: the engine does not keep the weights that sampled.
    """
    config, with_means = parts.config, needs_old_means(parts.config)
    if config.actor.old_policy == "behaviour" and config.rollout.lag:
        scores = behaviour_scores(parts.actor, batch.rollout, parts.engine.history, with_means=with_means)
    else:
        scores = parts.actor.log_probs(batch.rollout, with_means=with_means)
    return replace(batch, old_log_probs=scores.log_probs, old_means=scores.means)


def behaviour_scores(
    actor: DiffusionActor, rollout: Rollout, history: Sequence[Weights], *, with_means: bool
) -> Scores:
    """Score each sample under the weights that sampled it, in the training stack; the actor's are put back.

    Args:
        actor: scores.
        rollout: the samples, of one version or several.
        history: the versions that the engine keeps.
        with_means: also return the step means.

    Raises:
        BackendError: a version is not among them.
    """
    kept = {weights.version: weights.tensors for weights in history}
    versions = rollout.policy_versions
    found = distributed.gather(versions.unique().tolist(), "the versions that sampled")
    places, scores = [], []
    for version in sorted(set().union(*found)):  # of all ranks: they score sharded weights together
        if version not in kept:
            raise BackendError(
                f"the rollout engine sampled with weights of version {version} and keeps only {sorted(kept)}, so that "
                "nothing can be scored under them; set rollout.drift_every: 0 and actor.old_policy: current"
            )
        rows = (versions == version).nonzero().squeeze(1)
        with actor.under(kept[version]):
            scores.append(actor.log_probs(rollout.select(rows), with_means=with_means))
        places.append(rows)
    order = torch.cat(places).argsort()
    means = [score.means for score in scores if score.means is not None]
    return Scores(
        log_probs=torch.cat([score.log_probs for score in scores])[order],
        means=torch.cat(means)[order] if means else None,
    )


def _exact_kl(target: Scores, source: Scores, stds: Tensor | None) -> Tensor | None:
    if target.means is None or source.means is None or stds is None:
        return None
    return exact_kl(target.means, source.means, stds)
