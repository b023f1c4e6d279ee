"""Training steps of simulated runs, in which one metric after another leaves its healthy values."""

import math
import random
from collections import defaultdict
from statistics import fmean

from flowcorr.config import load
from flowcorr.health.finding import Finding
from flowcorr.health.rules import HealthMonitor, examine_run, units_of, units_of_setting
from flowcorr.health.setting import Setting

STEPS = 500
SECTION = "algorithm.rollout_correction"
RUNS = {
    "float32": ["rollout.emulate=none"],
    "fp8, seq_is": [f"{SECTION}.preset=decoupled_seq_is"],
    "int4, stale": ["rollout.emulate=int4", "rollout.staleness=2", f"{SECTION}.preset=decoupled_token_is"],
    "bypass": [f"{SECTION}.preset=bypass_ppo_clip"],
    "bypass, bands": [f"{SECTION}.preset=bypass_ppo_clip_auto_rs", "actor.mini_batches=2"],
    "reinforce": [f"{SECTION}.preset=bypass_pg_is"],
    "weights only logged": [
        f"{SECTION}={{preset: null, bypass_mode: true, rollout_is: token, log_ratio_scale: sum}}"
    ],
    "capped": ["actor.loss_mode=importance_cap", f"{SECTION}={{preset: null, bypass_mode: true}}"],
    "no densities": ["sampling.sde_type=cps", "sampling.cps_unscaled=true"],
    "no correction": [f"{SECTION}=null"],
    "bfloat16, guidance": ["rollout.dtype=bfloat16", "rollout.emulate=none", "sampling.guidance_scale=3.5"],
    "another trainer's": [],
}
"""Overrides of the tiny recipe."""

USUAL = {
    "rollout_corr/kl": 1e-6,
    "rollout_corr/logprob_abs_diff_mean": 1e-4,
    "rollout_corr/step_1/logprob_abs_diff": 1e-4,
    "rollout_corr/exact_kl": 1e-6,
    "rollout_corr/replay/window": 1e-4,
    "rollout_corr/worker_0/relative_gap": 1.0,
    "rollout_corr/worker_1/relative_gap": 1.0,
    "rollout_corr/worker_2/relative_gap": 1.0,
    "reward/mean": 0.5,
    "reward/image/dark": 0.4,
    "reward/image/sharpness": 0.08,
    "reward/image/diversity": 0.05,
}
"""Metrics that are logged in every step, with values that vary by a fifth."""

RARE = (
    *(f"rollout_corr/rollout_is_{name}" for name in ("mean", "std", "raw_max", "eff_sample_size")),
    *(f"actor/rollout_corr/rollout_is_{name}" for name in ("mean", "raw_max", "eff_sample_size")),
    *(
        f"rollout_corr/{name}"
        for name in ("rollout_rs_masked_fraction", "rejected_ratio", "nonfinite_fraction")
    ),
    *(f"actor/rollout_corr/{name}" for name in ("rejected_ratio", "rollout_rs_masked_fraction")),
    *(f"rollout_corr/{name}" for name in ("rollout_is_veto_fraction", "clip_noise_fraction")),
    "rollout_corr/rollout_is_catastrophic_token_fraction",
    "rollout_corr/bookkeeping_z_max",
    *(f"rollout_corr/replay/{name}" for name in ("before", "between", "after", "window", "decode", "reward")),
    *(f"rollout_corr/residual/{name}" for name in ("step_noise", "step_noise_rounding", "velocity_length")),
    *(f"rollout_corr/residual/{name}" for name in ("velocity_common", "path_before", "path_after")),
    *(f"rollout_corr/residual/image_{name}" for name in ("error", "level", "contrast", "detail", "channels")),
    *(f"actor/{name}" for name in ("skipped_updates", "mostly_rejected_updates", "nonfinite_fraction")),
    *(f"rollout/{name}" for name in ("other_windows", "broken_trajectories", "coarse_latents")),
    *(f"rollout/{name}" for name in ("log_prob_error", "std_error", "noise_z_max")),
    *(f"rollout/noise_{name}" for name in ("std", "mean", "tails", "shared_by")),
    "reward/zero_std_group_fraction",
    "rollout_corr/kl",
    "rollout_corr/logprob_abs_diff_mean",
    "rollout_corr/step_1/logprob_abs_diff",
    "rollout_corr/exact_kl",
    "rollout_corr/worker_1/relative_gap",
    "reward/mean",
    "reward/image/dark",
    "reward/image/sharpness",
)
"""Metrics that have other values in some steps, and stay there for a few."""

SIGNED = ("rollout_corr/kl", "rollout/noise_mean", "rollout/noise_tails")
AROUND_ONE = ("rollout/noise_std", "rollout/noise_shared_by", "rollout_corr/rollout_is_mean")
ODD = (None, math.inf, 1e300)
SUMMED = Finding(level="serious", cause="summed", sentence="sums")


def simulated_steps():
    """By rule: how often it is told in all runs, and the means of the steps, values and limits that are told."""
    told = defaultdict(list)
    for name in RUNS:
        units, records = _units(name), list(_records(name))
        monitor = HealthMonitor(units, places={1: "host a"})
        for record in records:
            for finding in monitor.update(record, [SUMMED] if record["step"] % 97 == 0 else []):
                told[f"{finding.level} {finding.cause}"].append({"step": record["step"], **finding.numbers})
        for begin in range(0, STEPS, 20):
            for finding in examine_run(records[begin : begin + 20], units):
                told[f"in 20 steps, {finding.level} {finding.cause}"].append(finding.numbers)
    return {rule: _means(findings) for rule, findings in told.items()}


def _means(findings):
    """Number of findings, and the means of their numbers; of values and limits those of their logarithms."""
    means = {"count": len(findings), "step": fmean(numbers["step"] for numbers in findings)}
    for name in ("value", "limit", "steps_broken"):
        values = [numbers[name] for numbers in findings if name in numbers]
        if values:
            means[name] = fmean(math.asinh(1e6 * min(value, 1e6)) for value in values)
    return means


def _units(name):
    config, logged = load("tiny_ocr_lora", RUNS[name]), {"rollout/num_elements": 512.0}
    if name == "another trainer's":
        return units_of_setting(Setting.of(config), 512, num_terms=192)
    return units_of(config, logged)


def _records(name):
    draw = random.Random(name)
    changed = {}
    for step in range(1, STEPS + 1):
        if draw.random() < 0.3:
            metric = draw.choice(RARE)
            changed[metric] = (step + draw.choice((0, 0, 1, 3, 8)), _value(metric, draw))
        changed = {metric: change for metric, change in changed.items() if change[0] >= step}
        usual = {metric: value * draw.lognormvariate(0.0, 0.2) for metric, value in USUAL.items()}
        values = {metric: value for metric, (_, value) in changed.items()}
        yield {"step": step, "rollout/staleness_max": float(step % 7 == 0), **usual, **values}


def _value(metric, draw):
    if draw.random() < 0.05:
        return draw.choice(ODD)
    size = 10 ** draw.uniform(-6, 2)
    sign = draw.choice((-1, 1))
    if metric in AROUND_ONE:
        return max(0.0, 1 + sign * size)
    return sign * size if metric in SIGNED else size
