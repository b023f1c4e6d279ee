"""The metrics of a drift and its correction.

Metrics of the log-ratios use the unscaled `delta`; metrics of weights and rejection use the scaled one, as applied.
Fractions of a rejection mode run over valid terms and their samples. `rollout_rs_masked_fraction`,
`rollout_rs_seq_masked_fraction` and `nonfinite_fraction` run over all terms that the mask has on.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flowcorr.correction.bounds import Band, Criterion
from flowcorr.correction.exponents import bounded, k3
from flowcorr.correction.ratios import LogRatios, log_ratios
from flowcorr.metrics import Over, Stat, Stats, maximum, mean, minimum

Bound = float | Tensor

SIZES = ("kl", "k3_kl", "logprob_abs_diff_mean", "logprob_abs_diff_max", "exact_kl")


def of_drift(ratios: LogRatios) -> Stats:
    """Metrics of the log-ratios. A perplexity is the mean over samples of `exp(-mean_t log_prob)`."""
    delta, size, terms, samples = ratios.delta, ratios.delta.abs(), ratios.terms, ratios.samples
    k1, rollout_nll = -ratios.mean(delta), -ratios.mean(ratios.rollout)
    training_nll = rollout_nll + k1
    stats = {
        "kl": terms.mean(-delta),
        "k3_kl": terms.mean(k3(delta)),
        "logprob_abs_diff_mean": terms.mean(size),
        "logprob_abs_diff_max": terms.max(size),
        "chi2_token": terms.mean((2.0 * bounded(delta)).expm1()),
        "chi2_seq": samples.mean((2.0 * bounded(delta.sum(1))).expm1()),
        "log_ppl_diff": samples.mean(k1),
        "log_ppl_abs_diff": samples.mean(k1.abs()),
        "log_ppl_diff_max": samples.max(k1),
        "log_ppl_diff_min": samples.min(k1),
        "ppl_ratio": samples.mean(bounded(k1).exp()),
        "training_ppl": samples.mean(bounded(training_nll).exp()),
        "training_log_ppl": samples.mean(training_nll),
        "rollout_ppl": samples.mean(bounded(rollout_nll).exp()),
        "rollout_log_ppl": samples.mean(rollout_nll),
        "nonfinite_fraction": Over(ratios.on).share(~ratios.valid),
    }
    if ratios.step_kl is not None:
        stats["exact_kl"] = terms.mean(ratios.step_kl)
    return stats


def drift_metrics(
    target_log_prob: Tensor,
    rollout_log_prob: Tensor,
    *,
    mask: Tensor | None = None,
    step_kl: Tensor | None = None,
    prefix: str,
) -> Stats:
    """The size of a drift alone: the metrics `SIZES` under `prefix`.

    Args:
        target_log_prob, rollout_log_prob: `[B, T]`, nats per latent element.
        mask: `[B, T]`, nonzero where a term counts; None for everywhere.
        step_kl: `[B, T]`, exact KL of each step a latent element, where known.
    """
    stats = of_drift(log_ratios(target_log_prob, rollout_log_prob, mask, step_kl))
    return {prefix + name: stat for name, stat in stats.items() if name in SIZES}


def of_bookkeeping(ratios: LogRatios, num_elements: int) -> Stats:
    """The distance of `delta` from the value that the exact KL implies.

    Sampled under the rollout policy, `z = (delta + r^2/2) sqrt(D) / r` with `r^2 / 2` the exact KL is standard
    normal. `r / sqrt(D)` is at least the resolution of log-probs, so that rounding raises no alarm.
    """
    assert ratios.step_kl is not None
    noise = torch.maximum((2.0 / num_elements * ratios.step_kl).sqrt(), ratios.resolution())
    return {"bookkeeping_z_max": ratios.terms.max(((ratios.delta + ratios.step_kl) / noise).abs())}


def spread(over: Over, values: Tensor, prefix: str = "") -> Stats:
    """Mean, standard deviation, largest and smallest value."""
    return {
        f"{prefix}mean": over.mean(values),
        f"{prefix}std": over.std(values),
        f"{prefix}max": over.max(values),
        f"{prefix}min": over.min(values),
    }


def outside(over: Over, values: Tensor, low: Bound, high: Bound, prefix: str = "") -> Stats:
    """Shares of values above and below a band."""
    above, below = over.share(values > high), over.share(values < low)
    return {f"{prefix}fraction_high": above, f"{prefix}fraction_low": below}


def of_weights(ratios: LogRatios, raw: Tensor, weights: Tensor, band: Band) -> Stats:
    """Metrics of the weights `[B, T]` before and after the cap, and of each sample's mean weight."""
    terms, samples, seq_weights = ratios.terms, ratios.samples, ratios.mean(weights)
    stats = spread(terms, weights, "rollout_is_") | spread(samples, seq_weights, "rollout_is_seq_")
    return stats | {
        "rollout_is_raw_max": terms.max(raw),
        "rollout_is_raw_min": terms.min(raw),
        "rollout_is_eff_sample_size": Stat("ess", stats["rollout_is_std"].parts),  # of the same moments
        "rollout_is_oob_ratio": terms.share(raw != weights),
        "rollout_is_seq_max_deviation": samples.max((seq_weights - 1.0).abs()),
        **outside_band(ratios, raw, band),
    }


def outside_band(ratios: LogRatios, raw: Tensor, band: Band) -> Stats:
    """Shares of weights `[B, T]` above and below a band, and of samples by their mean weight."""
    of_samples = outside(ratios.samples, ratios.mean(raw), *band, "rollout_is_seq_")
    return outside(ratios.terms, raw, *band, "rollout_is_ratio_") | of_samples


def of_rejection(ratios: LogRatios, criterion: Criterion, value: Tensor, rejected: Tensor) -> Stats:
    """Metrics of one mode's values, `[B, T]` of steps or `[B]` of samples, and of its `rejected` terms `[B, T]`.

    Names with `seq_` are over samples, by the mean over their steps if the mode judges steps, which is held against the
    widest bounds of its steps.
    """
    terms, samples, low, high = ratios.terms, ratios.samples, criterion.lower, criterion.upper
    of_ratio = criterion.mode.bounds.is_band  # a band of `exp(-value)`

    def described(over: Over, value: Tensor, low: Bound, high: Bound) -> Stats:
        beyond = outside(over, -value, -high, -low) if of_ratio else outside(over, value, low, high)
        return spread(over, value) | beyond

    of_steps = criterion.mode.level == "step"
    seq_value = ratios.mean(value) if of_steps else value
    of_samples = described(samples, seq_value, _widest(low, torch.amin), _widest(high, torch.amax))
    stats = described(terms, value, low, high) if of_steps else dict(of_samples)
    stats |= {f"seq_{name}": stat for name, stat in of_samples.items()}
    stats["seq_max_deviation"] = samples.max(seq_value.abs())
    stats["masked_fraction"] = terms.share(rejected)
    stats["seq_masked_fraction"] = samples.share(rejected.any(1))
    if criterion.auto and torch.as_tensor(high).dim() == 0:
        stats["threshold_high"] = maximum(torch.as_tensor(-low).exp() if of_ratio else high)
        if of_ratio:
            stats["threshold_low"] = minimum(torch.as_tensor(-high).exp())
    return {f"rollout_rs_{criterion.name}_{name}": stat for name, stat in stats.items()}


def _widest(bound: Bound, of: Callable[[Tensor, int], Tensor]) -> Bound:
    """The widest bound among the steps of each sample; one bound for all is returned as it is."""
    return of(bound, 1) if isinstance(bound, Tensor) and bound.dim() == 2 else bound


def of_veto(ratios: LogRatios, catastrophic: Tensor) -> Stats:
    """Shares of the steps `[B, T]` that veto their samples, and of vetoed samples."""
    return {
        "rollout_is_catastrophic_token_fraction": ratios.terms.share(catastrophic),
        "rollout_is_veto_fraction": ratios.samples.share(catastrophic.any(1)),
    }


def of_outcome(ratios: LogRatios, keep: Tensor) -> Stats:
    """Shares of terms and samples that were rejected by any mode or the veto."""
    seq_masked = Over(ratios.on.any(1)).share((ratios.on & ~keep).any(1))
    return {
        "rollout_rs_masked_fraction": Over(ratios.on).share(~keep),
        "rollout_rs_seq_masked_fraction": seq_masked,
        "rejected_ratio": seq_masked,
    }


def by_step(
    ratios: LogRatios, keep: Tensor, weights: Tensor | None, step_indices: Tensor, num_steps: int
) -> Stats:
    """Drift, weights and rejection by step index, named `step_{}/...`."""
    # A product is deterministic on every device; index_add is not.
    steps = torch.arange(num_steps, device=step_indices.device)
    at_step = (step_indices.flatten()[:, None] == steps).double()

    def mean_by_step(values: Tensor, where: Tensor) -> Stat:
        sums = torch.where(where, values, 0.0).double().flatten() @ at_step
        return mean(sums, where.double().flatten() @ at_step)

    stats = {
        "kl": mean_by_step(-ratios.delta, ratios.valid),
        "k3_kl": mean_by_step(k3(ratios.delta), ratios.valid),
        "logprob_abs_diff": mean_by_step(ratios.delta.abs(), ratios.valid),
        "masked_fraction": mean_by_step(~keep, ratios.on),
    }
    if weights is not None:
        stats["rollout_is_mean"] = mean_by_step(weights, ratios.valid)
    return {f"step_{{}}/{name}": stat for name, stat in stats.items()}
