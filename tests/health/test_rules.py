"""Metrics are judged in the units of the configuration, over steps and over runs."""

import math
from dataclasses import replace

import pytest

from flowcorr.config import load, load_mapping
from flowcorr.health.rule import Units
from flowcorr.health.rules import HealthMonitor, examine_run, units_of, units_of_setting
from flowcorr.health.setting import Setting
from flowcorr.health.table import RULES
from flowcorr.questions.question import NATS
from flowcorr.rollout.precision import LARGEST_DISTANCE, MARGIN, ROUNDINGS
from tests.judging import examine_step

SIZE = {"rollout/num_elements": 512}
MOVED = {"rollout/velocity_distance": 0.8}
SECTION = "algorithm.rollout_correction"
CAPPED = Units(cap=2.0, bypass=True, num_terms=2048, num_elements=1024)


def causes(metrics, units=CAPPED):
    return [finding.cause for finding in examine_step(metrics, units)]


def test_what_was_not_measured_is_not_judged():
    assert causes({}) == []
    assert causes({"rollout_corr/kl": None}) == []


# The largest kl of clean runs of the recipe in 12 steps, nats an element: (examples/mismatch_study, r^2 / 2).
@pytest.mark.parametrize(
    ("emulate", "clean", "fault"), [("none", 1e-6, 1e-4), ("fp8", 1.5e-4, 1e-2), ("int4", 2e-3, 0.2)]
)
@pytest.mark.parametrize("scale", ["mean", "sum"])
def test_the_kl_is_judged_by_what_the_precision_explains(emulate, clean, fault, scale):
    section = f"{SECTION}={{preset: decoupled_seq_is, log_ratio_scale: {scale}}}"
    units = units_of(load("tiny_ocr_lora", [f"rollout.emulate={emulate}", section]), SIZE)
    assert causes({"rollout_corr/kl": clean, **MOVED}, units) == []
    assert causes({"rollout_corr/kl": fault, **MOVED}, units) == ["kl"]
    assert causes({"rollout_corr/kl": -fault, **MOVED}, units) == ["kl"]


def test_where_the_precision_is_not_known_or_weights_are_stale_any_precision_passes():
    config = load("tiny_ocr_lora", ["rollout.emulate=none"])
    known, foreign = (
        units_of(config, SIZE | MOVED),
        units_of_setting(Setting.of(config), 512, num_terms=192),
    )
    stale = units_of(load("tiny_ocr_lora", ["rollout.emulate=none", "rollout.staleness=2"]), SIZE)
    assert known.usual_distance < 1e-5
    for units in (foreign, stale, units_of(config, {})):
        assert units.usual_distance == LARGEST_DISTANCE
        assert causes({"rollout_corr/kl": 0.04}, units) == []
        assert causes({"rollout_corr/kl": 0.1}, units) == ["kl"]


def test_velocities_that_move_step_means_farther_explain_a_larger_kl():
    """The limit is that of each step's own velocities: a fiftieth of a velocity that moves a mean by 10 stds is .2."""
    units = units_of(load("tiny_ocr_lora", ["rollout.emulate=none", "rollout.dtype=bfloat16"]), SIZE)
    share = 0.02
    assert share < units.usual_gap
    for distance in (4.0, 10.0):
        kl = (share * distance) ** 2 / 2
        assert causes({"rollout_corr/kl": kl, "rollout/velocity_distance": distance}, units) == []
        assert causes({"rollout_corr/kl": kl, "rollout/velocity_distance": distance / 4}, units) == ["kl"]


def test_the_gap_that_precision_explains_is_the_one_that_the_run_logged():
    """A model with guidance as an input does not amplify rounding, which its configuration alone does not tell."""
    config = load("tiny_ocr_lora", ["rollout.dtype=bfloat16", "sampling.guidance_scale=3.5"])
    guided, distilled = (
        units_of(config, {**SIZE, **MOVED, **gap}) for gap in ({}, {"rollout/usual_gap": 0.034})
    )
    assert guided.usual_gap > 0.09
    assert causes({"rollout_corr/replay/window": 0.05}, guided) == []
    assert causes({"rollout_corr/replay/window": 0.05}, distilled) == ["replay_window"]
    assert distilled.usual_distance / guided.usual_distance == pytest.approx(0.034 / guided.usual_gap)
    rules = {rule.name: rule for rule in RULES}
    ratios = {
        name: rules[name].limits(distilled)[1] / rules[name].limits(guided)[1]
        for name in ("path_after", "image_error")
    }
    assert ratios == {"path_after": pytest.approx(0.034 / guided.usual_gap), "image_error": 1}


def test_units_of_a_configuration():
    units = units_of(load("tiny_ocr_lora", [f"{SECTION}.preset=decoupled_seq_is"]), SIZE)
    assert (units.cap, units.bypass) == (2.0, False)


def test_units_without_correction_and_without_one_cap():
    units = units_of(load("tiny_ocr_lora", [f"{SECTION}=null"]), SIZE)
    assert units == Units(
        config=units.config,
        num_terms=192,
        num_elements=512,
        usual_gap=MARGIN * ROUNDINGS["fp8"].plain,
    )
    assert units_of(load("tiny_ocr_lora", [f"{SECTION}.preset=decoupled_token_icepop"]), SIZE).cap == math.inf
    assert units_of(load("tiny_ocr_lora", [f"{SECTION}.preset=bypass_ppo_clip"]), SIZE).bypass


def test_weights_that_multiply_nothing_are_noted_only():
    shown = f"{SECTION}={{preset: null, bypass_mode: true, rollout_is: token, log_ratio_scale: sum}}"
    units = units_of(load("tiny_ocr_lora", [shown]), SIZE)
    assert (units.weighted, units.cap) == (False, math.inf)
    names = ("mean", "std", "max", "eff_sample_size")
    metrics = {
        f"actor/rollout_corr/rollout_is_{name}": value
        for name, value in zip(names, (3.0, 4.0, 2.0, 0.1), strict=True)
    }
    findings = examine_step(metrics, units)
    assert {finding.cause for finding in findings} == {"mean_weight", "weight_std", "effective_sample_size"}
    assert {finding.level for finding in findings} == {"note"}
    acting = examine_step(metrics, replace(units, weighted=True))
    assert "note" not in {finding.level for finding in acting}


def test_z_scores_of_log_probs_that_are_no_densities_are_not_judged():
    metrics = {"rollout_corr/bookkeeping_z_max": 7.0}
    assert [finding.cause for finding in examine_step(metrics, Units())] == ["bookkeeping"]
    assert examine_step(metrics, Units(densities=False)) == []


@pytest.mark.parametrize(("share", "level"), [(0.01, "warning"), (0.5, "serious")])
def test_terms_that_are_not_finite_are_told(share, level):
    (finding,) = examine_step({"actor/nonfinite_fraction": share}, Units())
    assert (finding.cause, finding.level) == ("nonfinite", level)
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
    units = units_of(load_mapping({"actor": actor, "algorithm": algorithm}), SIZE)
    metrics = {"rollout_corr/clip_noise_fraction": 0.9, "rollout_corr/logprob_abs_diff_mean": 4.7e-3}
    (finding,) = examine_step(metrics, units)
    assert finding.level == level
    numbers = finding.numbers
    assert (numbers["clip range"], numbers[f"mean |delta log p| ({NATS})"]) == (clip_range, 4.7e-3)


def test_what_acted_on_the_update_is_judged_where_it_is_logged():
    metrics = {"rollout_corr/rejected_ratio": 0.0, "actor/rollout_corr/rejected_ratio": 0.2}
    (finding,) = examine_step(metrics, Units())
    assert finding.numbers["metric"] == "actor/rollout_corr/rejected_ratio"
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
    told = [[finding.cause for finding in monitor.update(record)] for record in records]
    assert told == [[], [], [], [], [], [], ["flat_groups"], []]


def test_a_run_is_judged_by_its_worst_steps():
    kl = [0.0, 0.2, -0.5, 0.3]
    records = [{"step": 0, "eval/reward": 0.5}] + [
        {"step": step, "rollout_corr/kl": value, "rollout_corr/rejected_ratio": 0.2 * (step == 4)}
        for step, value in enumerate(kl, start=1)
    ]
    found = examine_run(records, Units())
    assert [
        (finding.cause, finding.level, finding.numbers["step"], finding.numbers["steps_broken"])
        for finding in found
    ] == [
        ("rejected", "serious", 4, 1),
        ("kl", "warning", 3, 3),
    ]


@pytest.mark.parametrize(
    ("metric", "values"),
    [("rollout_corr/rejected_ratio", (0.09, 0.12, 0.08)), ("actor/nonfinite_fraction", (0.09, 0.15, 0.01))],
)
def test_a_serious_step_is_worse_than_one_further_beyond_a_milder_limit(metric, values):
    records = [{"step": step, metric: value} for step, value in enumerate(values, 1)]
    (found,) = examine_run(records, Units())
    assert (found.level, found.numbers["step"], found.numbers["value"]) == ("serious", 2, values[1])
    assert (found.numbers["limit"], found.numbers["steps_broken"]) == (0.1, 3)
