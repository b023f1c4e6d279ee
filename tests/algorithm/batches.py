"""A batch with a known gap between rollout and old policy, and bands that are known."""

import torch

from flowcorr.algorithm.bands import WARM_UP
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


def band_state(noise, num_steps):
    """The state of `MeasuredBands` with the same centre and spread, by mode, at each step of the schedule."""
    state = {}
    for mode, (centre, spread) in noise.items():
        columns = torch.tensor([[centre], [spread]], dtype=torch.float64).repeat(1, num_steps)
        state[f"{mode}/noise"] = columns
        state[f"{mode}/first"] = columns[:, None].repeat(1, WARM_UP, 1)
        state[f"{mode}/count"] = torch.full((num_steps,), WARM_UP)
    return state
