"""The drift of the score beside the gradient: the part of it that follows from the gap, and not from the rewards.

Of a group's terms at one step of the schedule, the gradient in the step means is `sum_i A_i (x'_i - mu_i) / s^2`. With
`x' = mu_q + s z`, `z` being the step noise under the rollout policy, it is a signal plus a drift; times `s`:

    sum_i A_i z_i   and   sum_i A_i (mu_q - mu)_i / s.

Advantages of mean 0 cancel what the drifts of a group have in common, which is all of it where its images share their
state. Both are vectors of the latents' size, of which a training step keeps one a group and step, and logs the squares.
Source: score centering, arXiv:2609.20807, which takes the drift away; see `flowcorr.algorithm.centering`.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from flowcorr.metrics import Stats, mean
from flowcorr.records import ActorBatch, Scores, Terms
from flowcorr.sde.transition import over_elements


class ScoreDrift:
    """Adds up drift and signal of each group and step, over terms in parts, such as micro-batches.

    Args:
        group_ids: `[B]`, of all samples.
        step_indices: `[B, T]`, of all their steps.
    """

    def __init__(self, group_ids: Tensor, step_indices: Tensor) -> None:
        self._groups, self._num_steps = group_ids.unique(), int(step_indices.max()) + 1
        self._keys = self._key(group_ids, step_indices).unique()
        self._sums: Tensor | None = None  # [2, K, D], of drift and signal
        self._places: list[Tensor] = []

    @classmethod
    def of(cls, batch: ActorBatch) -> Self | None:
        """That of a mini-batch; None where the rollout returned no step means, or no samples."""
        window = batch.rollout.window
        if window.means is None or not len(window.means):
            return None
        return cls(batch.rollout.group_ids, window.step_indices)

    def add_scored(self, part: ActorBatch, scores: Scores, keep: Tensor | None) -> None:
        """Add a part of the mini-batch with its scores, of which `keep` are in the loss."""
        window = part.rollout.window
        assert scores.means is not None, "`score` returns them"
        assert window.means is not None, "else there is nothing to add to"
        self.add(
            part.rollout.group_ids,
            window.step_indices,
            part.advantages,
            next_latents=window.next_latents,
            means=scores.means,
            rollout_means=window.means,
            stds=scores.stds.detach(),
            keep=None if keep is None else keep.view_as(window.step_indices),
        )

    def _key(self, group_ids: Tensor, step_indices: Tensor) -> Tensor:
        """`[b, t]`, one number for each group and step."""
        return torch.searchsorted(self._groups, group_ids)[:, None] * self._num_steps + step_indices

    def add(
        self,
        group_ids: Tensor,
        step_indices: Tensor,
        advantages: Tensor,
        *,
        next_latents: Tensor,
        means: Tensor,
        rollout_means: Tensor,
        stds: Tensor,
        keep: Tensor | None = None,
    ) -> None:
        """Add a part; terms of which a mean is not finite add nothing.

        Args:
            group_ids: `[b]`.
            step_indices: `[b, t]`.
            advantages: `[b]`.
            next_latents: `[b, t, *L]`, after each step.
            means: like `next_latents`, step means of the policy that learns.
            rollout_means: likewise of the policy that sampled.
            stds: `[b, t]`, full standard deviations.
            keep: `[b, t]` bool, False where a term was rejected, or None.
        """
        places = torch.searchsorted(self._keys, self._key(group_ids, step_indices))
        per_std = advantages[:, None] / stds
        drift, signal = rollout_means - means.detach(), next_latents - rollout_means
        known = (drift + signal).flatten(2).isfinite().all(2)
        known = known if keep is None else known & keep
        vectors = torch.stack([drift, signal]).flatten(3) * over_elements(per_std, drift).flatten(2)
        if self._sums is None:
            self._sums = vectors.new_zeros(2, len(self._keys), vectors.shape[-1])
        vectors = torch.where(known[..., None], vectors, 0.0)
        self._sums.index_add_(1, places.flatten(), vectors.flatten(1, 2))
        self._places.append(places)

    def squares(self) -> list[tuple[Tensor, Tensor]]:
        """Of each part, `[b, t]` twice: the squared drift and the squared signal of a term's group and step.

        Each is divided by the number of terms that were added of this group and step, so that sums over terms are sums
        over groups and steps.
        """
        if self._sums is None:
            return []
        count = torch.cat([places.flatten() for places in self._places]).bincount(minlength=len(self._keys))
        drift, signal = self._sums.double().square().sum(2) / count.clamp(min=1)
        return [(drift[places], signal[places]) for places in self._places]


def drift_squares(
    advantages: Tensor,
    group_ids: Tensor,
    step_indices: Tensor,
    *,
    next_latents: Tensor,
    means: Tensor,
    rollout_means: Tensor,
    stds: Tensor,
    keep: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`drift_squares` and `gradient_squares` `[B, T]` of a whole batch, for `flowcorr.dump`; see `ScoreDrift.add`."""
    drift = ScoreDrift(group_ids, step_indices)
    drift.add(
        group_ids,
        step_indices,
        advantages,
        next_latents=next_latents,
        means=means,
        rollout_means=rollout_means,
        stds=stds,
        keep=keep,
    )
    return drift.squares()[0]


def score_drift(terms: Terms, num_steps: int | None = None) -> Stats:
    """`rollout_corr/score_drift` and that of each step: the squared drift as a share of the squared signal.

    Args:
        terms: with `drift_square` and `gradient_square`, or nothing is measured.
        num_steps: steps of the schedule; None reads it off the terms.
    """
    if terms.drift_square is None or terms.gradient_square is None or not terms.step_index.numel():
        return {}
    count = int(terms.step_index.max()) + 1 if num_steps is None else num_steps
    squares = torch.stack([terms.drift_square, terms.gradient_square]).flatten(1).double().nan_to_num(0.0)
    by_step = squares.new_zeros(2, count).index_add_(1, terms.step_index.flatten(), squares)
    drift, signal = by_step
    return {
        "rollout_corr/score_drift": mean(drift.sum(), signal.sum()),
        "rollout_corr/step_{}/score_drift": mean(drift, signal),
    }
