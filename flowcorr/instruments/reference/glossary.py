"""Words of screens and pages that are no metric, key, preset, check or fault."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

WORDS: Mapping[str, str] = {
    "delta": "Log-prob of the target policy minus that of the rollout, nats per latent element. The target is the old "
    "policy in decoupled mode and the current one in bypass mode.",
    "joint nats": "The gap, as every screen shows it: KL of a whole SDE window, summed over all latent elements; "
    "metrics are means over them. Where the engine returns no step means, it follows from the mean square of delta. "
    "At x joint nats exact importance weights leave at most exp(-2 x) of the samples.",
    "ess": "Effective sample size: the share of the batch that weighted samples are worth. At scale `mean` it is near "
    "1 whatever the gap, because these weights stay near 1.",
    "d": "Number of latent elements of a sample. Log-probs are means over them; joint nats and the scales `sqrt` and "
    "`sum` depend on it.",
    "auto": "Several keys take it. `bypass_mode: auto` chooses bypass or decoupled at each training step by the "
    "measured noise. `rollout_rs_threshold: auto` measures the rejection band on the run's own noise. "
    "`trainer.doctor: auto` examines engines with processes or a model of their own before training. "
    "`actor.micro_batch_size: auto` and `actor.fold_steps: auto` take the largest passes that memory allows.",
    "bypass": "Mode in which PPO's old log-probs are the engine's, so a step has one forward pass less. The clip then "
    "sees the gap itself. Weights that are steps old cost most here.",
    "decoupled": "Mode in which the trainer recomputes PPO's old log-probs. Weights and rejection act once a batch, "
    "on old against rollout. The clip does not see the gap.",
    "leg": "A part of the way from initial noise to score, which the trainer replays from the rollout's own values.",
    "step_z": "Rejection mode: rejects steps whose delta lies more than so many robust standard deviations, usually "
    "6, from the median of their step of the schedule. It sees single broken samples, and is blind to a shift of the "
    "whole batch.",
    "nf4": "4 bits a weight, on the quantiles of a normal distribution: `model.quantization: nf4` keeps the frozen "
    "base so under an adapter. An engine in process samples with the same weights, so there is no gap; one with the "
    "unquantized base is about 12 % away in velocity, as the trainer is the coarse side.",
    "rollout": "The policy that collected the samples: the rollout engine's weights and arithmetic, perhaps some "
    "steps old.",
    "old": "The policy that anchors the PPO clip. In decoupled mode the trainer recomputes its log-probs before the "
    "update; in bypass mode they are the rollout's.",
    "current": "The policy that is being updated: the trainer's weights now.",
    "actor": "The trainer's copy of the transformer, which is trained, and recomputes log-probs.",
    "engine": "The program that samples images for training, such as vllm-omni, or diffusers in the trainer's "
    "process: `rollout.name`.",
    "trainer": "The part of flowcorr that trains, with diffusers and peft; its copy of the model is the actor.",
    "log-prob": "Log of the probability density of one SDE step, as a mean over the latent's elements: nats per "
    "latent element. So the exp of a difference of two is the D-th root of a density ratio.",
    "latent element": "One number of the latent that a sample is in before it is decoded; a sample has D of them.",
    "ratio": "`exp` of the difference of two log-probs, which PPO clips: current against old policy. Log-probs are "
    "means over latent elements, so ratios are near 1.",
    "r": "Distance of two step means in standard deviations of the step: r^2 = mean((mu_a - mu_b)^2 / s^2) over "
    "latent elements. The exact KL of the step is r^2 / 2, and `delta` scatters by r / sqrt(D).",
    "exact kl": "KL of two Gaussian steps from their means: r^2 / 2 a latent element, without sampling noise.",
    "k1": "k1 = -delta, k2 = delta^2 / 2 and k3 = exp(delta) - 1 - delta, from log-probs alone. As these are means "
    "over D elements, k1 scatters around the exact KL, and k2 and k3 are near a D-th of it. Rejection modes are named "
    "after them.",
    "noise floor": "The spread of `delta` before any update, from precision and old weights alone. Where it exceeds "
    "the clip range, the clip acts on noise.",
    "clip range": "How far PPO lets the ratio of current to old probability move from 1: `actor.clip_ratio`, one "
    "number or one by step index. It has to lie above the noise floor in bypass mode.",
    "clip needed": "The clip range that bypass mode needs so that the noise floor stays inside it.",
    "outside clip": "Share of terms whose ratio of old to rollout probability already lies outside the clip range "
    "before any update.",
    "sde window": "The SDE steps that are trained, mostly 2 of the schedule; only they have log-probs. The others, "
    "and decoding, belong to the rollout alone: replays watch them.",
    "schedule": "The sigmas from 1 to 0 at which the model is asked, and their shift.",
    "sigma": "Noise level of a latent on the way from 1 (noise) to 0 (image).",
    "noise level": "`sampling.noise_level`: how much fresh noise an SDE step adds.",
    "step index": "Place of a sampling step in the schedule, from 0. Numbers by step index show which part of the "
    "schedule is off.",
    "term": "One SDE step of one sample, with one log-prob.",
    "group": "The samples of one prompt, `rollout.n` of them. Advantages compare a sample with its group.",
    "member": "One sample of a group.",
    "advantage": "Reward of a sample less the mean of its group, mostly divided by the standard deviation: what its "
    "log-probs are pushed by.",
    "weights": "Importance weights (IS): exp of the scaled `delta`, which multiply the loss, capped by "
    "`rollout_is_threshold` (TIS) or zeroed outside a band (IcePop).",
    "rejection": "Rejection sampling (RS): steps or samples beyond a threshold leave the loss. `rollout_rs` names the "
    "modes, `rollout_rs_threshold` their bands.",
    "band": "The range of values that a rejection mode, or IcePop, keeps.",
    "veto": "A sample one of whose steps has a ratio below `rollout_token_veto_threshold` is rejected whole.",
    "scale": "`log_ratio_scale`: the factor on `delta` before weights and bands: `mean` (1), `sqrt` (sqrt(D)) or "
    "`sum` (D, the steps' density ratio).",
    "token": "In verl's names one SDE step: token weights and modes judge each step by itself.",
    "sequence": "In verl's names the whole SDE window of a sample: weights of its sum of `delta`.",
    "geometric": "Weights or bands of the mean of `delta` over the SDE window of a sample.",
    "staleness": "How many training steps the engine's weights are older than the actor's: `rollout.staleness`.",
    "recompute": "Score the rollout's samples with the actor before the update, for old log-probs of the trainer's "
    "own.",
    "residual": "The engine's value less the trainer's, with its sign, projected on the change that a fault would "
    "make. Rounding averages out over steps, a fault does not.",
    "unseen": "The largest fault that a residual cannot exclude yet. It falls with every replay.",
    "replay": "The training stack repeats sampled images from the rollout's own values, in legs, every "
    "`rollout.replay_every` steps.",
    "probe": "A fixed point at which engine and actor are both asked after each sync of weights: the engine's "
    "velocity has to move as the actor's does.",
    "digest": "A hash of the adapter's weights: the engine's has to equal the actor's after each sync.",
    "witness": "An equality that holds in every precision, such as equal seeds or digests, so that a difference is a "
    "fault.",
    "adapter": "The LoRA weights that are trained, scaled by model.lora.alpha / model.lora.rank.",
    "guidance": "Classifier-free guidance: velocities with the prompt and with the negative one, combined by "
    "`sampling.guidance_scale`. Distilled models take the number as an input.",
    "precision": "The number format that a stack computes in. Limits of the doctor and of replays follow the coarser "
    "of both.",
    "dump": "Files of log-probs, advantages and perhaps captured samples of training steps, by trainer.dump_log_probs "
    "or flowcorr.dump.",
    "preset": "A named choice of mode, weights and rejection: `flowcorr presets` lists them.",
    "finding": "A line of a report: its level (serious, warning, note, healthy), cause, numbers and remedy.",
    "fault": "A value that only a broken engine or bookkeeping explains, and neither chance nor precision nor "
    "learning: a training run stops there, see `trainer.on_fault`, or goes on without the Ray worker whose samples "
    "alone show it. `explain` of a metric says which value.",
    "held out": "Prompts that nothing is trained on; evaluations sample one image for each, from the same noise at "
    "every step.",
    "mini-batch": "The part of a batch of one optimizer step; `actor.mini_batches` of them make an epoch.",
    "micro-batch": "The part of a mini-batch of one forward and backward pass: it changes memory and speed, never the "
    "gradient.",
    "filler sample": "A repeated sample that keeps ranks at equally many passes; it has no part in the loss.",
    "score centering": "The value of a log-prob with another gradient: around the rollout's step mean. Off by default.",
    "robust standard deviation": "1.4826 times the median distance from the median, which single outliers do not move.",
    "weight": "In the audit, the mean of the weights that a preset puts on the loss.",
    "cosine": "In the audit, between a preset's coefficients d loss / d log_prob and those without correction: 1 "
    "where only the length of the gradient changes, which Adam ignores. `lowest` is its smallest value over training "
    "steps.",
    "norm": "In the audit, the length of a preset's coefficients as a multiple of the uncorrected one.",
    "changed": "In the audit, terms whose coefficient changes its sign, becomes 0, or is no longer 0 under a preset.",
    "rejected": "Share of terms that rejection leaves out; `samples` counts whole samples of which a step is left out.",
    "chi-squared": "Mean square of the weights less 1; an effective sample size is about 1 / (1 + chi-squared).",
    "ess expected": "Effective sample size that follows from the exact KLs, for many samples like those that were "
    "measured.",
    "peak": "In a plan, the most GPU memory of a phase. Of arithmetic, the GPU's largest speed.",
    "phase": "A part of a training step: sample, decode, reward, recompute, update, sync; and before them load, "
    "encode, evaluate.",
    "relative": "Of Ray workers, a worker's gap as a multiple of the others' median.",
    "learning": "Finding of the report: whether the held-out reward rose beyond its standard error.",
    "ending": "Finding of the report: the run failed, was interrupted, or has not ended.",
    "files": "Finding about files of a run that are missing or cannot be read, and about stand-ins for them.",
    "saving": "Finding of `flowcorr audit --savings`: what a cheaper rollout saves, what it changes, and what is "
    "known of how much that matters.",
    "rules": "Finding of the report: no health rule was broken.",
    "steps": "Training steps of a run; as a finding, that none was logged.",
    "steps_broken": "In a finding, how many training steps broke the rule; `step` is the worst of them.",
    "ages": "Finding of the audit: samples of weights of different ages are mixed.",
    "unmeasured": "Finding of the audit: a part of the advice needs a number that could not be measured.",
    "wider_clip": "Finding of the audit: bypass mode would need a wider clip range than the configured one.",
    "micro_batch": "Finding of the plan: whether the micro-batch fits, and the largest that does.",
    "trainer_memory": "Finding of the plan: whether the trainer's peak fits the GPU with a margin of 13 percent.",
    "sample": "One image or video that the engine made for a prompt, with the steps that led to it.",
    "epoch": "One pass of the update over a training step's samples: `actor.epochs`.",
    "checkpoint": "A folder under the run's `checkpoints/` with weights, optimizer and counters, from which `flowcorr "
    "train --resume` goes on.",
    "shard": "A rank's part of the weights, with `actor.fsdp=true`.",
    "margin": "In a plan, 13 percent of memory: 5 for the prediction's error, 8 for fragmentation and CUDA's own.",
    "on-policy": "Samples of the very policy that is updated: the same weights in the same arithmetic, so a gap of 0.",
}
"""The meaning of each word in lower case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """The metrics that measure a word.

    Attributes:
        metrics: their names.
        worry: when to worry; empty if the healthy range of the first metric says it.
        remedy: what to do then; empty likewise.
    """

    metrics: tuple[str, ...]
    worry: str = ""
    remedy: str = ""


WATCHED: Mapping[str, Watched] = {
    "delta": Watched(
        metrics=(
            "rollout_corr/logprob_abs_diff_mean",
            "rollout_corr/logprob_abs_diff_max",
        ),
        worry="bypass mode: its size is near the clip range; any mode: it is large at one step of the schedule alone",
        remedy="run `flowcorr doctor`, then `flowcorr audit`",
    ),
    "joint nats": Watched(
        metrics=(
            "rollout_corr/exact_kl",
            "rollout_corr/k3_kl",
        ),
        worry="weights at scale `sum`: at .1 they leave 82 % of the samples, at 1 only 14 %. Without weights a large "
        "gap need not do harm",
        remedy="recompute old log-probs, and close a large gap at its source: precision or staleness of the engine",
    ),
    "ess": Watched(
        metrics=("rollout_corr/rollout_is_eff_sample_size",),
    ),
    "d": Watched(
        metrics=("rollout/num_elements",),
        worry="a dump with a wrong num_elements misleads",
        remedy="compare it with channels x height x width of the latents, of a video also x latent frames",
    ),
    "auto": Watched(
        metrics=(
            "rollout_corr/bypass",
            "rollout_corr/noise_quantile",
            "rollout_corr/rejected_ratio",
        ),
        worry="the mode changes every few steps, or a measured band rejects many samples",
        remedy="fix the mode (`bypass_mode: false` is safe), and let `flowcorr doctor` look for what the band rejects",
    ),
    "bypass": Watched(
        metrics=("rollout_corr/clip_noise_fraction",),
    ),
    "decoupled": Watched(
        metrics=(
            "rollout_corr/kl",
            "timing/old_log_prob",
        ),
    ),
    "leg": Watched(
        metrics=tuple(
            f"rollout_corr/replay/{leg}" for leg in ("before", "between", "after", "decode", "reward")
        ),
        worry="one is beyond its limit: that part differs in both stacks, and no log-prob shows it",
        remedy="`flowcorr explain before`, and so on, says what to compare",
    ),
    "step_z": Watched(
        metrics=("rollout_corr/rejected_ratio",),
    ),
    "nf4": Watched(
        metrics=(
            "rollout_corr/clip_noise_fraction",
            "rollout_corr/replay/window",
        ),
        worry="in bypass mode, or where the adapter is served on the unquantized base",
        remedy="recompute old log-probs, sample in process, or take `int8`, which is .8 % away",
    ),
}
"""Of words that metrics measure; the others only name a thing."""

SYNONYMS: Mapping[str, str] = {
    "effective sample size": "ess",
    "nats": "joint nats",
    "gap": "joint nats",
    "legs": "leg",
    "|delta|": "delta",
    "clip": "clip range",
    "clip ratio": "clip range",
    "window": "sde window",
    "gaps": "joint nats",
    "kl": "exact kl",
    "k2": "k1",
    "k3": "k1",
    "is": "weights",
    "tis": "weights",
    "icepop": "weights",
    "importance weight": "weights",
    "cap": "weights",
    "rs": "rejection",
    "rejection sampling": "rejection",
    "threshold": "band",
    "mean-pooled": "log-prob",
    "stale": "staleness",
    "stale weights": "staleness",
    "drift": "delta",
    "mismatch": "joint nats",
    "lora scale": "adapter",
    "cfg": "guidance",
    "dumped steps": "dump",
    "heldout": "held out",
    "minibatch": "mini-batch",
    "microbatch": "micro-batch",
    "rollout policy": "rollout",
    "old policy": "old",
    "current policy": "current",
    "rollout engine": "engine",
    "training stack": "trainer",
    "lowest": "cosine",
    "samples": "rejected",
    "level": "token",
    "expected ess": "ess expected",
    "noise of the engine": "noise floor",
    "ppo": "clip range",
    "equality": "witness",
}
"""Other spellings."""


def find_word(name: str) -> str | None:
    """The word of this name, in any case, with blanks, `_` or `-` between its parts, in singular or plural."""
    for spelt in (_plain(name), _plain(name).removesuffix("s")):
        if (word := _SPELLINGS.get(spelt)) is not None:
            return word
    return None


def _plain(name: str) -> str:
    return " ".join(name.lower().replace("_", " ").replace("-", " ").split())


_SPELLINGS = {_plain(name): word for name, word in [*SYNONYMS.items(), *zip(WORDS, WORDS, strict=True)]}
