"""Three functions of verl's first dialect, and the names of its metrics, `mismatch/*`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flowcorr.config.older_verl.keys import from_first_dialect
from flowcorr.correction import (
    RolloutCorrectionConfig,
    compute_rollout_correction_and_rejection_mask,
    describe,
)
from flowcorr.correction.bounds import Band, parse_weights, scale_factor
from flowcorr.correction.ratios import log_ratios
from flowcorr.correction.weights import raw_weights
from flowcorr.metrics import Metrics

_OF_DRIFT = (
    "kl",
    "k3_kl",
    "training_ppl",
    "training_log_ppl",
    "rollout_ppl",
    "rollout_log_ppl",
    "log_ppl_diff",
    "log_ppl_abs_diff",
    "log_ppl_diff_max",
    "log_ppl_diff_min",
    "ppl_ratio",
)
# The first dialect masked by its weights.
_OF_MASK = {
    "rollout_rs_masked_fraction": "rollout_is_masked_fraction",
    "rollout_rs_seq_masked_fraction": "rollout_is_seq_masked_fraction",
}


def older_metrics(
    metrics: Metrics,
    target_log_prob: Tensor,
    rollout_log_prob: Tensor,
    mask: Tensor | None,
    config: RolloutCorrectionConfig,
    num_elements: int | None = None,
) -> Metrics:
    """The metrics of a correction under the names of verl's first dialect, `mismatch/*`, as far as it had them.

    In that dialect's mode `mask`, fractions of weights count against the band of the rejection.

    Args:
        metrics: of the correction, `rollout_corr/*`.
        target_log_prob, rollout_log_prob, mask: `[B, T]`, as the correction got them.
        config: the correction.
        num_elements: `D`, which some log-ratio scales need.
    """
    band = _mask_band(config)

    def older(name: str) -> str | None:
        name = name.removeprefix("rollout_corr/")
        if band is not None and name.endswith(("_fraction_high", "_fraction_low")):
            return None
        if name in _OF_DRIFT:
            return f"mismatch/mismatch_{name}"
        is_of_weights = name.startswith("rollout_is_") and name != "rollout_is_batch_norm_factor"
        return f"mismatch/{_OF_MASK.get(name, name)}" if is_of_weights or name in _OF_MASK else None

    renamed = metrics.renamed(older)
    if band is None:
        return renamed
    assert config.rollout_is is not None
    scale = scale_factor(config.log_ratio_scale, num_elements)
    ratios = log_ratios(target_log_prob, rollout_log_prob, mask, scale=scale)
    shares = describe.outside_band(ratios, raw_weights(config.rollout_is, ratios), band)
    return renamed.merge(Metrics(shares).prefixed("mismatch/"))


def _mask_band(config: RolloutCorrectionConfig) -> Band | None:
    """The band of ratios outside of which a correction masks weights that have no cap; else None."""
    cap = parse_weights(config.rollout_is, config.rollout_is_threshold)
    bands = [mode for mode in config.criteria if mode.mode.bounds.is_band and not mode.auto]
    if config.rollout_is is None or cap != math.inf or not bands:
        return None
    return math.exp(-bands[0].upper), math.exp(-bands[0].lower)


def compute_rollout_importance_weights(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    rollout_is_level: str = "token",
    rollout_is_mode: str = "truncate",
    rollout_is_threshold: float | None = None,
    rollout_is_threshold_lower: float | None = None,
    rollout_is_veto_threshold: float | None = None,
) -> tuple[Tensor | None, Tensor, dict[str, float]]:
    """Weights, mask and metrics under the names of the first dialect; None, the mask and {} without a threshold.

    The mask has the dtype of `response_mask`; metrics are the `mismatch/*` ones.
    """
    if rollout_is_threshold is None:
        return None, response_mask, {}
    keys = from_first_dialect(
        {
            "rollout_is": True,
            "rollout_is_level": rollout_is_level,
            "rollout_is_mode": rollout_is_mode,
            "rollout_is_threshold": rollout_is_threshold,
            "rollout_is_threshold_lower": rollout_is_threshold_lower,
            "rollout_is_veto_threshold": rollout_is_veto_threshold,
        }
    )
    config = RolloutCorrectionConfig(**keys)
    log_probs = (old_log_prob, rollout_log_prob, response_mask)
    correction = compute_rollout_correction_and_rejection_mask(*log_probs, **config.options)
    metrics = older_metrics(correction.metrics, *log_probs, config).compute()
    return correction.weights, correction.keep.to(response_mask.dtype), metrics


def compute_offpolicy_metrics(
    old_log_prob: Tensor, rollout_log_prob: Tensor | None, response_mask: Tensor
) -> dict[str, float]:
    """The drift's diagnostics without a prefix, as verl names them.

    Without the rollout's log-probs, only the perplexity of the old policy, as in verl.
    """
    metrics = compute_rollout_correction_and_rejection_mask(
        old_log_prob, old_log_prob if rollout_log_prob is None else rollout_log_prob, response_mask
    ).metrics
    named = {name.removeprefix("rollout_corr/"): value for name, value in metrics.compute().items()}
    if rollout_log_prob is None:
        return {name: value for name, value in named.items() if name.startswith("training_")}
    return named


def compute_rollout_rejection_mask(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_rs: str = "token_k1",
    rollout_rs_threshold: str | float | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """The mask after rejection by log-ratios `[B, T]`, and its metrics without a prefix.

    Bands of k1 are bands of ratios, as everywhere in flowcorr; verl takes them of the reciprocal.
    """
    correction = compute_rollout_correction_and_rejection_mask(
        log_ratio,
        torch.zeros_like(log_ratio),
        response_mask,
        rollout_rs=rollout_rs,
        rollout_rs_threshold=rollout_rs_threshold,
    )
    metrics = correction.metrics.compute()
    chosen = {name: value for name, value in metrics.items() if name.startswith("rollout_corr/rollout_rs_")}
    mask = correction.keep.to(response_mask.dtype)
    return mask, {name.removeprefix("rollout_corr/"): value for name, value in chosen.items()}
