"""A batch with a known gap between rollout and old policy."""

import torch

from flowcorr.records import ActorBatch
from tests.rollouts import make_rollout

SHAPE = (2, 3)


def make_batch(delta, **options):
    """A batch whose old log-probs are `delta` `[B, T]` above the rollout's."""
    delta = torch.as_tensor(delta)
    samples, steps = delta.shape
    rollout = make_rollout(samples, steps, SHAPE, group_ids=torch.zeros(samples, dtype=torch.int64))
    return ActorBatch(
        rollout=rollout, advantages=torch.ones(samples), old_log_probs=rollout.log_probs + delta, **options
    )
