"""Metrics of importance weights and of rejection."""

from __future__ import annotations

from flowcorr.health.metric import Drawn, row, under
from flowcorr.health.rule import DOCTOR, PERSISTENT, Rule, Units

_BENIGN = f"{DOCTOR}; widen rollout_rs_threshold only if the drift is benign, such as plain rounding"


def _only_logged(units: Units) -> str:
    if units.weighted:
        return ""
    return "these weights are only logged, as a measure of the gap; `flowcorr audit` recommends what to do"


WEIGHTS = under(
    "rollout_corr/",
    row(
        "rollout_is_mean",
        "Mean importance weight after the cap.",
        chart=Drawn(section="correction", title="Mean importance weight", remark="after its cap"),
        rule=Rule(
            name="mean_weight",
            what="mean importance weight",
            low=0.5,
            high=2.0,
            applied=True,
            noted=_only_logged,
            advice=f"the policies differ systematically, not by noise: {DOCTOR}, and check that the rollout's "
            "weights are fresh (rollout.staleness)",
        ),
    ),
    row(
        "rollout_is_std",
        "Standard deviation of the importance weights after the cap.",
        chart=Drawn(section="correction", title="Std of the importance weights", remark="after their cap"),
        rule=Rule(
            name="weight_std",
            what="std of the importance weights",
            high=1.0,
            applied=True,
            noted=_only_logged,
            advice="few samples carry the gradient: lower rollout_is_threshold, or choose a smaller "
            "log_ratio_scale (sqrt instead of sum, mean instead of sqrt)",
        ),
    ),
    row("rollout_is_min", "Smallest importance weight after the cap."),
    row("rollout_is_max", "Largest importance weight after the cap."),
    row("rollout_is_raw_min", "Smallest importance weight before the cap."),
    row(
        "rollout_is_raw_max",
        "Largest importance weight before the cap.",
        rule=Rule(
            name="cap",
            what="largest importance weight before its cap",
            high=lambda units: units.cap,
            applied=True,
            noted=_only_logged,
            patience=PERSISTENT,
            advice="the cap acts in every step, so the weights are biased: if "
            "rollout_corr/rollout_is_ratio_fraction_high is above a few percent, find the cause of the "
            "drift before you raise rollout_is_threshold",
        ),
    ),
    row(
        "rollout_is_eff_sample_size",
        "Effective sample size as a share of the batch, `(sum w)^2 / (n sum w^2)`.",
        "share",
        chart=Drawn(section="correction", title="Effective sample size", remark="share of the batch"),
        rule=Rule(
            name="effective_sample_size",
            what="effective sample size (a share of the batch)",
            low=0.3,
            applied=True,
            noted=_only_logged,
            advice="few samples carry the gradient: choose a smaller log_ratio_scale, or rejection instead of "
            "weights",
        ),
    ),
    row("rollout_is_ratio_fraction_high", "Share of raw weights above the cap or band.", "share"),
    row("rollout_is_ratio_fraction_low", "Share of raw weights below the band, or below 1 / cap.", "share"),
    row("rollout_is_oob_ratio", "Share of weights that the cap or band changed.", "share"),
    row("rollout_is_batch_norm_factor", "Mean weight, by which batch normalization divides."),
    row("rollout_is_seq_mean", "Mean over samples of their mean weight."),
    row("rollout_is_seq_std", "Standard deviation over samples of their mean weight."),
    row("rollout_is_seq_min", "Smallest mean weight of a sample."),
    row("rollout_is_seq_max", "Largest mean weight of a sample."),
    row("rollout_is_seq_max_deviation", "Largest distance of a sample's mean weight from 1."),
    row("rollout_is_seq_fraction_high", "Share of samples whose mean raw weight is above the cap.", "share"),
    row("rollout_is_seq_fraction_low", "Share of samples whose mean raw weight is below the band.", "share"),
)

REJECTION = under(
    "rollout_corr/",
    row(
        "rollout_rs_masked_fraction",
        "Share of terms that were rejected.",
        "share",
        rule=Rule(
            name="masked",
            what="share of rejected terms",
            high=0.3,
            applied=True,
            advice=_BENIGN,
        ),
    ),
    row("rollout_rs_seq_masked_fraction", "Share of samples that lost at least one term.", "share"),
    row(
        "rejected_ratio",
        "The same as `rollout_rs_seq_masked_fraction`.",
        "share",
        chart=Drawn(section="correction", title="Rejected samples", remark="share with a rejected step"),
        rule=Rule(
            name="rejected",
            what="share of samples with a rejected step",
            high=0.05,
            serious=0.1,
            applied=True,
            advice=_BENIGN,
        ),
    ),
    row(
        "rollout_is_veto_fraction",
        "Share of samples that the veto rejected.",
        "share",
        chart=Drawn(section="correction", title="Vetoed samples"),
        rule=Rule(
            name="veto",
            what="share of vetoed samples",
            high=0.1,
            applied=True,
            advice=f"{DOCTOR}; lower rollout_token_veto_threshold only if the drift is benign",
        ),
    ),
    row(
        "rollout_is_catastrophic_token_fraction",
        "Share of steps below the veto's threshold.",
        "share",
        rule=Rule(
            name="catastrophic",
            what="share of catastrophic steps, with a ratio below the veto",
            high=0.01,
            applied=True,
            advice=f"single steps differ greatly, as with a wrong prompt, weights or step index: {DOCTOR}",
        ),
    ),
    row("rollout_rs_<mode>_mean", "Mean of the mode's divergence.", "of the mode"),
    row("rollout_rs_<mode>_std", "Standard deviation of the mode's divergence.", "of the mode"),
    row("rollout_rs_<mode>_min", "Smallest value of the mode's divergence.", "of the mode"),
    row("rollout_rs_<mode>_max", "Largest value of the mode's divergence.", "of the mode"),
    row(
        "rollout_rs_<mode>_fraction_high",
        "Share above the upper bound; in a k1 mode, share of ratios above it.",
        "share",
    ),
    row(
        "rollout_rs_<mode>_fraction_low",
        "Share below the lower bound; in a k1 mode, share of ratios below it.",
        "share",
    ),
    row(
        "rollout_rs_<mode>_seq_mean",
        "Mean over samples; in a step mode, of each sample's mean.",
        "of the mode",
    ),
    row("rollout_rs_<mode>_seq_std", "Standard deviation over samples of the same value.", "of the mode"),
    row("rollout_rs_<mode>_seq_min", "Smallest value of a sample.", "of the mode"),
    row("rollout_rs_<mode>_seq_max", "Largest value of a sample.", "of the mode"),
    row("rollout_rs_<mode>_seq_max_deviation", "Largest distance of a sample's value from 0.", "of the mode"),
    row(
        "rollout_rs_<mode>_seq_fraction_high",
        "Share of samples above the upper bound; in a k1 mode, share with a ratio above it.",
        "share",
    ),
    row(
        "rollout_rs_<mode>_seq_fraction_low",
        "Share of samples below the lower bound; in a k1 mode, share with a ratio below it.",
        "share",
    ),
    row("rollout_rs_<mode>_masked_fraction", "Share of terms that this mode rejects.", "share"),
    row("rollout_rs_<mode>_seq_masked_fraction", "Share of samples in which this mode rejects.", "share"),
    row(
        "rollout_rs_<mode>_threshold_low",
        "Lower bound of an `auto` threshold, as measured on the batch.",
        "of the mode",
    ),
    row(
        "rollout_rs_<mode>_threshold_high",
        "Upper bound of an `auto` threshold, as measured on the batch.",
        "of the mode",
    ),
    row(
        "rollout_rs_unmeasured_fraction",
        "Bypass mode: share of terms at steps whose `auto` band too few training steps have measured yet.",
        "share",
    ),
    row("dropped_group_fraction", "Share of prompt groups that rejection dropped.", "share"),
    row("partial_group_fraction", "Share of prompt groups that rejection left incomplete.", "share"),
)
