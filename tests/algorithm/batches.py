"""A batch with a known gap between rollout and old policy."""

import torch

from flowcorr.records import ActorBatch, Rollout

SHAPE = (2, 3)


def make_batch(delta, **options):
    """A batch whose old log-probs are `delta` `[B, T]` above the rollout's."""
    delta = torch.as_tensor(delta)
    samples, steps = delta.shape
    draw = torch.Generator().manual_seed(0)
    log_probs = -1.2 + 0.1 * torch.randn(samples, steps, generator=draw)
    rollout = Rollout(
        latents=torch.randn(samples, steps, *SHAPE, generator=draw),
        next_latents=torch.randn(samples, steps, *SHAPE, generator=draw),
        step_indices=torch.arange(steps).expand(samples, steps),
        timesteps=torch.full((samples, steps), 500.0),
        sigmas=torch.full((samples, steps), 0.5),
        sigmas_next=torch.full((samples, steps), 0.4),
        log_probs=log_probs,
        means=torch.randn(samples, steps, *SHAPE, generator=draw),
        stds=torch.full((samples, steps), 0.5),
        group_ids=torch.zeros(samples, dtype=torch.int64),
        policy_versions=torch.zeros(samples, dtype=torch.int64),
    )
    return ActorBatch(
        rollout=rollout, advantages=torch.ones(samples), old_log_probs=log_probs + delta, **options
    )
