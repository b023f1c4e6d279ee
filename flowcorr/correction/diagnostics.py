"""What is logged about the drift: which values go into the metrics, and which metrics they make.

Diagnostics of the log-ratios are of the unscaled `delta`; those of weights and rejection are of what was used.
Perplexities are means over samples of `exp(-mean_t log_prob)`, with exponents held within +-20. Fractions of a
rejection mode run over valid terms and their samples; `rollout_rs_masked_fraction`,
`rollout_rs_seq_masked_fraction` and `nonfinite_fraction` run over all that the mask has on.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from flowcorr.correction.bounds import Criterion
from flowcorr.correction.columns import Columns, Names, Spec
from flowcorr.correction.columns import layout as columns_layout
from flowcorr.correction.columns import step_layout as columns_step_layout
from flowcorr.correction.ratios import EXPONENT_BOUND, above, below, bounded_expm1, log_ratios
from flowcorr.correction.rejection import Verdict
from flowcorr.correction.weights import Weights
from flowcorr.metrics import Block, Layout, Metrics

_DRIFT: tuple[Spec, ...] = (
    ("kl", "mean", ("k1/terms", "n/terms")),
    ("k3_kl", "mean", ("k3/terms", "n/terms")),
    ("logprob_abs_diff_mean", "mean", ("abs/terms", "n/terms")),
    ("logprob_abs_diff_max", "max", ("abs/max",)),
    ("chi2_token", "mean", ("chi2/terms", "n/terms")),
    ("chi2_seq", "mean", ("chi2_seq/samples", "n/samples")),
    ("log_ppl_diff", "mean", ("k1/samples", "n/samples")),
    ("log_ppl_abs_diff", "mean", ("abs_k1/samples", "n/samples")),
    ("log_ppl_diff_max", "max", ("k1/max",)),
    ("log_ppl_diff_min", "min", ("k1/min",)),
    ("ppl_ratio", "mean_plus_one", ("ppl_ratio/samples", "n/samples")),
    ("training_ppl", "mean", ("training_ppl/samples", "n/samples")),
    ("training_log_ppl", "mean", ("training_log_ppl/samples", "n/samples")),
    ("rollout_ppl", "mean", ("rollout_ppl/samples", "n/samples")),
    ("rollout_log_ppl", "mean", ("rollout_log_ppl/samples", "n/samples")),
    ("exact_kl", "mean", ("exact_kl/terms", "n/terms")),
    ("bookkeeping_z_max", "max", ("bookkeeping_z/max",)),
    ("clip_noise_fraction", "mean", ("clipped/terms", "n/terms")),
    ("nonfinite_fraction", "mean", ("nonfinite/all", "masked_on/all")),
)
# The size of a drift, of those.
SIZES = ("kl", "k3_kl", "logprob_abs_diff_mean", "logprob_abs_diff_max", "exact_kl")
_WEIGHTS: tuple[Spec, ...] = (
    ("rollout_is_mean", "mean_plus_one", ("weight/terms", "n/terms")),
    ("rollout_is_std", "std", ("weight/terms", "weight^2/terms", "n/terms")),
    ("rollout_is_max", "max", ("weight/max",)),
    ("rollout_is_min", "min", ("weight/min",)),
    ("rollout_is_raw_max", "max", ("raw_weight/max",)),
    ("rollout_is_raw_min", "min", ("raw_weight/min",)),
    ("rollout_is_eff_sample_size", "ess_plus_one", ("weight/terms", "weight^2/terms", "n/terms")),
    ("rollout_is_ratio_fraction_high", "mean", ("weight_high/terms", "n/terms")),
    ("rollout_is_ratio_fraction_low", "mean", ("weight_low/terms", "n/terms")),
    ("rollout_is_oob_ratio", "mean", ("weight_outside/terms", "n/terms")),
    ("rollout_is_seq_mean", "mean_plus_one", ("weight/samples", "n/samples")),
    ("rollout_is_seq_std", "std", ("weight/samples", "weight^2/samples", "n/samples")),
    ("rollout_is_seq_max", "max", ("seq_weight/max",)),
    ("rollout_is_seq_min", "min", ("seq_weight/min",)),
    ("rollout_is_seq_max_deviation", "max", ("seq_deviation/max",)),
    ("rollout_is_seq_fraction_high", "mean", ("weight_high/samples", "n/samples")),
    ("rollout_is_seq_fraction_low", "mean", ("weight_low/samples", "n/samples")),
)
_OUTCOME: tuple[Spec, ...] = (
    ("rollout_is_veto_fraction", "mean", ("vetoed/samples", "n/samples")),
    ("rollout_is_catastrophic_token_fraction", "mean", ("vetoed/terms", "n/terms")),
    ("rollout_rs_masked_fraction", "mean", ("rejected/all", "masked_on/all")),
    ("rollout_rs_seq_masked_fraction", "mean", ("touched/all", "in_use/all")),
    ("rejected_ratio", "mean", ("touched/all", "in_use/all")),
)


_STEPS: tuple[Spec, ...] = (
    ("step_{}/kl", "mean", ("step/k1", "step/n")),
    ("step_{}/k3_kl", "mean", ("step/k3", "step/n")),
    ("step_{}/logprob_abs_diff", "mean", ("step/abs", "step/n")),
    ("step_{}/rollout_is_mean", "mean_plus_one", ("step/weight", "step/n")),
    ("step_{}/masked_fraction", "mean", ("step/rejected", "step/masked_on")),
)
# The first dialect had these diagnostics under names of their own, and masked by its weights.
_LEGACY_DRIFT = (
    *("kl", "k3_kl", "training_ppl", "training_log_ppl", "rollout_ppl", "rollout_log_ppl"),
    *("log_ppl_diff", "log_ppl_abs_diff", "log_ppl_diff_max", "log_ppl_diff_min", "ppl_ratio"),
)
_LEGACY_RENAMED = {
    "rollout_rs_masked_fraction": "rollout_is_masked_fraction",
    "rollout_rs_seq_masked_fraction": "rollout_is_seq_masked_fraction",
}


def metrics(
    block: Block,
    names: Names,
    criteria: tuple[Criterion, ...],
    normalize: str | None,
    legacy_names: bool,
    num_steps: int | None,
) -> Metrics:
    """The metrics of a correction; `normalize` is None, or what the weights' batch mean runs over.

    One layout holds the step indices below `num_steps`. Without it each index has a layout of its own, since the
    largest of a batch is not that of the next, and their metrics must merge.
    """
    whole = _layout(names, criteria, normalize, legacy_names, num_steps or 0)
    if num_steps is not None or not names.steps:
        return Metrics({whole: block})
    size = len(names.sum_slots())
    steps = block.sums[size:].view(len(names.steps), -1).unbind(1)
    rows = {_step_layout(names, index): Block(sums, block.maxima[:0]) for index, sums in enumerate(steps)}
    return Metrics({whole: Block(block.sums[:size], block.maxima), **rows})


@lru_cache(maxsize=64)
def _layout(
    names: Names, criteria: tuple[Criterion, ...], normalize: str | None, legacy_names: bool, num_steps: int
) -> Layout:
    return columns_layout(names, _specs(criteria, normalize, legacy_names), num_steps)


@lru_cache(maxsize=256)
def _step_layout(names: Names, index: int) -> Layout:
    return columns_step_layout(names, _STEPS, index).prefixed("rollout_corr/")


def _specs(criteria: tuple[Criterion, ...], normalize: str | None, legacy_names: bool) -> tuple[Spec, ...]:
    result = (*_DRIFT, *_WEIGHTS, *_OUTCOME, *_STEPS)
    if normalize is not None:
        result += (
            ("rollout_is_batch_norm_factor", "mean_plus_one", (f"weight/{normalize}", f"n/{normalize}")),
        )
    for criterion in criteria:
        result += _rejection_specs(criterion)
    named = tuple((f"rollout_corr/{name}", kind, parts) for name, kind, parts in result)
    return named + _legacy_specs(result) if legacy_names else named


def _legacy_specs(current: tuple[Spec, ...]) -> tuple[Spec, ...]:
    names = {name: f"mismatch/mismatch_{name}" for name in _LEGACY_DRIFT}
    names |= {
        name: f"mismatch/{name}" for name, _, _ in (*_WEIGHTS, *_OUTCOME) if name.startswith("rollout_is_")
    }
    names |= {name: f"mismatch/{old}" for name, old in _LEGACY_RENAMED.items()}
    return tuple((names[name], kind, parts) for name, kind, parts in current if name in names)


def _rejection_specs(criterion: Criterion) -> tuple[Spec, ...]:
    mode, over = criterion.mode, "terms" if criterion.per_step else "samples"
    return (
        (f"rollout_rs_{mode}_mean", "mean", (f"{mode}/{over}", f"n/{over}")),
        (f"rollout_rs_{mode}_max", "max", (f"{mode}/max",)),
        (f"rollout_rs_{mode}_min", "min", (f"{mode}/min",)),
        (f"rollout_rs_{mode}_std", "std", (f"{mode}/{over}", f"{mode}^2/{over}", f"n/{over}")),
        (f"rollout_rs_{mode}_fraction_high", "mean", (f"{mode}_high/{over}", f"n/{over}")),
        (f"rollout_rs_{mode}_fraction_low", "mean", (f"{mode}_low/{over}", f"n/{over}")),
        (f"rollout_rs_{mode}_masked_fraction", "mean", (f"{mode}_out/terms", "n/terms")),
        (f"rollout_rs_{mode}_seq_masked_fraction", "mean", (f"{mode}_out/samples", "n/samples")),
    )


def add_drift(columns: Columns, excess: Tensor) -> None:
    """Add what describes the log-ratios; `excess` `[B, T]` is `expm1(delta)`."""
    ratios = columns.ratios
    delta_sum = ratios.delta_sum
    minus_share = -ratios.share
    k1 = delta_sum * minus_share
    rollout_nll = ratios.rollout_sum * minus_share
    target_nll = rollout_nll + k1
    ppl_ratio, seq_ratio = bounded_expm1(torch.stack((k1, delta_sum))).unbind()
    rollout_ppl, target_ppl = (
        torch.stack((rollout_nll, target_nll)).clamp_(-EXPONENT_BOUND, EXPONENT_BOUND).exp_()
    )
    columns.add("n", ratios.has_valid, "terms", "samples")
    columns.add("k1", k1, "terms", "samples")
    columns.add_range("k1", k1)
    columns.add("abs_k1", k1.abs(), "samples")
    size = ratios.delta.abs()
    columns.add_steps("abs", size)
    columns.add_max("abs/max", size.amax().expand(len(k1)))
    del size  # its memory, still in the cache, serves the next column
    columns.add_steps("k3", excess - ratios.delta)
    # exp(delta)^2 - 1 = e (e + 2) with e = expm1(delta)
    flat = excess.flatten()
    columns.totals["chi2/terms"] = torch.dot(flat, flat) + 2.0 * excess.sum()
    columns.add("chi2_seq", (seq_ratio + 2.0).mul_(seq_ratio), "samples")
    columns.add("ppl_ratio", ppl_ratio, "samples")
    columns.add("training_ppl", target_ppl, "samples")
    columns.add("training_log_ppl", target_nll, "samples")
    columns.add("rollout_ppl", rollout_ppl, "samples")
    columns.add("rollout_log_ppl", rollout_nll, "samples")
    columns.add_all("masked_on", ratios.num_masked_on)
    columns.add_all("nonfinite", ratios.num_masked_on - ratios.num_valid)


def drift_metrics(
    target_log_prob: Tensor,
    rollout_log_prob: Tensor,
    *,
    mask: Tensor | None = None,
    step_kl: Tensor | None = None,
    prefix: str,
) -> Metrics:
    """How large a drift is, and no more: `SIZES` of it under `prefix`; of no samples, nothing.

    Args:
        target_log_prob, rollout_log_prob: `[B, T]`, nats per latent element.
        mask: `[B, T]`, nonzero where a term counts; None for everywhere.
        step_kl: `[B, T]`, exact KL of each step a latent element, where known.
        prefix: of the names.
    """
    if not len(target_log_prob):
        return Metrics()
    ratios = log_ratios(target_log_prob, rollout_log_prob, mask, step_kl)
    columns = Columns(ratios)
    add_drift(columns, bounded_expm1(ratios.delta))
    if ratios.step_kl is not None:
        columns.add_steps("exact_kl", ratios.step_kl)
    return Metrics({_sizes_layout(columns.names(), prefix): columns.pack(None, 0)})


@lru_cache(maxsize=64)
def _sizes_layout(names: Names, prefix: str) -> Layout:
    return columns_layout(names, tuple(spec for spec in _DRIFT if spec[0] in SIZES), 0).prefixed(prefix)


def add_exact_kl(columns: Columns, num_elements: int | None, resolution: Tensor) -> None:
    """Add the exact KL, and how far `delta` is from what it implies.

    Sampled under the rollout policy, `z = (delta + r^2/2) sqrt(D) / r` with `r^2 / 2` the exact KL is standard
    normal; `r / sqrt(D)` is not taken below the log-probs' `resolution` `[B, T]`, so that rounding is no alarm.
    """
    ratios = columns.ratios
    assert ratios.step_kl is not None
    columns.add_steps("exact_kl", ratios.step_kl)
    if num_elements is not None:
        noise = (2.0 / num_elements * ratios.step_kl).sqrt_()
        z = (ratios.delta + ratios.step_kl) / torch.maximum(noise, resolution)
        columns.add_max("bookkeeping_z/max", z.abs_())


def add_clip(columns: Columns, clip_ratio: float | Tensor) -> None:
    """Add the terms whose ratio `exp(delta)` lies outside `[1 - clip, 1 + clip]` already."""
    delta, valid = columns.ratios.delta, columns.ratios.valid
    if isinstance(clip_ratio, Tensor):
        clip = clip_ratio.detach().double()
        outside = below(delta, torch.log1p(-clip.clamp(max=1.0))) + above(delta, torch.log1p(clip))
    else:
        lower = math.log1p(-clip_ratio) if clip_ratio < 1.0 else -math.inf
        outside = below(delta, lower) + above(delta, math.log1p(clip_ratio))
    columns.add_steps("clipped", outside * valid)


def add_weights(columns: Columns, weights: Weights, seq_weights: Weights) -> None:
    """Add the weights, and each sample's mean of them (the same, where weights are of samples)."""
    excess, of_samples = seq_weights.excess, weights is seq_weights
    over = ("terms", "samples") if of_samples else ("samples",)
    columns.add("weight", excess, "terms", "samples")
    columns.add("weight^2", excess.square(), *over)
    columns.add("weight_high", seq_weights.high, *over)
    columns.add("weight_low", seq_weights.low, *over)
    columns.add_range("seq_weight", excess + 1.0)
    columns.add_max("seq_deviation/max", excess.abs())
    columns.add_range("raw_weight", weights.raw_excess + 1.0)
    if of_samples:
        columns.add("weight_outside", weights.outside, "terms")
        for end in ("max", "min"):
            columns.peaks[f"weight/{end}"] = columns.peaks[f"seq_weight/{end}"]
        return
    valid = columns.ratios.valid
    columns.add_steps("weight^2", weights.excess.square().mul_(valid))
    columns.add_steps("weight_high", weights.high * valid)
    columns.add_steps("weight_low", weights.low * valid)
    columns.add_steps("weight_outside", weights.outside * valid)
    columns.add_range("weight", weights.excess + 1.0)


def add_verdict(columns: Columns, mode: str, verdict: Verdict) -> None:
    """Add one rejection mode's divergences, and what they reject."""
    columns.add_range(mode, verdict.value)
    if verdict.value.dim() == 1:
        columns.add(mode, verdict.value, "samples")
        columns.add(f"{mode}^2", verdict.value.square(), "samples")
        columns.add(f"{mode}_high", verdict.high, "samples")
        columns.add(f"{mode}_low", verdict.low, "samples")
        columns.add(f"{mode}_out", verdict.out, "terms", "samples")
        return
    valid = columns.ratios.valid
    columns.add_steps(mode, verdict.value)
    columns.add_steps(f"{mode}^2", verdict.value.square())
    columns.add_steps(f"{mode}_high", verdict.high * valid)
    columns.add_steps(f"{mode}_low", verdict.low * valid)
    out = verdict.out * valid
    columns.add_steps(f"{mode}_out", out)
    columns.add(f"{mode}_out", out.amax(1), "samples")


def add_veto(columns: Columns, catastrophic: Tensor) -> Tensor:
    """Add the `[B, T]` steps (1, else 0) that veto their samples; gives these samples, `[B]` likewise."""
    columns.add_steps("vetoed", catastrophic)
    vetoed = catastrophic.amax(1)
    columns.add("vetoed", vetoed, "samples")
    return vetoed


def add_outcome(columns: Columns, num_kept: Tensor) -> None:
    """Add what is left: `num_kept` `[B]` terms."""
    num_masked_on = columns.ratios.num_masked_on
    rejected = num_masked_on - num_kept
    columns.add_all("rejected", rejected)
    columns.add_all("touched", rejected.clamp(max=1.0))
    columns.add_all("in_use", num_masked_on.clamp(max=1.0))


def add_steps(
    columns: Columns, mask: Tensor | None, keep: Tensor, excess: Tensor, weights: Weights | None
) -> None:
    """Add the sums of each step index; `excess` `[B, T]` is `expm1(delta)`."""
    delta, valid = columns.ratios.delta, columns.ratios.valid
    masked_on = torch.ones_like(valid) if mask is None else mask.bool().double()
    columns.steps = {
        "n": valid,
        "k1": -delta,
        "k3": excess - delta,
        "abs": delta.abs(),
        "masked_on": masked_on,
        "rejected": masked_on - keep.double(),
    }
    if weights is not None:
        weight = weights.excess if weights.excess.dim() == 2 else weights.excess.unsqueeze(1)
        columns.steps["weight"] = weight * valid
