"""Metrics of the update and of the training step around it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from flowcorr.health.metric import Drawn, asked, row, under
from flowcorr.health.rule import DOCTOR, PERSISTENT, Limit, Rule, Units
from flowcorr.questions.normal import Moment, ranges
from flowcorr.questions.question import NATS, OF_ROLLOUTS, STEP_NOISE

_SHARED_ERRORS = 8.0  # a sum of squares has a longer tail on the right: as rare as 6 of a normal variable


def _bound(moment: Moment, side: int) -> Limit:
    """A limit of a moment of step noise; no gap of means changes a std, which is measured from log-probs."""

    def limit(units: Units) -> float:
        count = units.num_elements and units.num_elements * units.num_terms
        return ranges(count, 0.0 if moment == "std" else units.mean_gap)[moment][side]

    return limit


def _most_shared(units: Units) -> float:
    """The largest number of steps that share their noise by chance, where equal differences of step means add to it."""
    if units.num_elements is None:
        return math.inf
    by_chance = _SHARED_ERRORS * math.sqrt(2 / units.num_elements)
    return 1 + by_chance + units.num_terms * units.mean_gap * units.mean_gap


def _why_skipped(_: Units, metrics: Mapping[str, Any]) -> Mapping[str, Any]:
    """The metrics that tell why updates are skipped, where they are not 0."""
    names = ("mostly_rejected_updates", "nonfinite_fraction", "rollout_corr/rollout_rs_masked_fraction")
    every = {name: metrics.get(f"actor/{name}") for name in names} | {
        "failed samples": metrics.get("reward/failed_samples")
    }
    return {name: value for name, value in every.items() if value}


UPDATE = under(
    "actor/",
    row("loss", "The policy loss, averaged over the terms that `rollout_rs_denominator` counts."),
    row(
        "pg_clipfrac",
        "Share of scored terms whose ratio lies outside the loss's range.",
        "share",
        chart=Drawn(section="update", title="Clipped terms", remark="share of the update's terms"),
        label="clipped",
    ),
    row("ratio_mean", "Mean ratio as the loss uses it, over the terms that the update scored."),
    row(
        "ratio_std",
        "Standard deviation of that ratio.",
        chart=Drawn(section="update", title="Std of the PPO ratio"),
    ),
    row(
        "ppo_kl",
        "Mean of old minus current log-prob, over the terms that the update scored.",
        NATS,
        chart=Drawn(section="update", title="KL of the update"),
    ),
    row("pg_clipfrac_higher", "Share of scored terms whose ratio lies above the loss's range.", "share"),
    row("pg_clipfrac_lower", "Share of scored terms whose ratio lies below the loss's range.", "share"),
    row("exact_kl", "flow_dppo: exact KL of current and old policy.", NATS),
    row("kl_loss", "KL to the reference policy, before `actor.kl_coef`.", NATS),
    row(
        "grad_norm",
        "Norm of the gradient before clipping.",
        chart=Drawn(section="update", title="Gradient norm"),
    ),
    row("lr", "Learning rate."),
    row(
        "updates",
        "Optimizer updates taken in the training step.",
        "updates",
        rule=Rule(
            name="no_update",
            what="number of updates, through ten training steps in a row,",
            low=1.0,
            fault=1.0,
            patience=10,
            numbers=_why_skipped,
            advice="nothing is learned: every update is skipped, because most terms are rejected, no group is left or "
            "gradients are not finite; mend that, as the numbers tell which it is",
        ),
    ),
    row(
        "skipped_updates",
        "Updates skipped: all or most terms rejected, or the gradient not finite.",
        "updates",
        rule=Rule(
            name="skipped",
            what="number of skipped updates",
            high=0.0,
            advice="a mini-batch gave no update: all its terms were rejected (widen rollout_rs_threshold, or "
            "reject nothing), its groups were dropped, or its gradient was not finite (lower actor.lr)",
        ),
    ),
    row(
        "mostly_rejected_updates",
        "Bypass mode: updates skipped because more than half of their terms lie outside `auto` bands.",
        "updates",
        rule=Rule(
            name="mostly_rejected",
            what="number of updates of which most terms lie outside the bands of earlier training steps",
            high=0.0,
            advice=f"the rollout or the trainer changed at once, and was not learned from: {DOCTOR}. Where the "
            "change was meant, start a new run from the last checkpoint's weights; the bands follow a "
            "tenth of their width a step",
        ),
    ),
    row(
        "nonfinite_fraction",
        "Share of scored terms that were not finite and were dropped.",
        "share",
        rule=Rule(
            name="nonfinite",
            what="share of terms whose log-prob is not finite",
            high=0.0,
            serious=0.1,
            advice="the loss leaves these terms out: the weights diverge (lower actor.lr or actor.grad_clip), or "
            "numbers overflow in float16 (set model.dtype and rollout.dtype to bfloat16)",
        ),
    ),
    row(
        "zero_advantage_fraction",
        "Share of samples whose advantage is 0. Decoupled mode without `actor.kl_coef` counts them "
        "in the loss and does not score them.",
        "share",
    ),
    row("rollout_corr/<name>", "Bypass mode: the metric `rollout_corr/<name>` over the whole update."),
)

_IMAGE_STATISTICS = (
    row("image/dark", "Share of pixels with a luma below .2 of the largest.", "share"),
    row("image/saturated", "Share of pixels with a channel of 250 or more, of 255.", "share"),
    row("image/contrast", "Standard deviation of the luma of an image.", "of the largest luma"),
    row(
        "image/sharpness",
        "Mean absolute difference of the luma of neighbouring pixels.",
        "of the largest luma",
    ),
    row("image/bits_per_pixel", "Size of an image as a JPEG of quality 95.", "bits a pixel"),
    row(
        "image/motion",
        "Mean absolute difference of the luma of neighbouring frames of a video; 0 of a video that stands still.",
        "of the largest luma",
    ),
)

RUN = (
    *under(
        "reward/",
        row("mean", "Mean training reward.", "of the reward", label="reward"),
        row("std", "Standard deviation of the training reward.", "of the reward"),
        row("min", "Smallest training reward.", "of the reward"),
        row("max", "Largest training reward.", "of the reward"),
        row(
            "zero_std_group_fraction",
            "Share of prompt groups whose rewards are all equal, so that they have no gradient.",
            "share",
            rule=Rule(
                name="flat_groups",
                what="share of groups whose rewards are all equal",
                high=0.5,
                patience=PERSISTENT,
                advice="these groups have no gradient: raise rollout.n or sampling.noise_level, or choose a finer "
                "reward, or prompts that are neither solved nor hopeless",
            ),
        ),
        row(
            "learned_advantage",
            "With `rollout.n_learned`, mean advantage, among all samples of a prompt, of those that are learned from: "
            "0 where as much is left out above the mean as below. Advantages among those learned from have mean 0.",
            "advantages",
        ),
        row(
            "exact_match",
            "Mean share of images whose text is read as the target, letter by letter.",
            "share",
            label="exact match",
        ),
        row("failed_samples", "Samples that are not finite, or on which the reward failed.", "samples"),
        *_IMAGE_STATISTICS,
        row("image/diversity", "Mean std of a pixel over the images of a prompt.", "of the largest value"),
        row("<name>", "Mean of a reward term, of one of its extra scores, or of a `gold` reward."),
    ),
    *under(
        "eval/",
        row("reward", "Mean reward on held-out prompts, ODE sampler, fixed noise.", "of the reward"),
        row("reward_std", "Standard deviation of that reward over held-out prompts.", "of the reward"),
        row("scored_images", "Held-out images that have a reward, over which its mean is taken.", "images"),
        row(
            "failed_samples",
            "`reward.on_error: drop_group`: held-out images that are not finite, or on which a reward failed; left "
            "out of the means.",
            "images",
        ),
        *_IMAGE_STATISTICS,
        row(
            "served/<name>",
            "`trainer.eval_on: both`: `eval/<name>` with the adapter on the unquantized base.",
        ),
        row("<name>", "Held-out mean of a reward term, of one of its extra scores, or of a `gold` reward."),
    ),
    *under(
        "rollout/",
        row("num_elements", "`D`, latent elements of a sample.", "elements"),
        row(
            "usual_gap",
            "The largest relative error of a velocity that the precision of both stacks explains with this model's "
            "guidance: the limit of `rollout_corr/replay/window`.",
            "share",
        ),
        row(
            "velocity_distance",
            "How far the velocity moves a step mean, root mean square over the window. A relative error of the "
            "velocity moves it by as large a share of this. Not logged where other weights score than sampled.",
            "standard deviations",
        ),
        row("staleness_mean", "Mean age of the weights that sampled.", "training steps"),
        row("staleness_max", "Largest age of the weights that sampled.", "training steps"),
        row("dropped_stale_samples", "Samples dropped because their weights were too old.", "samples"),
        *map(asked, (*OF_ROLLOUTS, STEP_NOISE)),
        row(
            "noise_std",
            "Standard deviation of the step noise `(x' - mean) / s`, as the rollout's log-probs imply "
            "it; 1 if they belong to the drawn noise. A batch shows an error of `6 / sqrt(2 B T D)`.",
            rule=Rule(
                name="noise_std",
                what="std of the steps' noise (x' - mean) / s",
                low=_bound("std", 0),
                high=_bound("std", 1),
                advice="the engine adds noise of another size than sampling.noise_level asks for, or its log-probs "
                f"do not belong to the noise that it adds: {DOCTOR}",
            ),
        ),
        row(
            "noise_mean",
            "Mean of the step noise around the actor's means; 0 if latents belong to the means. A batch "
            "shows `6 / sqrt(B T D)`, and the gap of both policies' means in stds.",
            rule=Rule(
                name="noise_mean",
                what="mean of the steps' noise (x' - mean) / s",
                low=_bound("mean", 0),
                high=_bound("mean", 1),
                advice="the engine's latents moved after the step, or its noise is not centred, or its step means "
                f"differ from the actor's by one sign everywhere: {DOCTOR}",
            ),
        ),
        row(
            "noise_tails",
            "Mean of `e^4 - 6 e^2 + 3` over that noise `e`: 0 if it is normal, -1.2 if it is uniform. A "
            "batch shows `6 sqrt(24 / (B T D))`.",
            rule=Rule(
                name="noise_tails",
                what="fourth Hermite moment of the steps' noise (x' - mean) / s",
                low=_bound("tails", 0),
                high=_bound("tails", 1),
                advice="the noise is not normal: below 0 it lacks tails (uniform noise gives -1.2, or latents are "
                "clamped), above 0 it has too long ones; draw standard normal noise, and leave the latents "
                "of a step as they are",
            ),
        ),
        row(
            "noise_shared_by",
            "Terms that share their step noise; 1 if all are independent, 2 if two ranks draw the same. "
            "A batch shows `8 sqrt(2 / D)`, and `B T` times the squared gap of both policies' means in "
            "stds.",
            "terms",
            rule=Rule(
                name="noise_shared",
                what="number of steps that share their noise",
                high=_most_shared,
                advice="samples of two ranks or workers, samples of one prompt, or steps of one sample explore in "
                "the same direction: seed the engine's noise by (seed, training step, group, member) and "
                "step index; `flowcorr doctor` names the draws that are equal",
            ),
        ),
    ),
    *under(
        "timing/",
        row("step", "The whole training step.", "seconds"),
        row("rollout", "Sampling.", "seconds"),
        row("rollout_wait", "Waiting for Ray workers that still sample.", "seconds"),
        row("reward", "Scoring images, or waiting for the thread or workers that score them.", "seconds"),
        row("old_log_prob", "Recomputing old log-probs; absent in bypass mode.", "seconds"),
        row("correction", "Weights, rejection and drift metrics.", "seconds"),
        row("drift", "Splitting the gap into engine and staleness.", "seconds"),
        row("replay", "Replaying a few images.", "seconds"),
        row("update", "Forward, backward and optimizer.", "seconds"),
        row("sync", "Sending weights to the rollout engine.", "seconds"),
    ),
    *under(
        "perf/",
        row("images_per_second", "Images of a training step over its time.", "images / s"),
        row("max_memory_gb", "Peak memory of the fullest GPU; 1 GB is 1e9 bytes.", "GB"),
    ),
)
