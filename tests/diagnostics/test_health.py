"""Metrics are judged in the units of the configuration, over steps and over runs."""

import math
from dataclasses import replace

import pytest

from flowcorr.config import load, load_mapping
from flowcorr.diagnostics.health import (
    HealthMonitor,
    Units,
    examine_run,
    examine_step,
    healthy_range,
    units_of,
)
from flowcorr.rollout.precision import MARGIN, ROUNDINGS

SECTION = "algorithm.rollout_correction"
CAPPED = Units(cap=2.0, bypass=True, num_terms=2048, num_elements=1024)


def rules(metrics, units=CAPPED):
    return [finding.rule for finding in examine_step(metrics, units)]


def test_what_was_not_measured_is_not_judged():
    assert rules({}) == []
    assert rules({"rollout_corr/kl": None}) == []


def test_drift_is_judged_in_the_units_of_the_scale():
    metrics = {"rollout_corr/kl": 1e-3}
    assert rules(metrics, Units(scale="mean", factor=1.0)) == []
    (finding,) = examine_step(metrics, Units(scale="sum", factor=512.0))
    assert finding.value == pytest.approx(0.512)
    assert "log_ratio_scale sum" in finding.message
    assert healthy_range("rollout_corr/kl", Units(factor=512.0)) == pytest.approx((-0.1 / 512, 0.1 / 512))
    assert healthy_range("rollout_corr/rollout_is_mean", Units(factor=512.0)) == (0.5, 2.0)


@pytest.mark.parametrize("name", ["k3_kl", "ppl_ratio", "chi2_token", "chi2_seq"])
def test_what_is_not_linear_in_log_ratios_has_limits_at_scale_mean_only(name):
    low, high = healthy_range(f"rollout_corr/{name}", Units())
    assert math.isfinite(high)
    assert low < (1.0 if name == "ppl_ratio" else 0.0) < high
    for factor in (512.0, None):
        assert healthy_range(f"rollout_corr/{name}", Units(factor=factor)) == (-math.inf, math.inf)


@pytest.mark.parametrize(
    ("scale", "factor"), [("mean", 1.0), ("sqrt", 512**0.5), ("sum", 512.0), ("3.0", 3.0)]
)
def test_units_of_a_configuration(scale, factor):
    weighted = f"{SECTION}={{preset: decoupled_seq_is, log_ratio_scale: {scale}}}"
    units = units_of(load("tiny_ocr_lora", [weighted]), 512)
    assert (units.factor, units.cap, units.bypass) == (pytest.approx(factor), 2.0, False)


def test_drift_is_not_judged_in_units_that_are_not_known():
    units = units_of(
        load("tiny_ocr_lora", [f"{SECTION}={{preset: decoupled_seq_is, log_ratio_scale: sum}}"]), None
    )
    assert units.factor is None
    assert rules({"rollout_corr/kl": 9.0}, units) == []
    assert healthy_range("rollout_corr/kl", units) == (-math.inf, math.inf)


def test_units_without_correction_and_without_one_cap():
    assert units_of(load("tiny_ocr_lora", [f"{SECTION}=null"]), 512) == Units(
        num_terms=192, num_elements=512, usual_gap=MARGIN * ROUNDINGS["fp8"].plain
    )
    assert units_of(load("tiny_ocr_lora", [f"{SECTION}.preset=decoupled_token_icepop"]), 512).cap is None
    assert units_of(load("tiny_ocr_lora", [f"{SECTION}.preset=bypass_ppo_clip"]), 512).bypass


def test_weights_that_multiply_nothing_are_noted_only():
    shown = f"{SECTION}={{preset: null, bypass_mode: true, rollout_is: token, log_ratio_scale: sum}}"
    units = units_of(load("tiny_ocr_lora", [shown]), 512)
    assert (units.weighted, units.cap) == (False, None)
    names = ("mean", "std", "max", "eff_sample_size")
    metrics = {
        f"actor/rollout_corr/rollout_is_{name}": value
        for name, value in zip(names, (3.0, 4.0, 2.0, 0.1), strict=True)
    }
    findings = examine_step(metrics, units)
    assert {finding.rule for finding in findings} == {"mean_weight", "weight_std", "effective_sample_size"}
    assert {finding.level for finding in findings} == {"note"}
    assert all("these weights are only logged" in finding.advice for finding in findings)
    acting = examine_step(metrics, replace(units, weighted=True))
    assert "note" not in {finding.level for finding in acting}


def test_z_scores_of_log_probs_that_are_no_densities_are_not_judged():
    metrics = {"rollout_corr/bookkeeping_z_max": 7.0}
    assert [finding.rule for finding in examine_step(metrics, Units())] == ["bookkeeping"]
    assert examine_step(metrics, Units(densities=False)) == []


@pytest.mark.parametrize(("share", "level"), [(0.01, "warning"), (0.5, "serious")])
def test_terms_that_are_not_finite_are_told(share, level):
    (finding,) = examine_step({"actor/nonfinite_fraction": share}, Units())
    assert (finding.rule, finding.level) == ("nonfinite", level)
    assert examine_step({"actor/nonfinite_fraction": 0.0}, Units()) == []


def test_noise_beyond_the_clip_harms_bypass_only():
    metrics = {"rollout_corr/clip_noise_fraction": 0.9}
    assert examine_step(metrics, Units(bypass=True))[0].level == "warning"
    assert examine_step(metrics, Units(bypass=False))[0].level == "note"


@pytest.mark.parametrize(
    ("actor", "correction", "clip_range", "level"),
    [
        ({}, {}, "actor.clip_ratio=0.001", "warning"),
        ({"clip_ratio": [0.1, 0.2, 0.3, 0.4]}, {}, "actor.clip_ratio=[0.1, 0.2, 0.3, 0.4]", "warning"),
        ({"loss_mode": "importance_cap"}, {}, "actor.importance_cap=1.001", "warning"),
        ({}, {"loss_type": "reinforce"}, "actor.clip_ratio=0.001", "note"),
        ({}, {"bypass_mode": "auto"}, "actor.clip_ratio=0.001", "note"),  # it changes the mode by itself
    ],
)
def test_noise_beyond_the_clip_names_the_range_the_noise_and_what_to_do(actor, correction, clip_range, level):
    algorithm = {"rollout_correction": {"bypass_mode": True, **correction}}
    units = units_of(load_mapping({"actor": actor, "algorithm": algorithm}), 512)
    metrics = {"rollout_corr/clip_noise_fraction": 0.9, "rollout_corr/logprob_abs_diff_mean": 4.7e-3}
    (finding,) = examine_step(metrics, units)
    assert finding.level == level
    assert f": {clip_range}, and the noise, mean |delta log p|, is 0.0047" in finding.message
    assert (
        "`flowcorr audit`" if level == "warning" else "with reinforce, which does not clip"
    ) in finding.advice


def test_what_acted_on_the_update_is_judged_where_it_is_logged():
    metrics = {"rollout_corr/rejected_ratio": 0.0, "actor/rollout_corr/rejected_ratio": 0.2}
    (finding,) = examine_step(metrics, Units())
    assert finding.metric == "actor/rollout_corr/rejected_ratio"
    drift = {"rollout_corr/kl": 0.0, "actor/rollout_corr/kl": 1.0}  # the latter contains what was learned
    assert examine_step(drift, Units()) == []


def test_a_monitor_tells_once_and_again_when_it_gets_serious():
    monitor = HealthMonitor(Units())
    told = [
        [finding.level for finding in monitor.update({"rollout_corr/rejected_ratio": value})]
        for value in (0.0, 0.07, 0.08, 0.2, 0.2, 0.07)
    ]
    assert told == [[], ["warning"], [], ["serious"], [], []]


def test_a_monitor_does_not_tell_what_is_milder_than_what_it_told():
    monitor = HealthMonitor(Units())
    told = [len(monitor.update({"rollout_corr/rejected_ratio": value})) for value in (0.2, 0.07, 0.2)]
    assert told == [1, 0, 0]


def test_a_monitor_waits_where_a_single_step_may_be_chance():
    monitor = HealthMonitor(Units())
    shares = (0.9, 0.9, 0.1, 0.9, None, 0.9, 0.9, 0.9)
    records = [
        {"eval/reward": 1.0} if share is None else {"reward/zero_std_group_fraction": share}
        for share in shares
    ]
    told = [[finding.rule for finding in monitor.update(record)] for record in records]
    assert told == [[], [], [], [], [], [], ["flat_groups"], []]


def test_a_run_is_judged_by_its_worst_steps():
    kl = [0.0, 0.2, -0.5, 0.3]
    records = [{"step": 0, "eval/reward": 0.5}] + [
        {"step": step, "rollout_corr/kl": value, "rollout_corr/rejected_ratio": 0.2 * (step == 4)}
        for step, value in enumerate(kl, start=1)
    ]
    found = examine_run(records, Units())
    assert [(finding.rule, finding.level, finding.step, finding.num_steps) for finding in found] == [
        ("rejected", "serious", 4, 1),
        ("kl", "warning", 3, 3),
    ]
