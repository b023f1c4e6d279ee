"""The rules: each fires outside its range, and says what to do."""

import pytest

from flowcorr.config import load
from flowcorr.health.rule import Units
from flowcorr.health.table import RULES
from flowcorr.questions.residual_terms import RESIDUALS
from tests.judging import examine_step

CAPPED = Units(
    config=load("tiny_ocr_lora"), cap=2.0, bypass=True, num_terms=2048, num_elements=1024, usual_gap=0.5
)
EQUAL = {"rollout_corr/logprob_abs_diff_mean": 0.0}  # both stacks have the same step means


CASES = {
    "mean_weight": ("rollout_corr/rollout_is_mean", [0.5, 1.0, 2.0], [0.49, 2.01]),
    "weight_std": ("rollout_corr/rollout_is_std", [0.0, 1.0], [1.01]),
    "effective_sample_size": ("rollout_corr/rollout_is_eff_sample_size", [0.3, 1.0], [0.29]),
    "cap": ("rollout_corr/rollout_is_raw_max", [1.0, 2.0], [2.1]),
    "kl": ("rollout_corr/kl", [-0.08, 0.0, 0.08], [-0.09, 0.09]),
    "veto": ("rollout_corr/rollout_is_veto_fraction", [0.0, 0.1], [0.11]),
    "catastrophic": ("rollout_corr/rollout_is_catastrophic_token_fraction", [0.01], [0.011]),
    "masked": ("rollout_corr/rollout_rs_masked_fraction", [0.3], [0.31]),
    "rejected": ("rollout_corr/rejected_ratio", [0.0, 0.05], [0.051, 0.2]),
    "clip_noise": ("rollout_corr/clip_noise_fraction", [0.1], [0.2]),
    "gap_nonfinite": ("rollout_corr/nonfinite_fraction", [0.0], [0.01, 0.5]),
    "bookkeeping": ("rollout_corr/bookkeeping_z_max", [0.0, 4.1, 6.0], [6.1, 900.0]),
    "no_update": ("actor/updates", [1.0, 8.0], [0.0]),
    "skipped": ("actor/skipped_updates", [0.0], [1.0]),
    "mostly_rejected": ("actor/mostly_rejected_updates", [0.0], [1.0]),
    "nonfinite": ("actor/nonfinite_fraction", [0.0], [0.01, 0.5]),
    "windows": ("rollout/other_windows", [0.0], [0.25]),
    "trajectories": ("rollout/broken_trajectories", [0.0], [0.01, 1.0]),
    "coarse_latents": ("rollout/coarse_latents", [0.0], [0.01]),
    "log_prob_error": ("rollout/log_prob_error", [0.0, 1e-5], [2e-5]),
    "std_error": ("rollout/std_error", [0.0, 1e-4], [2e-4]),
    "seeded_noise": ("rollout/noise_z_max", [0.0, 6.0], [6.1]),
    "noise_std": ("rollout/noise_std", [0.998, 1.0, 1.002], [0.99, 1.01]),
    "noise_mean": ("rollout/noise_mean", [-0.003, 0.003], [-0.005, 0.005]),
    "noise_tails": ("rollout/noise_tails", [-0.01, 0.01], [-0.05, 0.05]),
    "noise_shared": ("rollout/noise_shared_by", [0.9, 1.1], [2.0, 8.0]),
    "score_drift": ("rollout_corr/score_drift", [0.0, 0.01], [0.02]),
    "replay_window": ("rollout_corr/replay/window", [0.0, 0.5], [0.6]),
    "replay_before": ("rollout_corr/replay/before", [0.0, 4.0], [4.1]),
    "replay_between": ("rollout_corr/replay/between", [0.0, 4.0], [4.1]),
    "replay_after": ("rollout_corr/replay/after", [1.0, 4.0], [60.0]),
    "replay_decode": ("rollout_corr/replay/decode", [0.0, 0.17], [0.18, float("inf")]),
    "replay_reward": ("rollout_corr/replay/reward", [0.0, 0.1], [0.2]),
    "flat_groups": ("reward/zero_std_group_fraction", [0.5], [0.6]),
}


def rules(metrics, units=CAPPED):
    return [finding.cause for finding in examine_step(metrics, units)]


def test_every_rule_has_a_case():
    assert sorted([*CASES, *RESIDUALS]) == sorted(
        rule.name for rule in RULES
    )  # residuals have tests of their own


@pytest.mark.parametrize("rule", CASES)
def test_a_rule_fires_outside_its_range_only(rule):
    metric, healthy, broken = CASES[rule]
    assert [rules({**EQUAL, metric: value}) for value in healthy] == [[]] * len(healthy)
    assert [rules({**EQUAL, metric: value}) for value in broken] == [[rule]] * len(broken)


@pytest.mark.parametrize("rule", CASES)
def test_a_finding_tells_number_limit_and_advice(rule):
    metric, _, broken = CASES[rule]
    (finding,) = examine_step({**EQUAL, metric: broken[-1]}, CAPPED)
    assert finding.numbers["value"] == broken[-1] != finding.numbers["limit"]
    assert len(finding.remedy or finding.reason) > 40
    assert finding.numbers["metric"] == metric


def test_rejection_above_a_tenth_is_serious_and_asks_for_its_cause():
    levels = {}
    for value in (0.07, 0.12):
        (finding,) = examine_step({"rollout_corr/rejected_ratio": value}, Units())
        levels[value] = (finding.level, finding.numbers["limit"])
        assert finding.remedy.index("flowcorr doctor") < finding.remedy.index("widen rollout_rs_threshold")
    assert levels == {0.07: ("warning", 0.05), 0.12: ("serious", 0.1)}
