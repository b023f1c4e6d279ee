"""Score centering: each term's gradient less its mean under the rollout policy.

Under the policy `q` that sampled, the gradient of a term of weight `w` has the mean `A E_q[w grad log p]`. It pulls the
step means towards the engine's, or away from them, for any reward. Advantages of mean 0 cancel it only if all images of
a group share their state. For Gaussian steps of one std the mean has a closed form,

    E_q[w grad log p] = mean_L( (a (mu_q - mu) + b (mu_old - mu)) / s^2 . grad mu ),

    a = E_q[w] - b,   b = (c / D) E_q[w; w < cap],   w = min(exp(c delta), cap):

`b` is Stein's lemma for the tilt of `w`. Without weights `a = 1` and `b = 0`. Exact weights (`c = D`, no cap) have
`a = 0` and `b = 1`: nothing is left to centre before the first update, and to subtract the plain score's mean would
bring a drift in. With `c = 1` (`log_ratio_scale: mean`) nearly all is left. As KLs, `-a grad KL(mu, mu_q) - b grad
KL(mu, mu_old)` is that mean, so that centering adds these KLs, with their gradient and without their value.

Source: score centering, arXiv:2609.20807; the weights' part is ours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowcorr.correction import RolloutCorrectionConfig
from flowcorr.correction.bounds import SECTION, scale_factor
from flowcorr.correction.exponents import bounded
from flowcorr.errors import BatchError
from flowcorr.losses import Loss
from flowcorr.records import Terms
from flowcorr.sde import with_gradient_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tilt:
    """The mean that weighted scores have under the rollout policy, in units of one term's weight.

    Attributes:
        rollout: `a / w`, like the terms: the share that pulls towards the rollout's step mean.
        old: `b / w`: the share that pulls towards the old policy's step mean, since the weight is its ratio.
    """

    rollout: Tensor
    old: Tensor


def centred(
    terms: Terms, correction: RolloutCorrectionConfig, loss: Loss, *, cps_unscaled: bool = False
) -> Terms:
    """The terms of which the loss has the centred gradient; values of log-probs stay to the bit.

    A loss that adds the KL of the old policy to its log-ratio (`grpo_guard`) is centred at the old policy already:
    `log_ratio + KL(mu, mu_old) = mean_L((x' - mu_old) (mu - mu_old)) / s^2` is linear in `mu`. It gets `old_kl` as
    `KL(mu, mu_q) - KL(mu_old, mu_q)`, which makes it `mean_L((x' - mu_q) (mu - mu_old)) / s^2`: still 0 at the old
    policy, and centred at the rollout's.

    Args:
        terms: `[b]` or `[b, T]`, after the correction, with `rollout_kl` and its graph.
        correction: the correction in force, with `score_centering`.
        loss: of the terms.
        cps_unscaled: whether log-probs are those of `sampling.cps_unscaled`.

    Raises:
        BatchError: the step means of the rollout, or of the old policy where weights or the loss read them, are not
            known.
    """
    if terms.rollout_kl is None:
        raise BatchError(
            f"{SECTION}.score_centering=true needs the rollout's step means, which this rollout lacks: return "
            "Rollout.window.means, for which the engine is asked by with_means, or set score_centering: false"
        )
    unit = 2 * terms.std.square() if cps_unscaled else torch.ones_like(terms.std)
    tilt = _tilt(terms, correction, unit)
    if not loss.adds_kl:
        pull = tilt.rollout * terms.rollout_kl
        if terms.old_kl is not None:
            pull = pull + tilt.old * terms.old_kl
        return replace(terms, log_prob=with_gradient_of(terms.log_prob, unit * pull))
    old_kl, old_rollout_kl = _known("old_kl", terms.old_kl), _known("old_rollout_kl", terms.old_rollout_kl)
    return replace(terms, old_kl=tilt.rollout * (terms.rollout_kl - old_rollout_kl) + tilt.old * old_kl)


def _known(name: str, kl: Tensor | None) -> Tensor:
    if kl is None:
        raise BatchError(
            f"{name} is not known: {SECTION}.score_centering=true needs the step means of the old policy here; let "
            "the actor return them where it recomputes log-probs"
        )
    return kl


def _tilt(terms: Terms, correction: RolloutCorrectionConfig, unit: Tensor) -> Tilt:
    """See the module.

    In bypass mode the weight is the current policy's own ratio, so that `mu_old` is `mu`, and its KL has no gradient.
    """
    if not correction.applies_weights:
        return Tilt(rollout=torch.ones_like(terms.std), old=torch.zeros_like(terms.std))
    bypass = correction.mode == "bypass"
    kl = terms.rollout_kl if bypass else terms.old_rollout_kl
    target = terms.log_prob if bypass else terms.old_log_prob
    assert terms.num_elements is not None, "rollouts know the size of their latents"
    exponent = scale_factor(correction.log_ratio_scale, terms.num_elements) * unit.double()
    cap = correction.rollout_is_threshold
    assert isinstance(cap, float), "bands of weights are refused by the configuration"
    weight = bounded(exponent * (target - terms.rollout_log_prob).detach().double()).exp().clamp(max=cap)
    mean, below = mean_weight(
        _known("old_rollout_kl", kl).detach().double(), exponent, terms.num_elements, cap
    )
    old = exponent / terms.num_elements * below
    learned = torch.zeros_like(old) if bypass else old / weight
    return Tilt(rollout=((mean - old) / weight).to(terms.std), old=learned.to(terms.std))


def mean_weight(
    kl: Tensor, exponent: Tensor, num_elements: int, cap: float = math.inf
) -> tuple[Tensor, Tensor]:
    """Mean of the weight of one step under the rollout policy, and the part of it that is not capped.

    `log w = c delta` is normal with mean `-c r^2 / 2` and standard deviation `c r / sqrt(D)`, where `r^2 = 2 kl`.

    Args:
        kl: exact KL of both policies, nats per latent element.
        exponent: `c`, like `kl`: the factor on mean-pooled log-ratios.
        num_elements: `D`.
        cap: largest weight.

    Returns:
        `E[min(w, cap)]` and `E[w; w < cap]`, like `kl`.
    """
    # Mean of a log-normal weight; the partial mean below the cap has the same form with a shifted normal integral.
    mean, std = -exponent * kl, exponent * (2 * kl / num_elements).sqrt()
    whole = (mean + std.square() / 2).exp()
    if math.isinf(cap):
        return whole, whole
    # Where both policies agree the std is 0 and the weight 1, below any cap above 1.
    place = (math.log(cap) - mean) / torch.where(std > 0, std, 1e-300)
    below = whole * torch.special.ndtr(place - std)
    return below + cap * torch.special.ndtr(-place), below
