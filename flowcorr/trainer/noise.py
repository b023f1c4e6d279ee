"""The noise that the rollout engine added to its SDE steps, as the actor sees it: `(x' - mean) / s`.

The means are the actor's own, of the first forward pass that it makes of a batch anyway: that of the old log-probs, or
in bypass mode the one before the first optimizer step. So no engine has to return its means. Both means differ by
rounding and staleness, which the health rules allow for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flowcorr import distributed, sde
from flowcorr.config.schema import SamplingConfig
from flowcorr.metrics import Metrics, Stat, mean
from flowcorr.records import Rollout, Scores
from flowcorr.sde.transition import over_elements


class NoiseMeter:
    """Adds up the noise of a training step's batch, part by part.

    Args:
        rollout: the batch.
        sampling: how it was drawn.
    """

    def __init__(self, rollout: Rollout, sampling: SamplingConfig) -> None:
        self._cps_unscaled = sampling.cps_unscaled
        self._parts: list[Metrics] = []
        self._num_terms = 0
        self._together = rollout.window.latents.new_zeros(rollout.num_elements, dtype=torch.float64)

    def add(self, rollout: Rollout, scores: Scores) -> None:
        """Add the terms of a part of the batch whose scores are finite.

        Args:
            rollout: the part.
            scores: of the actor, with its step means.
        """
        assert scores.means is not None, "the noise is measured from the actor's means"
        window, finite = rollout.window, scores.log_probs.detach().isfinite()
        means, stds = scores.means.detach()[finite], scores.stds.detach()[finite]
        noise = ((window.next_latents[finite] - means) / over_elements(stds, means)).flatten(1)
        self._num_terms += len(noise)
        self._together += noise.sum(0, dtype=torch.float64)
        squared = noise.square()
        stats = {
            "rollout/noise_std": self._std(rollout.log_probs[finite], stds, noise.shape[1]),
            "rollout/noise_mean": mean(noise.sum(dtype=torch.float64), noise.numel()),
            # The fourth Hermite polynomial: to first order a noise that is too large or too small does not change it.
            "rollout/noise_tails": mean(
                (squared * (squared - 6) + 3).sum(dtype=torch.float64), noise.numel()
            ),
        }
        self._parts.append(Metrics.from_stats(stats))

    def metrics(self) -> Metrics:
        """`rollout/noise_*` of all terms that were added. All ranks have to call it together."""
        together = distributed.add_up(self._together, "the noise of the SDE steps")
        # Each rank has the sum of all, and the metrics of all ranks are added.
        shared = mean(together.square().mean() / distributed.world_size(), self._num_terms)
        return Metrics.merged([*self._parts, Metrics.from_stats({"rollout/noise_shared_by": shared})])

    def _std(self, log_probs: Tensor, stds: Tensor, num_elements: int) -> Stat:
        """The std around 0 that the rollout's own log-probs imply, which no difference of the means enters."""
        known = log_probs.isfinite()
        variance = sde.noise_variance(log_probs[known], stds[known], cps_unscaled=self._cps_unscaled)
        squares = variance.sum(dtype=torch.float64) * num_elements
        return Stat("std", (variance.numel() * num_elements, 0.0, squares))
