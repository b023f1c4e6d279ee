"""The gap between rollout engine and actor, split in two: the engine's arithmetic, and stale weights.

The weights that sampled a batch are the *behaviour* weights. The training stack scores the batch under them too, and
the gap is a sum:

    current - rollout = (behaviour - rollout) + (current - behaviour) = engine + staleness

The engine's part is rounding: it has no direction, and it is zero if both stacks compute alike. Staleness points along
the updates since the batch was sampled, and grows with the learning rate. The two have different remedies, see
`flowcorr.instruments.audit`.

The samples come from the engine, so the expectation of the engine's `kl` is its exact KL. This is not so for the `kl`
of staleness, but the two `kl` add up to that of the gap. `exact_kl` is right for both, and adds up only if the two
parts are uncorrelated.

An engine keeps the weights that sampled a batch until the actor has learned from it (`RolloutEngine.history`).
Adapters are small. Full weights are expensive: a stale engine keeps `rollout.max_weight_age + 1` copies of the
transformer in any case, on its device or, with Ray, in main memory; scoring under older weights needs one more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from flowcorr import distributed
from flowcorr.actor import DiffusionActor
from flowcorr.actor.scoring import Observe
from flowcorr.algorithm import needs_old_means
from flowcorr.algorithm.terms import exact_kl
from flowcorr.config.schema import Config
from flowcorr.correction.describe import drift_metrics
from flowcorr.errors import BackendError
from flowcorr.metrics import Stats
from flowcorr.records import Rollout, Scores
from flowcorr.rollout import Weights


def splits_gap(config: Config, step: int) -> bool:
    """Whether a training step measures both parts: every `rollout.drift_every` steps, if the engine may be stale."""
    every = config.rollout.drift_every
    measured = config.rollout.max_weight_age > 0 and config.algorithm.rollout_correction.mode != "off"
    return measured and every > 0 and step % every == 0


def measure_gap_split(
    actor: DiffusionActor, history: Sequence[Weights], rollout: Rollout, old: Scores | None
) -> Stats:
    """`rollout_corr/engine/*` and `rollout_corr/staleness/*` of the whole batch, before the update.

    Both use the terms for which all three policies are finite, so that their means add up to the mean gap.

    Args:
        actor: the training stack.
        history: the versions that the engine keeps.
        rollout: the samples of the update.
        old: their scores under the old policy, which are not computed again; None in bypass mode.

    Raises:
        BackendError: the engine does not keep the weights that sampled.
    """
    with_means = rollout.window.means is not None
    known = {} if old is None else {actor.config.actor.old_policy: old}
    current = known.get("current") or actor.log_probs(rollout, with_means=with_means)
    behaviour = known.get("behaviour") or behaviour_scores(actor, rollout, history, with_means=with_means)
    mask = (current.log_probs + behaviour.log_probs + rollout.log_probs).isfinite()
    engine, staleness = (
        drift_metrics(
            target.log_probs,
            log_probs,
            mask=mask,
            step_kl=exact_kl(target.means, means, rollout.window.stds),
            prefix=f"rollout_corr/{name}/",
        )
        for name, target, log_probs, means in (
            ("engine", behaviour, rollout.log_probs, rollout.window.means),
            ("staleness", current, behaviour.log_probs, behaviour.means),
        )
    )
    return engine | staleness


def old_scores(
    actor: DiffusionActor, history: Sequence[Weights], rollout: Rollout, observe: Observe | None = None
) -> Scores:
    """The scores of the old policy, which `actor.old_policy` names.

    Args:
        actor: the training stack.
        history: the versions that the engine keeps.
        rollout: the samples.
        observe: see `Observe`.

    Raises:
        BackendError: the engine does not keep the weights that sampled.
    """
    config, with_means = actor.config, needs_old_means(actor.config)
    if config.actor.old_policy == "behaviour" and config.rollout.max_weight_age:
        return behaviour_scores(actor, rollout, history, with_means=with_means, observe=observe)
    return actor.log_probs(rollout, with_means=with_means, observe=observe)


def behaviour_scores(
    actor: DiffusionActor,
    rollout: Rollout,
    history: Sequence[Weights],
    *,
    with_means: bool,
    observe: Observe | None = None,
) -> Scores:
    """Score each sample in the training stack under the weights that sampled it.

    Args:
        actor: the training stack; its weights are restored afterwards.
        rollout: the samples, of one or several versions.
        history: the versions that the engine keeps.
        with_means: also return the step means.
        observe: see `Observe`.

    Raises:
        BackendError: `history` lacks a version.
    """
    versions = rollout.policy_versions
    gathered = distributed.gather(versions.unique().tolist(), "the versions that sampled")
    places, scores = [], []
    for version in sorted(set().union(*gathered)):  # the versions of all ranks: they score together
        rows = (versions == version).nonzero().squeeze(1)
        with behaviour_weights(actor, history, version):
            scores.append(
                actor.log_probs(
                    rollout.select(rows),
                    with_means=with_means,
                    filler_sample=rollout.select(slice(1)),
                    observe=observe,
                )
            )
        places.append(rows)
    return Scores.concatenate(scores).select(torch.cat(places).argsort())


@contextlib.contextmanager
def behaviour_weights(actor: DiffusionActor, history: Sequence[Weights], version: int) -> Iterator[None]:
    """Use the weights of the version that sampled; the present ones come back.

    Args:
        actor: the training stack.
        history: the versions that the engine keeps.
        version: of the samples.

    Raises:
        BackendError: `history` lacks the version.
    """
    kept = {weights.version: weights.tensors for weights in history}
    if version not in kept:
        raise BackendError(
            f"the rollout engine says that weights of version {version} sampled, and keeps only {sorted(kept)}: "
            "Rollout.policy_versions has to be the Weights.version of the sync whose weights sampled, and the engine's "
            "history has to keep these weights until the next sync. An engine that cannot keep them needs "
            "rollout.drift_every: 0, rollout.replay_every: 0 and, in a new run, actor.old_policy: current"
        )
    with (
        contextlib.nullcontext() if version == actor.weights.version else actor.weights.swapped(kept[version])
    ):
        yield
