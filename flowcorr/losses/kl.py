"""KL divergence of the current policy's steps from the reference policy's."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flowcorr.errors import ConfigError, unknown_choice
from flowcorr.records import check_shape
from flowcorr.sde import step_kl

KlWeighting = Literal["exact", "flow_grpo"]
KL_WEIGHTINGS = ("exact", "flow_grpo")


def kl_to_reference(
    mean: Tensor,
    ref_mean: Tensor,
    std: Tensor,
    step: Tensor,
    *,
    weighting: KlWeighting = "exact",
    keep: Tensor | None = None,
) -> Tensor:
    """KL of each step from the reference policy's, a latent element; both share their standard deviation.

    `exact` is `mean_L((mean - ref_mean)^2) / (2 s^2)`. `flow_grpo` divides by `2 c^2` with
    `s = c sqrt(step)`, that is `exact` times `step`: the unit of coefficients published with Flow-GRPO,
    arXiv:2505.05470, section 4.2.

    Args:
        mean: `[b, *L]` or `[b, T, *L]`, step means, differentiable.
        ref_mean: like `mean`, of the reference policy, used detached.
        std: `[b]` or `[b, T]`, full standard deviations of the steps.
        step: like `std`, `sigma - sigma_next`.
        weighting: `exact` or `flow_grpo`.
        keep: like `std`, bool; terms outside are 0 and have no gradient.

    Returns:
        Like `std`, nats per latent element for `exact`.

    Raises:
        ConfigError: `weighting` is unknown.
        BatchError: shapes differ.
    """
    if weighting not in KL_WEIGHTINGS:
        raise ConfigError(unknown_choice("actor.kl_weighting", weighting, KL_WEIGHTINGS))
    shape = tuple(std.shape)
    check_shape("ref_mean", ref_mean, tuple(mean.shape))
    check_shape("step", step, shape)
    ref_mean = ref_mean.detach()
    if keep is not None:
        check_shape("keep", keep, shape)
        kept = keep.reshape(shape + (1,) * (mean.dim() - len(shape)))
        mean, ref_mean = torch.where(kept, mean, 0.0), torch.where(kept, ref_mean, 0.0)
        std = torch.where(keep, std, 1.0)
    exact = step_kl(mean, ref_mean, std)
    return exact * step if weighting == "flow_grpo" else exact
