"""Rules for healthy metrics: a table of limits and advice.

The limits are common in rollout correction of language models, where a log-ratio belongs to a token. Here log-ratios
are means over latent elements. Weights and rejection are judged as they were applied. Drift (KL, log-perplexity) is
multiplied by `log_ratio_scale` first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_DOCTOR = "find the cause with `flowcorr doctor` first"
_BENIGN = f"{_DOCTOR}; widen rollout_rs_threshold only if the drift is benign, such as plain rounding"
# In clean runs (bf16, fp8, int8, int4, guidance) this error is at most 1.8 times that of the window.
_OUTSIDE_WINDOW = 4.0
_PERSISTENT = 3  # consecutive steps; a single one may be chance


JUMP_ADVICE = (
    "rounding does not jump: a part of the engine broke in this step, or its weights did not arrive; look at its log "
    f"there, and {_DOCTOR} on the newest checkpoint"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A healthy range of one metric.

    Attributes:
        name: name of the rule.
        metric: name below `rollout_corr/`, or full name.
        what: the metric in words.
        low, high: the healthy range.
        serious: limit above which the finding is serious.
        advice: what to do outside the range.
        drift: judge the absolute value, multiplied by the scale.
        applied: judge the metric of the whole update, `actor/rollout_corr/`, if it is logged.
        patience: consecutive steps outside the range that make a finding.
    """

    name: str
    metric: str
    what: str
    advice: str
    low: float = -math.inf
    high: float = math.inf
    serious: float = math.inf
    drift: bool = False
    applied: bool = False
    patience: int = 1


RULES: tuple[Rule, ...] = (
    Rule(
        name="mean_weight",
        metric="rollout_is_mean",
        what="mean importance weight",
        low=0.5,
        high=2.0,
        applied=True,
        advice=f"the policies differ systematically, not by noise: {_DOCTOR}, and check that the rollout's weights are "
        "fresh (rollout.staleness)",
    ),
    Rule(
        name="weight_std",
        metric="rollout_is_std",
        what="std of the importance weights",
        high=1.0,
        applied=True,
        advice="few samples carry the gradient: lower rollout_is_threshold, or choose a smaller log_ratio_scale "
        "(sqrt instead of sum, mean instead of sqrt)",
    ),
    Rule(
        name="effective_sample_size",
        metric="rollout_is_eff_sample_size",
        what="effective sample size (a share of the batch)",
        low=0.3,
        applied=True,
        advice="few samples carry the gradient: choose a smaller log_ratio_scale, or rejection instead of weights",
    ),
    Rule(
        name="cap",
        metric="rollout_is_raw_max",
        what="largest importance weight before its cap",
        applied=True,
        patience=_PERSISTENT,
        advice="the cap acts in every step, so the weights are biased: if rollout_corr/rollout_is_ratio_fraction_high "
        "is above a few percent, find the cause of the drift before you raise rollout_is_threshold",
    ),
    Rule(
        name="kl",
        metric="kl",
        what="|KL| of old and rollout policy",
        high=0.1,
        drift=True,
        advice=f"the stacks score the same trajectory differently: {_DOCTOR}",
    ),
    Rule(
        name="log_ppl",
        metric="log_ppl_diff",
        what="|difference of log-perplexities|",
        high=1.0,
        drift=True,
        advice=f"log-probs differ by more than rounding explains: {_DOCTOR} (schedule, timesteps, latents)",
    ),
    Rule(
        name="veto",
        metric="rollout_is_veto_fraction",
        what="share of vetoed samples",
        high=0.1,
        applied=True,
        advice=f"{_DOCTOR}; lower rollout_token_veto_threshold only if the drift is benign",
    ),
    Rule(
        name="catastrophic",
        metric="rollout_is_catastrophic_token_fraction",
        what="share of catastrophic steps, with a ratio below the veto",
        high=0.01,
        applied=True,
        advice=f"single steps differ greatly, as with a wrong prompt, weights or step index: {_DOCTOR}",
    ),
    Rule(
        name="masked",
        metric="rollout_rs_masked_fraction",
        what="share of rejected terms",
        high=0.3,
        applied=True,
        advice=_BENIGN,
    ),
    Rule(
        name="rejected",
        metric="rejected_ratio",
        what="share of samples with a rejected step",
        high=0.05,
        serious=0.1,
        applied=True,
        advice=_BENIGN,
    ),
    Rule(
        name="clip_noise",
        metric="clip_noise_fraction",
        what="share of ratios outside the clip range before anything was learned",
        high=0.1,
        advice="the clip range lies below the noise floor, so noise decides which terms are clipped: set the clip "
        "range that `flowcorr audit` recommends, or recompute old log-probs (bypass_mode: false)",
    ),
    Rule(
        name="skipped",
        metric="actor/skipped_updates",
        what="number of skipped updates",
        high=0.0,
        advice="a mini-batch gave no update: all its terms were rejected (widen rollout_rs_threshold, or reject "
        "nothing), its groups were dropped, or its gradient was not finite (lower actor.lr)",
    ),
    Rule(
        name="mostly_rejected",
        metric="actor/mostly_rejected_updates",
        what="number of updates of which most terms lie outside the bands of earlier training steps",
        high=0.0,
        advice=f"the rollout or the trainer changed at once, and was not learned from: {_DOCTOR}. Where the change was "
        "meant, start a new run from the last checkpoint's weights; the bands follow a tenth of their width a step",
    ),
    Rule(
        name="nonfinite",
        metric="actor/nonfinite_fraction",
        what="share of terms whose log-prob is not finite",
        high=0.0,
        serious=0.1,
        advice="the loss leaves these terms out: the weights diverge (lower actor.lr or actor.grad_clip), or a "
        "precision overflows (model.dtype, rollout.dtype)",
    ),
    Rule(
        name="windows",
        metric="rollout/other_windows",
        what="share of samples with other SDE steps than their seeds give",
        high=0.0,
        advice="the engine draws windows of its own, and fewer of the schedule's steps may be trained than the recipe "
        "asks for: pass sampling.sde_window_size, sde_window_range, sde_window_layout and window_per with every "
        "request, or take the steps that flowcorr.sde.draw_windows gives",
    ),
    Rule(
        name="noise_std",
        metric="rollout/noise_std",
        what="std of the steps' noise (x' - mean) / s",
        advice="the engine adds noise of another size than sampling.noise_level asks for, or its log-probs do not "
        f"belong to the noise that it adds: {_DOCTOR}",
    ),
    Rule(
        name="noise_mean",
        metric="rollout/noise_mean",
        what="mean of the steps' noise (x' - mean) / s",
        advice="the engine's latents moved after the step, or its noise is not centred, or its step means differ from "
        f"the actor's by one sign everywhere: {_DOCTOR}",
    ),
    Rule(
        name="noise_tails",
        metric="rollout/noise_tails",
        what="fourth Hermite moment of the steps' noise (x' - mean) / s",
        advice="the noise is not normal: below 0 it lacks tails (uniform noise gives -1.2, or latents are clamped), "
        "above 0 it has too long ones; draw standard normal noise, and leave the latents of a step as they are",
    ),
    Rule(
        name="noise_shared",
        metric="rollout/noise_shared_by",
        what="number of steps that share their noise",
        advice="samples of two ranks or workers, samples of one prompt, or steps of one sample explore in the same "
        "direction: seed the engine's noise by (seed, training step, group, member) and step index; `flowcorr doctor` "
        "names the draws that are equal",
    ),
    Rule(
        name="replay_window",
        metric="rollout_corr/replay/window",
        what="relative error of the velocity in the SDE window of replayed images",
        advice=f"{_DOCTOR}: rounding does not explain this gap, and the steps outside the window are judged only after "
        "it is mended. Where rollout_corr/logprob_abs_diff_mean is as large as ever, the noise is at fault and not the "
        "velocity: the engine has to add s times the standard normal noise that (seed, training step, group, member) "
        "and step index give, and to leave the latents as they are",
    ),
    Rule(
        name="replay_before",
        metric="rollout_corr/replay/before",
        what="error of the steps before the SDE window, in errors of the window itself,",
        high=_OUTSIDE_WINDOW,
        advice="conditioning or sampling before the window is at fault, and no log-prob sees it: compare the initial "
        "noise, prompt embeddings, guidance and schedule of these steps in both stacks",
    ),
    Rule(
        name="replay_between",
        metric="rollout_corr/replay/between",
        what="error of the steps between those of the SDE window, in errors of the window itself,",
        high=_OUTSIDE_WINDOW,
        advice="the latents before a step are not those that the steps before it led to, and no log-prob sees it: "
        "return the latents before and after each SDE step, and compare the embeddings, guidance and schedule of "
        "the steps between them in both stacks",
    ),
    Rule(
        name="replay_after",
        metric="rollout_corr/replay/after",
        what="error of the steps after the SDE window, in errors of the window itself,",
        high=_OUTSIDE_WINDOW,
        advice="conditioning or sampling after the window is at fault, and no log-prob sees it: compare prompt "
        "embeddings, guidance and schedule of these steps in both stacks",
    ),
    Rule(
        name="replay_decode",
        metric="rollout_corr/replay/decode",
        what="difference of an image from the trainer's decoding of its latents, in grey levels of 255,",
        high=3.0,
        advice="the decoder is at fault, or images and latents of different samples are paired: compare the VAEs, "
        "their scaling and shift, and the order of images in a batch",
    ),
    Rule(
        name="replay_reward",
        metric="rollout_corr/replay/reward",
        what="difference of a score from the reward of its image, in standard deviations of the scores,",
        high=0.1,
        advice="the reward is at fault: its images differ from the trainer's (order, channels, size), or its scores "
        "are not repeatable, such as those of a judge that samples its answers",
    ),
    Rule(
        name="flat_groups",
        metric="reward/zero_std_group_fraction",
        what="share of groups whose rewards are all equal",
        high=0.5,
        patience=_PERSISTENT,
        advice="these groups have no gradient: raise rollout.n or sampling.noise_level, or choose a finer reward, or "
        "prompts that are neither solved nor hopeless",
    ),
)
