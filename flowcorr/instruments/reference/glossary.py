"""Words that the tools print and that are no metric, key, preset, check or fault."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """One word.

    Attributes:
        meaning: its explanation.
        metrics: the metrics that measure it.
        worry: when to worry; empty if the healthy range of the first metric says it.
        remedy: what to do then; empty likewise.
    """

    meaning: str
    metrics: tuple[str, ...]
    worry: str = ""
    remedy: str = ""


WORDS: Mapping[str, Word] = {
    "delta": Word(
        meaning="Log-prob of the target policy minus that of the rollout, nats per latent element. The target is the "
        "old policy in decoupled mode and the current one in bypass mode.",
        metrics=("rollout_corr/logprob_abs_diff_mean", "rollout_corr/logprob_abs_diff_max"),
        worry="bypass mode: its size is near the clip range; any mode: it is large at one step of the schedule alone",
        remedy="run `flowcorr doctor`, then `flowcorr audit`",
    ),
    "joint nats": Word(
        meaning="The gap, as every screen shows it: KL of a whole SDE window, summed over all latent elements; metrics "
        "are means over them. Where the engine returns no step means, it follows from the mean square of delta. At x "
        "joint nats exact importance weights leave at most exp(-2 x) of the samples.",
        metrics=("rollout_corr/exact_kl", "rollout_corr/k3_kl"),
        worry="weights at scale `sum`: at .1 they leave 82 % of the samples, at 1 only 14 %. Without weights a large "
        "gap need not do harm",
        remedy="recompute old log-probs, and close a large gap at its source: precision or staleness of the engine",
    ),
    "ess": Word(
        meaning="Effective sample size: the share of the batch that weighted samples are worth. At scale `mean` it is "
        "near 1 whatever the gap, because these weights stay near 1.",
        metrics=("rollout_corr/rollout_is_eff_sample_size",),
    ),
    "d": Word(
        meaning="Number of latent elements of a sample. Log-probs are means over them; joint nats and the scales "
        "`sqrt` and `sum` depend on it.",
        metrics=("rollout/num_elements",),
        worry="a dump with a wrong num_elements misleads",
        remedy="compare it with channels x height x width of the latents, of a video also x latent frames",
    ),
    "auto": Word(
        meaning="Several keys take it. `bypass_mode: auto` chooses bypass or decoupled at each training step by the "
        "measured noise. `rollout_rs_threshold: auto` measures the rejection band on the run's own noise. "
        "`trainer.doctor: auto` examines engines with processes or a model of their own before training. "
        "`actor.micro_batch_size: auto` and `actor.fold_steps: auto` take the largest passes that memory allows.",
        metrics=("rollout_corr/bypass", "rollout_corr/noise_quantile", "rollout_corr/rejected_ratio"),
        worry="the mode changes every few steps, or a measured band rejects many samples",
        remedy="fix the mode (`bypass_mode: false` is safe), and let `flowcorr doctor` look for what the band rejects",
    ),
    "bypass": Word(
        meaning="Mode in which PPO's old log-probs are the engine's, so a step has one forward pass less. The clip "
        "then sees the gap itself. Weights that are steps old cost most here.",
        metrics=("rollout_corr/clip_noise_fraction",),
    ),
    "decoupled": Word(
        meaning="Mode in which the trainer recomputes PPO's old log-probs. Weights and rejection act once a batch, on "
        "old against rollout. The clip does not see the gap.",
        metrics=("rollout_corr/kl", "timing/old_log_prob"),
    ),
    "leg": Word(
        meaning="A part of the way from initial noise to score, which the trainer replays from the rollout's own "
        "values.",
        metrics=tuple(
            f"rollout_corr/replay/{leg}" for leg in ("before", "between", "after", "decode", "reward")
        ),
        worry="one is beyond its limit: that part differs in both stacks, and no log-prob shows it",
        remedy="`flowcorr explain before`, and so on, says what to compare",
    ),
    "step_z": Word(
        meaning="Rejection mode: rejects steps whose delta lies more than so many robust standard deviations, usually "
        "6, from the median of their step of the schedule. It sees single broken samples, and is blind to a shift of "
        "the whole batch.",
        metrics=("rollout_corr/rejected_ratio",),
    ),
    "nf4": Word(
        meaning="4 bits a weight, on the quantiles of a normal distribution: `model.quantization: nf4` keeps the "
        "frozen base so under an adapter. An engine in process samples with the same weights, so there is no gap; one "
        "with the unquantized base is about 12 % away in velocity, as the trainer is the coarse side.",
        metrics=("rollout_corr/clip_noise_fraction", "rollout_corr/replay/window"),
        worry="in bypass mode, or where the adapter is served on the unquantized base",
        remedy="recompute old log-probs, sample in process, or take `int8`, which is .8 % away",
    ),
}
"""By the word in lower case."""
SYNONYMS: Mapping[str, str] = {
    "effective sample size": "ess",
    "nats": "joint nats",
    "gap": "joint nats",
    "legs": "leg",
    "|delta|": "delta",
}
"""Other spellings."""
