"""Metrics of the gap between rollout and training: of a batch, by step of the schedule, by rollout worker."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

from flowcorr.health.metric import Drawn, asked, row, under
from flowcorr.health.of_residuals import RESIDUALS, image_limit
from flowcorr.health.rule import DOCTOR, PERSISTENT, Rule, Units
from flowcorr.questions.normal import largest_kl
from flowcorr.questions.question import AFTER, BEFORE, BETWEEN, BEYOND, ERRORS, IMAGES_REMEDY, NATS, REWARD

_ROUNDED = 1e-5  # nats a latent element: the rounding of a log-prob in float32


def _usual_kl(units: Units) -> float:
    """The largest mean of `-delta` whose step means are `usual_distance` stds apart, with its error."""
    # Without their number, no error of chance.
    count = sys.maxsize if units.num_elements is None else units.num_elements * units.num_terms
    return largest_kl(units.usual_distance, count, _ROUNDED)


def _of_fresh_weights(units: Units) -> float:
    """What old weights do to the KL, learning decides, and no precision bounds it."""
    fresh = units.config is not None and units.config.rollout.max_weight_age == 0
    return BEYOND if fresh else math.inf


_CENTRE = (
    "a tenth of the gradient or more follows from the gap and not from the rewards: "
    "algorithm.rollout_correction.score_centering=true takes it away; where the gap is larger than precision and "
    f"staleness explain, {DOCTOR}"
)


def _clips_nothing(units: Units) -> str:
    if units.bypass:
        return ""
    return (
        "where old log-probs are recomputed, ratios start at 1, and reinforce does not clip; in bypass mode with "
        "ppo_clip, this gap decides which terms are clipped"
    )


def _drifts(units: Units) -> str:
    """Precision and old weights make it, too, so that it is no fault by itself."""
    centres = units.config is not None and units.config.algorithm.rollout_correction.score_centering
    return "score_centering takes it away" if centres else _CENTRE


def _clip_and_gap(units: Units, metrics: Mapping[str, Any]) -> Mapping[str, Any]:
    gap = metrics.get("rollout_corr/logprob_abs_diff_mean")
    return {"clip range": units.clip_range, f"mean |delta log p| ({NATS})": gap}


DRIFT = under(
    "rollout_corr/",
    row(
        "kl",
        "Mean of rollout minus target log-prob: the plain estimate of the KL divergence of a step. Healthy up to what "
        "the precision of both stacks explains, `rollout/usual_gap` times `rollout/velocity_distance`; the range given "
        "here is that of a run whose precision is not known, or whose weights are stale.",
        NATS,
        chart=Drawn(section="drift", title="KL of rollout and old policy, K1"),
        rule=Rule(
            name="kl",
            what="KL of old and rollout policy, nats a latent element,",
            low=lambda units: -_usual_kl(units),
            high=_usual_kl,
            fault=_of_fresh_weights,
            advice=f"the stacks score the same trajectory differently, by more than their precision explains: {DOCTOR}",
        ),
    ),
    row(
        "exact_kl",
        "The exact KL of the steps, from both policies' step means.",
        NATS,
        chart=Drawn(section="drift", title="Exact KL of a step"),
    ),
    row(
        "k3_kl",
        "Mean of `exp(delta) - 1 - delta`: never negative, about half the mean square of `delta`. "
        "With mean-pooled log-probs it is not the KL divergence; that is `exact_kl`. A `delta` of 1e-3 "
        "gives 5e-7.",
        NATS,
        chart=Drawn(
            section="drift",
            title="K3",
            remark="of mean-pooled ratios: about half the mean square of Δ log p; not a KL",
        ),
    ),
    row(
        "logprob_abs_diff_mean",
        "Mean absolute difference of the two log-probs.",
        NATS,
        chart=Drawn(section="drift", title="Mean |Δ log p|"),
    ),
    row("logprob_abs_diff_max", "Largest absolute difference of the two log-probs.", NATS),
    row(
        "log_ppl_diff",
        "Mean over samples of rollout minus target mean log-prob; `kl`, unless terms are left out.",
        NATS,
    ),
    row("log_ppl_abs_diff", "Mean over samples of the absolute difference of mean log-probs.", NATS),
    row("log_ppl_diff_max", "Largest difference of mean log-probs over samples.", NATS),
    row("log_ppl_diff_min", "Smallest difference of mean log-probs over samples.", NATS),
    row(
        "ppl_ratio",
        "Mean over samples of `exp(log_ppl_diff)`; 1 without drift.",
        chart=Drawn(section="drift", title="Perplexity ratio", remark="training / rollout"),
    ),
    row("training_ppl", "Perplexity of the target policy, `exp(-mean log-prob)`, averaged over samples."),
    row("training_log_ppl", "Minus the mean log-prob of the target policy.", NATS),
    row("rollout_ppl", "Perplexity of the rollout policy, averaged over samples."),
    row("rollout_log_ppl", "Minus the mean log-prob of the rollout policy.", NATS),
    row(
        "chi2_token",
        "Estimate of the chi-squared divergence over steps, `mean(exp(2 delta)) - 1`; by chance it "
        "may be slightly negative.",
        chart=Drawn(section="drift", title="χ² of one step", remark="of mean-pooled ratios"),
    ),
    row(
        "chi2_seq",
        "The same over samples, from the sum of `delta` over their steps; it may be slightly negative too.",
        chart=Drawn(section="drift", title="χ² of the window", remark="of mean-pooled ratios"),
    ),
    row(
        "nonfinite_fraction",
        "Share of terms of which a policy's log-prob is not finite; such terms are dropped.",
        "share",
        rule=Rule(
            name="gap_nonfinite",
            what="share of terms of which the engine's or the trainer's log-prob is not finite",
            high=0.0,
            serious=0.1,
            advice="all numbers of the gap leave these terms out: weights diverge, or numbers overflow in float16. The "
            "check `finite` of `flowcorr doctor` says on which side",
        ),
    ),
    row(
        "clip_noise_fraction",
        "Share of terms whose ratio is outside the loss's clip range before anything was learned.",
        "share",
        chart=Drawn(section="correction", title="Outside the clip before learning", remark="share of terms"),
        rule=Rule(
            name="clip_noise",
            what="share of ratios outside the clip range before anything was learned",
            high=0.1,
            noted=_clips_nothing,
            numbers=_clip_and_gap,
            advice="the clip range lies below the noise floor, so noise decides which terms are clipped: set "
            "the clip range that `flowcorr audit` recommends, or recompute old log-probs (bypass_mode: "
            "false)",
        ),
    ),
    row(
        "bookkeeping_z_max",
        "Largest z-score of `delta` given the exact KL: above 6, latents, sigmas or timesteps are "
        "wrong, not the precision.",
        "standard deviations",
        rule=Rule(
            name="bookkeeping",
            what="largest z-score of the log-ratio given the exact KL",
            # Clean runs (fp8, int8, int4, stale weights, three samplers) reach 4.1.
            high=lambda units: ERRORS if units.densities else math.inf,
            patience=PERSISTENT,
            advice=f"the latents, sigmas or timesteps that are scored are not those that were sampled: {DOCTOR}",
        ),
    ),
    row("noise_quantile", "With `auto`: .99 quantile of |ratio - 1| before any update.", "clip ranges"),
    row("noise_quantile_low", "Lower end of that quantile's 95 % interval.", "clip ranges"),
    row("noise_quantile_high", "Upper end of that quantile's 95 % interval.", "clip ranges"),
    row("bypass", "With `auto`: 1 if the training step was in bypass mode, else 0."),
    row(
        "engine/<name>",
        "The engine's part of the gap: log-probs of the rollout against those of the training stack "
        "under the same weights.",
        NATS,
    ),
    asked(
        BEFORE,
        chart=Drawn(
            section="replay",
            title="Before the window",
            remark="error of the way there, in errors of the window",
        ),
    ),
    asked(
        BETWEEN,
        chart=Drawn(
            section="replay",
            title="Between its steps",
            remark="error of the way there, in errors of the window",
        ),
    ),
    asked(
        AFTER,
        chart=Drawn(
            section="replay", title="After the window", remark="error of the way on, in errors of the window"
        ),
    ),
    row(
        "replay/window",
        "Replay: relative error of the velocity in the SDE window, its noise included; healthy up to "
        "three times what the precision of both stacks explains.",
        "share",
        chart=Drawn(
            section="replay",
            title="The window",
            remark="relative error of the velocity, which the ratio sees",
        ),
        rule=Rule(
            name="replay_window",
            what="relative error of the velocity in the SDE window of replayed images",
            high=lambda units: units.usual_gap,
            fault=BEYOND,
            hides=("replay_before", "replay_between", "replay_after"),
            advice=f"{DOCTOR}: rounding does not explain this gap, and the steps outside the window are judged "
            "only after it is mended. Where rollout_corr/logprob_abs_diff_mean is as large as ever, the "
            "noise is at fault and not the velocity: the engine has to add s times the standard normal "
            "noise that (seed, training step, group, member) and step index give, and to leave the "
            "latents as they are",
        ),
    ),
    row(
        "replay/decode",
        "Replay: largest mean difference of an image from the training stack's decoding of its final "
        "latents; healthy up to what the dtypes of both decoders explain.",
        "grey levels of 255",
        chart=Drawn(section="replay", title="Decoder", remark="grey levels of 255, worst image"),
        rule=Rule(
            name="replay_decode",
            what="difference of an image from the trainer's decoding of its latents, in grey levels of 255,",
            high=image_limit,
            fault=BEYOND,
            advice=f"{IMAGES_REMEDY}; where the difference is infinite, the trainer's own decoder gives pixels that "
            "are not finite: check the files of its VAE, and where model.dtype is not float32, try that",
        ),
    ),
    asked(
        REWARD,
        chart=Drawn(
            section="replay", title="Reward", remark="standard deviations of the scores, worst image"
        ),
    ),
    row(
        "score_drift",
        "Where the rollout returns its step means, of terms scored before the first update: the part of the gradient "
        "in the step means that pulls to the engine's policy whatever is rewarded, which `score_centering` takes away; "
        "of a group and step, `|sum A (mu_q - mu) / s|^2` beside `|sum A z|^2`, before weights.",
        "share of the square",
        chart=Drawn(section="drift", title="Drift of the score", remark="share of the squared gradient"),
        rule=Rule(
            name="score_drift",
            what="share of the squared gradient that pulls to the engine's policy whatever is rewarded",
            high=0.01,
            patience=PERSISTENT,
            noted=_drifts,
            advice=_CENTRE,
        ),
    ),
    *RESIDUALS,
    row(
        "residual/<name>/unseen",
        "The largest fault of this kind that could still hide among the residuals so far; nothing smaller is known to "
        "be absent.",
        "of the residual",
    ),
    row(
        "staleness/<name>",
        "The part of the gap that comes from stale weights: log-probs under the weights that sampled "
        "against those under the current ones.",
        NATS,
    ),
)

STEPS = under(
    "rollout_corr/step_<i>/",
    row("kl", "`rollout_corr/kl` of step index `<i>` alone.", NATS),
    row("k3_kl", "`rollout_corr/k3_kl` of step index `<i>` alone.", NATS),
    row("logprob_abs_diff", "Mean absolute difference of log-probs at step index `<i>`.", NATS),
    row(
        "rollout_is_mean",
        "Mean weight at step index `<i>`; if it differs between steps, the weights re-weight timesteps.",
    ),
    row("masked_fraction", "Share of terms rejected at step index `<i>`.", "share"),
    row("score_drift", "`rollout_corr/score_drift` of step index `<i>` alone.", "share of the square"),
    row(
        "rollout_rs_<mode>_threshold_low",
        "Bypass mode: lower end of the `auto` band of step index `<i>`, as earlier training steps "
        "measured it; the clip range is added to it.",
        "of the mode; of k1 modes, a ratio",
    ),
    row("rollout_rs_<mode>_threshold_high", "Likewise its upper end.", "of the mode; of k1 modes, a ratio"),
)

WORKERS = under(
    "rollout_corr/worker_<i>/",
    row(
        "logprob_abs_diff",
        "Mean absolute difference of log-probs of what rollout worker `<i>` sampled.",
        NATS,
    ),
    row("k3_kl", "`rollout_corr/k3_kl` of what rollout worker `<i>` sampled.", NATS),
    row("relative_gap", "Its gap beside the mean of all workers' at the same steps of the schedule."),
)
