"""Every metric that a run logs, one row for each.

In a name, `<i>` is a step index, `<mode>` a rejection mode, and `<name>` a name from the configuration. Limits and
remedies come from the health rules.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

NATS = "nats per latent element"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric.

    Attributes:
        name: the logged name, with placeholders in angle brackets.
        meaning: its explanation.
        unit: unit of the value; empty for a plain number.
    """

    name: str
    meaning: str
    unit: str = ""

    def matches(self, name: str) -> bool:
        """Whether `name` is this metric with its placeholders filled in."""
        pattern = re.sub(r"<\w+>", "[^ ]+", re.sub(r"([{}().*+])", r"\\\1", self.name))
        return re.fullmatch(pattern, name) is not None


def _rows(prefix: str, rows: dict[str, tuple[str, str]]) -> tuple[Metric, ...]:
    return tuple(Metric(name=prefix + name, meaning=text, unit=unit) for name, (text, unit) in rows.items())


DRIFT = _rows(
    "rollout_corr/",
    {
        "kl": (
            "Mean of rollout minus target log-prob: the plain estimate of the KL divergence of a step.",
            NATS,
        ),
        "k3_kl": (
            "Mean of `exp(delta) - 1 - delta`: never negative, about half the mean square of `delta`. With mean-pooled "
            "log-probs it is not the KL divergence; that is `exact_kl`. At scale `mean` its range only shows broken "
            "runs: a `delta` of 1e-3 gives 5e-7. For smaller gaps watch `clip_noise_fraction`.",
            NATS,
        ),
        "exact_kl": ("The exact KL of the steps, from both policies' step means.", NATS),
        "logprob_abs_diff_mean": ("Mean absolute difference of the two log-probs.", NATS),
        "logprob_abs_diff_max": ("Largest absolute difference of the two log-probs.", NATS),
        "log_ppl_diff": ("Mean over samples of rollout minus target mean log-prob.", NATS),
        "log_ppl_abs_diff": ("Mean over samples of the absolute difference of mean log-probs.", NATS),
        "log_ppl_diff_max": ("Largest difference of mean log-probs over samples.", NATS),
        "log_ppl_diff_min": ("Smallest difference of mean log-probs over samples.", NATS),
        "ppl_ratio": ("Mean over samples of `exp(log_ppl_diff)`; 1 without drift.", ""),
        "training_ppl": (
            "Perplexity of the target policy, `exp(-mean log-prob)`, averaged over samples.",
            "",
        ),
        "training_log_ppl": ("Minus the mean log-prob of the target policy.", NATS),
        "rollout_ppl": ("Perplexity of the rollout policy, averaged over samples.", ""),
        "rollout_log_ppl": ("Minus the mean log-prob of the rollout policy.", NATS),
        "chi2_token": (
            "Estimate of the chi-squared divergence over steps, `mean(exp(2 delta)) - 1`; by chance it may be slightly "
            "negative.",
            "",
        ),
        "chi2_seq": (
            "The same over samples, from the sum of `delta` over their steps; it may be slightly negative too.",
            "",
        ),
        "nonfinite_fraction": (
            "Share of terms whose log-prob is not finite; such terms are dropped.",
            "share",
        ),
        "clip_noise_fraction": (
            "Share of terms whose ratio is outside the loss's clip range before anything was learned.",
            "share",
        ),
        "bookkeeping_z_max": (
            "Largest z-score of `delta` given the exact KL: above 6, latents, sigmas or timesteps are wrong, "
            "not the precision.",
            "standard deviations",
        ),
        "noise_quantile": ("With `auto`: .99 quantile of |ratio - 1| before any update.", "clip ranges"),
        "noise_quantile_low": ("Lower end of that quantile's 95 % interval.", "clip ranges"),
        "noise_quantile_high": ("Upper end of that quantile's 95 % interval.", "clip ranges"),
        "bypass": ("With `auto`: 1 if the training step was in bypass mode, else 0.", ""),
        "engine/<name>": (
            "The engine's part of the gap: log-probs of the rollout against those of the training stack under the same "
            "weights.",
            NATS,
        ),
        "replay/before": (
            "Replay: error of the steps from the initial noise to the SDE window, as a multiple of `replay/window`.",
            "`replay/window`",
        ),
        "replay/between": (
            "Replay: error of the steps between those of the SDE window, as a multiple of `replay/window`; 0 if the "
            "window is consecutive.",
            "`replay/window`",
        ),
        "replay/after": (
            "Replay: error of the steps from the SDE window to the final latents, as a multiple of `replay/window`.",
            "`replay/window`",
        ),
        "replay/window": (
            "Replay: relative error of the velocity in the SDE window, its noise included; healthy up to three times "
            "what the precision of both stacks explains.",
            "share",
        ),
        "replay/decode": (
            "Replay: largest mean difference of an image from the training stack's decoding of its final latents.",
            "grey levels of 255",
        ),
        "replay/reward": (
            "Replay: largest difference between a score and a second score of the same image.",
            "std of the scores",
        ),
        "staleness/<name>": (
            "The part of the gap that comes from stale weights: log-probs under the weights that sampled against those "
            "under the current ones.",
            NATS,
        ),
    },
)
WEIGHTS = _rows(
    "rollout_corr/",
    {
        "rollout_is_mean": ("Mean importance weight after the cap.", ""),
        "rollout_is_std": ("Standard deviation of the importance weights after the cap.", ""),
        "rollout_is_min": ("Smallest importance weight after the cap.", ""),
        "rollout_is_max": ("Largest importance weight after the cap.", ""),
        "rollout_is_raw_min": ("Smallest importance weight before the cap.", ""),
        "rollout_is_raw_max": ("Largest importance weight before the cap.", ""),
        "rollout_is_eff_sample_size": (
            "Effective sample size as a share of the batch, `(sum w)^2 / (n sum w^2)`.",
            "share",
        ),
        "rollout_is_ratio_fraction_high": ("Share of raw weights above the cap or band.", "share"),
        "rollout_is_ratio_fraction_low": ("Share of raw weights below the band, or below 1 / cap.", "share"),
        "rollout_is_oob_ratio": ("Share of weights that the cap or band changed.", "share"),
        "rollout_is_batch_norm_factor": ("Mean weight, by which batch normalization divides.", ""),
        "rollout_is_seq_mean": ("Mean over samples of their mean weight.", ""),
        "rollout_is_seq_std": ("Standard deviation over samples of their mean weight.", ""),
        "rollout_is_seq_min": ("Smallest mean weight of a sample.", ""),
        "rollout_is_seq_max": ("Largest mean weight of a sample.", ""),
        "rollout_is_seq_max_deviation": ("Largest distance of a sample's mean weight from 1.", ""),
        "rollout_is_seq_fraction_high": ("Share of samples whose mean raw weight is above the cap.", "share"),
        "rollout_is_seq_fraction_low": ("Share of samples whose mean raw weight is below the band.", "share"),
    },
)
REJECTION = _rows(
    "rollout_corr/",
    {
        "rollout_rs_masked_fraction": ("Share of terms that were rejected.", "share"),
        "rollout_rs_seq_masked_fraction": ("Share of samples that lost at least one term.", "share"),
        "rejected_ratio": ("The same as `rollout_rs_seq_masked_fraction`.", "share"),
        "rollout_is_veto_fraction": ("Share of samples that the veto rejected.", "share"),
        "rollout_is_catastrophic_token_fraction": ("Share of steps below the veto's threshold.", "share"),
        "rollout_rs_<mode>_mean": ("Mean of the mode's divergence.", "of the mode"),
        "rollout_rs_<mode>_std": ("Standard deviation of the mode's divergence.", "of the mode"),
        "rollout_rs_<mode>_min": ("Smallest value of the mode's divergence.", "of the mode"),
        "rollout_rs_<mode>_max": ("Largest value of the mode's divergence.", "of the mode"),
        "rollout_rs_<mode>_fraction_high": (
            "Share above the upper bound; in a k1 mode, share of ratios above it.",
            "share",
        ),
        "rollout_rs_<mode>_fraction_low": (
            "Share below the lower bound; in a k1 mode, share of ratios below it.",
            "share",
        ),
        "rollout_rs_<mode>_seq_mean": (
            "Mean over samples; in a step mode, of each sample's mean.",
            "of the mode",
        ),
        "rollout_rs_<mode>_seq_std": ("Standard deviation over samples of the same value.", "of the mode"),
        "rollout_rs_<mode>_seq_min": ("Smallest value of a sample.", "of the mode"),
        "rollout_rs_<mode>_seq_max": ("Largest value of a sample.", "of the mode"),
        "rollout_rs_<mode>_seq_max_deviation": (
            "Largest distance of a sample's value from 0.",
            "of the mode",
        ),
        "rollout_rs_<mode>_seq_fraction_high": (
            "Share of samples above the upper bound; in a k1 mode, share with a ratio above it.",
            "share",
        ),
        "rollout_rs_<mode>_seq_fraction_low": (
            "Share of samples below the lower bound; in a k1 mode, share with a ratio below it.",
            "share",
        ),
        "rollout_rs_<mode>_masked_fraction": ("Share of terms that this mode rejects.", "share"),
        "rollout_rs_<mode>_seq_masked_fraction": ("Share of samples in which this mode rejects.", "share"),
        "rollout_rs_<mode>_threshold_low": (
            "Lower bound of an `auto` threshold, as measured on the batch.",
            "of the mode",
        ),
        "rollout_rs_<mode>_threshold_high": (
            "Upper bound of an `auto` threshold, as measured on the batch.",
            "of the mode",
        ),
        "rollout_rs_unmeasured_fraction": (
            "Bypass mode: share of terms at steps whose `auto` band too few training steps have measured yet.",
            "share",
        ),
        "dropped_group_fraction": ("Share of prompt groups that rejection dropped.", "share"),
        "partial_group_fraction": ("Share of prompt groups that rejection left incomplete.", "share"),
    },
)
STEPS = _rows(
    "rollout_corr/step_<i>/",
    {
        "kl": ("`rollout_corr/kl` of step index `<i>` alone.", NATS),
        "k3_kl": ("`rollout_corr/k3_kl` of step index `<i>` alone.", NATS),
        "logprob_abs_diff": ("Mean absolute difference of log-probs at step index `<i>`.", NATS),
        "rollout_is_mean": (
            "Mean weight at step index `<i>`; if it differs between steps, the weights re-weight timesteps.",
            "",
        ),
        "masked_fraction": ("Share of terms rejected at step index `<i>`.", "share"),
        "rollout_rs_<mode>_threshold_low": (
            "Bypass mode: lower end of the `auto` band of step index `<i>`, as earlier training steps measured it; the "
            "clip range is added to it.",
            "of the mode; of k1 modes, a ratio",
        ),
        "rollout_rs_<mode>_threshold_high": (
            "Likewise its upper end.",
            "of the mode; of k1 modes, a ratio",
        ),
    },
)
WORKERS = _rows(
    "rollout_corr/worker_<i>/",
    {
        "logprob_abs_diff": (
            "Mean absolute difference of log-probs of what rollout worker `<i>` sampled.",
            NATS,
        ),
        "k3_kl": ("`rollout_corr/k3_kl` of what rollout worker `<i>` sampled.", NATS),
        "relative_gap": ("Its gap beside the mean of all workers' at the same steps of the schedule.", ""),
    },
)
UPDATE = _rows(
    "actor/",
    {
        "loss": ("The policy loss, averaged over the terms that `rollout_rs_denominator` counts.", ""),
        "ppo_kl": ("Mean of old minus current log-prob, over the terms that the update scored.", NATS),
        "ratio_mean": ("Mean ratio as the loss uses it, over the terms that the update scored.", ""),
        "ratio_std": ("Standard deviation of that ratio.", ""),
        "pg_clipfrac": ("Share of scored terms whose ratio the loss cuts.", "share"),
        "pg_clipfrac_higher": ("Share of scored terms whose ratio the loss cuts from above.", "share"),
        "pg_clipfrac_lower": ("Share of scored terms whose ratio the loss cuts from below.", "share"),
        "exact_kl": ("flow_dppo: exact KL of current and old policy.", NATS),
        "kl_loss": ("KL to the reference policy, before `actor.kl_coef`.", NATS),
        "grad_norm": ("Norm of the gradient before clipping.", ""),
        "lr": ("Learning rate.", ""),
        "updates": ("Optimizer updates taken in the training step.", "updates"),
        "skipped_updates": (
            "Updates skipped: all or most terms rejected, or the gradient not finite.",
            "updates",
        ),
        "mostly_rejected_updates": (
            "Bypass mode: updates skipped because more than half of their terms lie outside `auto` bands.",
            "updates",
        ),
        "nonfinite_fraction": ("Share of scored terms that were not finite and were dropped.", "share"),
        "zero_advantage_fraction": (
            "Share of samples whose advantage is 0. Decoupled mode without `actor.kl_coef` counts them in the loss and "
            "does not score them.",
            "share",
        ),
        "rollout_corr/<name>": ("Bypass mode: the metric `rollout_corr/<name>` over the whole update.", ""),
    },
)
_IMAGE_STATISTICS: dict[str, tuple[str, str]] = {
    "image/dark": ("Share of pixels with a luma below .2 of the largest.", "share"),
    "image/saturated": ("Share of pixels with a channel of 250 or more, of 255.", "share"),
    "image/contrast": ("Standard deviation of the luma of an image.", "of the largest luma"),
    "image/sharpness": (
        "Mean absolute difference of the luma of neighbouring pixels.",
        "of the largest luma",
    ),
    "image/bits_per_pixel": ("Size of an image as a JPEG of quality 95.", "bits a pixel"),
}
RUN = (
    *_rows(
        "reward/",
        {
            "mean": ("Mean training reward.", "of the reward"),
            "std": ("Standard deviation of the training reward.", "of the reward"),
            "min": ("Smallest training reward.", "of the reward"),
            "max": ("Largest training reward.", "of the reward"),
            "zero_std_group_fraction": (
                "Share of prompt groups whose rewards are all equal, so that they have no gradient.",
                "share",
            ),
            "failed_samples": ("Samples on which the reward failed.", "samples"),
            **_IMAGE_STATISTICS,
            "image/diversity": ("Mean std of a pixel over the images of a prompt.", "of the largest value"),
            "<name>": ("Mean of a reward term, of one of its extra scores, or of a `gold` reward.", ""),
        },
    ),
    *_rows(
        "eval/",
        {
            "reward": ("Mean reward on held-out prompts, ODE sampler, fixed noise.", "of the reward"),
            "reward_std": ("Standard deviation of that reward over held-out prompts.", "of the reward"),
            **_IMAGE_STATISTICS,
            "<name>": (
                "Held-out mean of a reward term, of one of its extra scores, or of a `gold` reward.",
                "",
            ),
        },
    ),
    *_rows(
        "rollout/",
        {
            "num_elements": ("`D`, latent elements of a sample.", "elements"),
            "staleness_mean": ("Mean age of the weights that sampled.", "training steps"),
            "staleness_max": ("Largest age of the weights that sampled.", "training steps"),
            "dropped_stale_samples": ("Samples dropped because their weights were too old.", "samples"),
            "other_windows": (
                "Share of samples whose SDE steps are not those that their seeds give; such an engine ignores "
                "`sde_window_layout`, `sde_window_range` or `window_per`, or seeds by other numbers.",
                "share",
            ),
            "noise_std": (
                "Standard deviation of the step noise `(x' - mean) / s`, as the rollout's log-probs imply it; 1 if "
                "they belong to the drawn noise. A batch shows an error of `6 / sqrt(2 B T D)`.",
                "",
            ),
            "noise_mean": (
                "Mean of the step noise around the actor's means; 0 if latents belong to the means. A batch shows "
                "`6 / sqrt(B T D)`, and the gap of both policies' means in stds.",
                "",
            ),
            "noise_tails": (
                "Mean of `e^4 - 6 e^2 + 3` over that noise `e`: 0 if it is normal, -1.2 if it is uniform. A batch "
                "shows `6 sqrt(24 / (B T D))`.",
                "",
            ),
            "noise_shared_by": (
                "Terms that share their step noise; 1 if all are independent, 2 if two ranks draw the same. A batch "
                "shows `8 sqrt(2 / D)`, and `B T` times the squared gap of both policies' means in stds.",
                "terms",
            ),
        },
    ),
    *_rows(
        "timing/",
        {
            "step": ("The whole training step.", "seconds"),
            "rollout": ("Sampling.", "seconds"),
            "rollout_wait": ("Waiting for Ray workers that still sample.", "seconds"),
            "reward": (
                "Scoring images, or waiting for the thread or workers that score them.",
                "seconds",
            ),
            "old_log_prob": ("Recomputing old log-probs; absent in bypass mode.", "seconds"),
            "correction": ("Weights, rejection and drift metrics.", "seconds"),
            "drift": ("Splitting the gap into engine and staleness.", "seconds"),
            "replay": ("Replaying a few images.", "seconds"),
            "update": ("Forward, backward and optimizer.", "seconds"),
            "sync": ("Sending weights to the rollout engine.", "seconds"),
        },
    ),
    *_rows(
        "perf/",
        {
            "images_per_second": ("Images of a training step over its time.", "images / s"),
            "max_memory_gb": ("Peak memory of this rank's GPU.", "GB"),
        },
    ),
)
SECTIONS: dict[str, tuple[Metric, ...]] = {
    "Drift": DRIFT,
    "Importance weights": WEIGHTS,
    "Rejection": REJECTION,
    "By step": STEPS,
    "By rollout worker": WORKERS,
    "Update": UPDATE,
    "Run": RUN,
}


PROGRESS_LABELS = {
    "reward/mean": "reward",
    "reward/exact_match": "exact match",
    "rollout_corr/logprob_abs_diff_mean": "gap",
    "actor/pg_clipfrac": "clipped",
}
"""The metrics that `flowcorr train` shows after each step, and their labels there."""


def find_metric(name: str) -> Metric | None:
    """The row of a logged metric: the exact name first, then a name with placeholders; None if there is none."""
    rows = [metric for section in SECTIONS.values() for metric in section]
    exact = [metric for metric in rows if metric.name == name]
    return next(iter(exact or [metric for metric in rows if metric.matches(name)]), None)
