"""Log-ratios of two policies over the terms that can be used, in float64.

`delta = target_log_prob - rollout_log_prob` is in nats per latent element, since log-probs are mean-pooled:
`exp(delta)` is the `D`-th root of a step's density ratio, not the ratio itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flowcorr.metrics import Over


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogRatios:
    """Log-ratios of a batch, detached; 0 at terms that are not valid.

    Attributes:
        delta: `[B, T]` float64, target minus rollout log-prob.
        scaled: `[B, T]` float64, `log_ratio_scale * delta`, which weights, bands and veto see.
        rollout: `[B, T]` float64, rollout log-prob.
        step_kl: `[B, T]` float64, exact KL of each step a latent element; None if unknown.
        z: `[B, T]` float64, robust z-score of `delta` among the terms of its step; None if not measured.
        on: `[B, T]` bool, terms that the mask has on.
        valid: `[B, T]` bool, terms that are on and whose values are finite.
        num_steps: `[B]` float64, valid steps of each sample; 1 where there is none.
        terms, samples: stats over valid terms, and over samples that have one.
    """

    delta: Tensor
    scaled: Tensor
    rollout: Tensor
    step_kl: Tensor | None
    z: Tensor | None
    on: Tensor
    valid: Tensor
    num_steps: Tensor
    terms: Over
    samples: Over

    def mean(self, values: Tensor) -> Tensor:
        """Mean over each sample's valid steps, `[B]`; the `values` `[B, T]` must be 0 at other steps."""
        return values.sum(1) / self.num_steps

    def resolution(self) -> Tensor:
        """4 float32 ulps of the larger log-prob, `[B, T]`: differences below it are rounding."""
        # Log-probs arrive in float32: numbers of this size are 2^(exponent - 24) apart, and differences are no finer.
        size = torch.maximum(self.rollout.abs(), (self.rollout + self.delta).abs())
        _, exponent = torch.frexp(size)
        return torch.ldexp(torch.full_like(size, 4.0), exponent - 24)

    def floor(self, num_elements: int | None) -> Tensor:
        """The least spread of noise, `[B, T]`: the resolution, but at least `0.01 / D` if `D` is known."""
        return self.resolution().clamp(min=0.01 / num_elements if num_elements else 0.0)


def log_ratios(
    target_log_prob: Tensor,
    rollout_log_prob: Tensor,
    mask: Tensor | None = None,
    step_kl: Tensor | None = None,
    *,
    scale: float = 1.0,
) -> LogRatios:
    """Log-ratios of two `[B, T]` log-probs; terms count if `mask` is on (or None) and all values are finite."""
    target, rollout = target_log_prob.detach().double(), rollout_log_prob.detach().double()
    on = torch.ones_like(target, dtype=torch.bool) if mask is None else mask.bool()
    delta = target - rollout
    valid = on & delta.isfinite()
    if step_kl is not None:
        step_kl = step_kl.detach().double()
        valid = valid & step_kl.isfinite()
        step_kl = torch.where(valid, step_kl, 0.0)
    delta = torch.where(valid, delta, 0.0)  # before any exp or sum: NaN times a mask of 0 is still NaN
    return LogRatios(
        delta=delta,
        scaled=scale * delta,
        rollout=torch.where(valid, rollout, 0.0),
        step_kl=step_kl,
        z=None,
        on=on,
        valid=valid,
        num_steps=valid.sum(1).clamp(min=1).double(),
        terms=Over(valid),
        samples=Over(valid.any(1)),
    )


def one_sample(delta: Tensor, num_steps: int, scale: float) -> LogRatios:
    """Log-ratios of one sample with the same 0-d `delta` at each of its `num_steps` steps."""
    delta = delta.expand(1, num_steps)
    return log_ratios(delta, torch.zeros_like(delta), step_kl=delta.square() / 2, scale=scale)
