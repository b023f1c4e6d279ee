"""The centre of PPO's clip range in bypass mode, where ratios start off 1 by the drift of rollout and actor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from flowcorr.config.schema import Config
from flowcorr.losses import UNCLIPPED
from flowcorr.metrics import Metrics, mean

# On the embedded model, with int4 weights and with weights four steps old, the mean log-ratio of prompts that were not
# measured themselves is off by .83 and .48 stds; centred at this decay by .28 and .34, at .5 by .31 and .49.
DECAY = 0.9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClipCenter:
    """Mean, by step index, of the log-ratio that the loss clips, before anything was learned.

    Under the rollout policy a mean-pooled log-ratio has mean `-r^2 / 2` and std `r / sqrt(D)`: with a large `D` it is
    the mean that leaves the clip range. What a training step scores before its first optimizer step is of that drift
    alone, as current and old policy are one then, so it is measured for nothing. Of those terms, the ones that the
    loss keeps enter a mean whose weights fall by `DECAY` a training step: a window of some ten. A mini-batch is
    centred by all that was measured before it, the first of a training step by earlier steps only. For grpo_guard the
    log-ratio is taken with its bias and before its factor `s`, one number a step index; its mean is 0 unless
    log-probs and step means disagree on the gap.

    What it leaves: a run's first mini-batch is not centred. A drift that changes, as of weights that grow stale, is
    followed some ten training steps late. A mean of `n` terms is off by their std over `sqrt(n)`, and a prompt by how
    far its gap is from the mean one. Outliers pull a mean, unless rejection takes them out. And a centre `c` divides
    every ratio by `exp(c)`, and with it the gradient of an unclipped term: what is left of the ratio is no importance
    weight of its step, only its deviation from the usual one.

    Attributes:
        sums: `[2, S]` float64, sum and number of the log-ratios by step index, weighted by age.
    """

    sums: Tensor

    @classmethod
    def unknown(cls, num_steps: int, device: torch.device) -> Self:
        """Before anything was measured."""
        return cls(sums=torch.zeros(2, num_steps, dtype=torch.float64, device=device))

    def older(self) -> ClipCenter:
        """The same, one training step later."""
        return ClipCenter(sums=DECAY * self.sums)

    def plus(self, drift: Tensor) -> ClipCenter:
        """With further terms, `[2, S]` as `drift_by_step` gives them."""
        return ClipCenter(sums=self.sums + drift)

    def at(self, step_indices: Tensor) -> Tensor:
        """The centre of each term, float32 like `step_indices`; 0 where nothing is known."""
        total, count = self.sums
        return torch.where(count > 0, total / count, 0.0).float()[step_indices]

    def metrics(self) -> Metrics:
        """`actor/clip_center_step_<i>`, nats per latent element, of the steps that were measured."""
        total, count = self.sums
        return Metrics.from_stats(
            {
                f"actor/clip_center_step_{index}": mean(total[index], count[index])
                for index in range(len(count))
            }
        )


def drift_by_step(log_ratio: Tensor, keep: Tensor, step_index: Tensor, num_steps: int) -> Tensor:
    """Sum and number, `[2, S]` float64, of the kept log-ratios of each step of the schedule."""
    keep = keep & log_ratio.isfinite()
    terms = torch.stack([torch.where(keep, log_ratio, 0.0).double(), keep.double()]).flatten(1)
    # A product is deterministic on every device, which index_add is not.
    steps = torch.arange(num_steps, device=step_index.device)
    return terms @ (step_index.flatten().unsqueeze(1) == steps).double()


def centered(log_ratio: Tensor, step_index: Tensor) -> Tensor:
    """Log-ratios as the loss centres them once it knows their mean at each step."""
    everything = torch.ones_like(log_ratio, dtype=torch.bool)
    drift = drift_by_step(log_ratio, everything, step_index, int(step_index.max()) + 1)
    return log_ratio - ClipCenter(sums=drift).at(step_index)


def centers_clip(config: Config) -> bool:
    """Whether the loss is given centres: in bypass mode, where it clips a ratio."""
    correction = config.algorithm.rollout_correction
    return (
        config.actor.clip_center == "drift"
        and config.actor.loss_mode not in UNCLIPPED
        and correction is not None
        and correction.bypass_mode is True
        and correction.loss_type == "ppo_clip"
    )
