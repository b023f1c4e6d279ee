"""The rules of the audit at their edges."""

import math
import shlex
from dataclasses import replace
from types import SimpleNamespace

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from instruments.gaps import D

from flowcorr.config import Config, load, recipe_names
from flowcorr.config.schema import ActorConfig
from flowcorr.correction import RolloutCorrectionConfig
from flowcorr.health.finding import as_overrides
from flowcorr.health.setting import Setting, limit_at
from flowcorr.instruments.audit import advice as rules
from flowcorr.instruments.audit.advice import kind_of, mode_of
from flowcorr.instruments.audit.facts import NEGLIGIBLE_NATS, Facts
from flowcorr.rollout.precision import LARGEST_DISTANCE

SETTING = replace(
    Setting.of(Config()),
    actor=ActorConfig(clip_ratio=1e-3),
    window_end=2,
    correction=RolloutCorrectionConfig.bypass_pg_is(),  # which is never advised
)
FACTS = Facts(
    setting=SETTING,
    num_steps=2,
    num_elements=D,
    joint_nats=0.05,
    exact_ess=math.exp(-0.1),
    clip_by_step={0: 5e-4, 1: 2e-4},
    outliers=0.0,
    outlier_band=4e-3,
    recompute_share=0.1,
    older_weights=False,
)
WIDE = {0: 5e-3, 1: 2e-4}


def in_run(facts, *, actor=None, **changes):
    """The same numbers in another run."""
    setting = replace(facts.setting, **changes)
    return replace(facts, setting=replace(setting, actor=replace(setting.actor, **(actor or {}))))


def advise(facts):
    """The advice on facts, apart."""
    found, *others = rules.advise(facts)
    reasons = {other.cause: other.sentence for other in others}
    return SimpleNamespace(
        kind=kind_of(facts),
        mode=mode_of(facts),
        verdict=found.sentence,
        reasons=list(reasons.values()),
        yaml=found.keys,
        alternative=next((other.keys for other in others if other.keys), ""),
    )


def correction_of(advice):
    section = yaml.safe_load(advice.yaml)["algorithm"]["rollout_correction"]
    return RolloutCorrectionConfig.from_mapping(section)


def test_no_gap_needs_no_correction():
    advice = advise(replace(FACTS, joint_nats=NEGLIGIBLE_NATS, outliers=0.01))
    assert (advice.kind, advice.mode, advice.alternative) == ("none", "bypass", "")
    assert correction_of(advice) == RolloutCorrectionConfig.bypass_ppo_clip()
    assert advise(replace(FACTS, joint_nats=2 * NEGLIGIBLE_NATS)).kind == "leave"


def test_bypass_needs_headroom_in_the_clip_range():
    assert advise(FACTS).mode == "bypass"
    advice = advise(replace(FACTS, clip_by_step=WIDE))
    assert advice.mode == "decoupled"
    assert correction_of(advice) == RolloutCorrectionConfig.disabled()
    other = yaml.safe_load(advice.alternative)
    # A step whose noise fits keeps its range.
    assert other["actor"] == {"clip_ratio": [5e-3, 1e-3]}
    assert other["algorithm"]["rollout_correction"] == {"bypass_mode": True}


def test_a_quantized_trainer_is_named_as_the_source_and_bypass_is_left_to_each_runs_noise():
    facts = in_run(FACTS, quantization="nf4")
    advice = advise(facts)
    assert "bypass_mode: auto" in advice.yaml
    large = advise(replace(facts, joint_nats=1.1 * LARGEST_DISTANCE**2 * D, clip_by_step={0: 5e-3, 1: 5e-3}))
    assert large.kind == "repair"
    beside = ["model.quantization=nf4", "rollout.name=vllm_omni", "rollout.emulate=none"]
    for lines in (advice.yaml, large.yaml, large.alternative):
        load("tiny_ocr_lora", [*beside, *shlex.split(as_overrides(lines))])


@pytest.mark.parametrize(("needed", "offered"), [(0.99, True), (1.0, False), (4.0, False)])
def test_no_clip_range_that_holds_ratios_of_0_is_offered(needed, offered):
    alternative = advise(replace(FACTS, joint_nats=0.1 * D, clip_by_step={0: needed, 1: 1e-3})).alternative
    assert bool(alternative) == offered


LEVELS = {"step": "token_k1", "trajectory_mean": "seq_mean_k1", "trajectory_sum": "seq_sum_k1"}


@pytest.mark.parametrize(("level", "mode"), LEVELS.items())
@pytest.mark.parametrize("outliers", [0.0, 0.01])
def test_advice_loads_at_every_level_of_the_ratio(level, mode, outliers):
    facts = in_run(replace(FACTS, outliers=outliers), actor={"ratio_level": level})
    noisy = replace(facts, clip_by_step={0: 5e-3, 1: 5e-3})
    for lines in (advise(facts).yaml, advise(noisy).yaml, advise(noisy).alternative):
        load("tiny_ocr_lora", [f"actor.ratio_level={level}", *shlex.split(as_overrides(lines))])
    assert "bypass_mode: true" in advise(facts).yaml
    assert "bypass_mode: true" in advise(noisy).alternative
    assert (f"rollout_rs: {mode}" in advise(facts).yaml) == (outliers > 0)


def test_log_probs_that_are_no_densities_are_not_weighed():
    facts = replace(FACTS, stale_nats=0.05)
    assert advise(facts).kind == "correct"
    advice = advise(in_run(facts, densities=False))
    assert advice.kind == "leave"
    assert "log_ratio_scale" not in advice.yaml


@pytest.mark.parametrize(
    ("limit", "needed", "window_end", "pasted"),
    [
        (1e-3, {0: 5e-3, 1: 4e-3}, 2, 5e-3),  # alike, but for chance
        (1e-3, {0: 5e-3, 1: 2.2e-3}, 2, [5e-3, 2.2e-3]),
        (1e-3, {1: 5e-3, 2: 2.2e-3}, 4, [1e-3, 5e-3, 2.2e-3, 1e-3]),  # not sampled: as it was
        ((1e-3, 4e-3), {0: 5e-3, 1: 2e-3}, 2, [5e-3, 4e-3]),
        ((5e-3, 1e-3), {0: 5e-3, 1: 2e-3}, 2, [5e-3, 2e-3]),
    ],
)
def test_a_range_a_step_where_the_noise_differs(limit, needed, window_end, pasted):
    facts = in_run(replace(FACTS, clip_by_step=needed), actor={"clip_ratio": limit}, window_end=window_end)
    assert not facts.has_headroom
    lines = advise(facts).alternative
    assert yaml.safe_load(lines)["actor"] == {"clip_ratio": pasted}
    assert (": 0, 3\n" in lines) == (window_end == 4)  # the steps that were not measured


def test_bypass_is_not_advised_with_older_weights():
    fresh = replace(FACTS, joint_nats=1e-5, clip_by_step={0: 1e-6, 1: 1e-6})
    assert advise(fresh).mode == "bypass"
    advice = advise(replace(fresh, older_weights=True))
    assert (advice.mode, advice.alternative) == ("decoupled", "")


def test_ranges_are_rounded_up_to_two_digits():
    assert rules.round_up(0.00312) == 0.0032
    assert rules.round_up(0.003) == 0.003
    assert rules.round_up(0.0) == 0.0


@pytest.mark.parametrize("known", [None, True, False])
def test_weights_of_unknown_age_are_told_beside_bypass(known):
    causes = [one.cause for one in rules.advise(replace(FACTS, older_weights=known), of_recipe=False)]
    assert ("ages" in causes) == (known is None)


def test_only_staleness_is_corrected_and_only_by_density_ratios():
    stale = replace(FACTS, stale_nats=0.04)
    advice = advise(stale)
    assert (advice.kind, advice.mode) == ("correct", "decoupled")
    assert correction_of(advice) == RolloutCorrectionConfig.from_preset(
        "decoupled_seq_is", log_ratio_scale="sum"
    )
    assert advise(replace(stale, stale_nats=0.02)).kind == "leave"
    assert advise(replace(stale, exact_ess=rules.MIN_ESS)).kind == "correct"
    far = advise(replace(stale, exact_ess=0.99 * rules.MIN_ESS))
    assert far.kind == "repair"
    assert [key for key in ("rollout.max_staleness", "rollout.staleness") if key not in far.reasons[0]] == []


@pytest.mark.parametrize("num_elements", [D, 10**6])  # of an image, of a video
def test_a_random_gap_is_left_up_to_the_largest_that_a_precision_explains(num_elements):
    nats = LARGEST_DISTANCE**2 * FACTS.num_steps * num_elements / 2
    facts = replace(FACTS, num_elements=num_elements, joint_nats=0.99 * nats, clip_by_step=WIDE)
    assert (advise(facts).kind, advise(facts).mode) == ("leave", "decoupled")
    advice = advise(replace(facts, joint_nats=1.01 * nats))
    assert (advice.kind, advice.mode) == ("repair", "decoupled")


def test_outliers_are_rejected_as_the_mode_can():
    few = replace(FACTS, outliers=0.01)
    bypass = correction_of(advise(few))
    assert (bypass.bypass_mode, bypass.rollout_rs) == (True, "token_k1")
    assert bypass.rollout_rs_threshold == "auto"
    decoupled = correction_of(advise(replace(few, clip_by_step=WIDE)))
    assert (decoupled.rollout_rs, decoupled.rollout_rs_threshold) == ("step_z", 6.0)
    both = correction_of(advise(replace(few, stale_nats=0.05)))
    assert (both.rollout_rs, both.rollout_is) == ("step_z", "sequence")
    assert correction_of(advise(replace(FACTS, outliers=0.1))).rollout_rs is None


@pytest.mark.parametrize(
    ("width", "band"),
    [(4e-3, "[0.9960, 1.0040]"), (0.6, "[0.40, 1.60]"), (1.0, "[0.5, 2]"), (4e3, "[0.00025, 4e+03]")],
)
def test_a_band_has_two_digits_and_no_ratio_below_0(width, band):
    advice = advise(replace(FACTS, outlier_band=width))
    assert f"is {band}." in "\n".join(advice.reasons)


@pytest.mark.parametrize(
    ("loss_mode", "limit"),
    [("flow_grpo", 1e-3), ("grpo_guard", 1e-3), ("flow_dppo", None), ("importance_cap", 0.5)],
)
def test_what_bounds_the_ratio(loss_mode, limit):
    actor = {"loss_mode": loss_mode, "importance_cap": 1.5}
    facts = in_run(replace(FACTS, clip_by_step={0: 0.6}), actor=actor)
    assert facts.clip_limit == limit
    advice = advise(facts)
    assert advice.mode == "decoupled"
    if loss_mode == "importance_cap":
        assert yaml.safe_load(advice.alternative)["actor"] == {"importance_cap": 1.6}
    if limit is None:
        assert advice.alternative == ""


@pytest.mark.filterwarnings("ignore:.*has no effect")
@pytest.mark.parametrize("recipe", recipe_names())
@settings(max_examples=8)
@given(
    nats=st.sampled_from([1e-5, 1e-3, 0.05, 2.0]),
    stale_share=st.sampled_from([0.0, 0.9]),
    clip_in_ranges=st.lists(st.floats(0.0, 1e3), min_size=1, max_size=3),
    outliers=st.sampled_from([0.0, 0.01, 0.2]),
    older_weights=st.booleans(),
)
def test_advice_loads_on_top_of_the_recipe_that_it_is_for(
    recipe, nats, stale_share, clip_in_ranges, outliers, older_weights
):
    config = load(recipe)
    setting = replace(Setting.of(config), correction=SETTING.correction)
    limit = replace(FACTS, setting=setting).clip_limit
    steps = list(range(*config.sampling.sde_window_range))[: len(clip_in_ranges)]
    allowed = {step: limit_at(limit, step) if limit is not None else 1e-3 for step in steps}
    advice = advise(
        replace(
            FACTS,
            setting=setting,
            joint_nats=nats,
            exact_ess=math.exp(-2 * nats),
            stale_nats=stale_share * nats,
            clip_by_step={step: clip_in_ranges[i] * allowed[step] for i, step in enumerate(steps)},
            outliers=outliers,
            older_weights=older_weights,
        )
    )
    for lines in filter(None, (advice.yaml, advice.alternative)):
        loaded = load(recipe, shlex.split(as_overrides(lines)))
        expected = yaml.safe_load(lines)["algorithm"]["rollout_correction"]
        assert loaded.algorithm.rollout_correction == RolloutCorrectionConfig.from_mapping(expected)


def test_another_trainers_owner_gets_words_in_place_of_keys():
    found, *others = rules.advise(replace(FACTS, clip_by_step=WIDE), of_recipe=False)
    assert not any(one.keys for one in (found, *others))
    assert found.remedy == rules.WORDS[False, "decoupled"]


IN_TURN = {
    "negligible": {"joint_nats": 1e-4},
    "bypass": {},
    "decoupled": {"clip_by_step": WIDE},
    "outliers in bypass": {"outliers": 0.01},
    "outliers": {"clip_by_step": WIDE, "outliers": 0.01},
    "staleness": {"stale_nats": 0.04},
}
RUNS = {
    "a quantized trainer": {"quantization": "nf4"},
    "windows": {"actor": {"ratio_level": "trajectory_mean"}},
}


@pytest.mark.parametrize("name", [*IN_TURN, *RUNS])
def test_a_run_that_does_as_advised_is_told_to_change_nothing(name):
    facts = in_run(replace(FACTS, **IN_TURN.get(name, {})), **RUNS.get(name, {}))
    first = advise(facts)
    again = advise(in_run(facts, correction=correction_of(first)))
    assert (again.yaml, again.kind, again.mode) == ("", first.kind, first.mode)
    assert "change nothing" in again.verdict
    others = [
        RolloutCorrectionConfig.from_preset(preset) for preset in ("decoupled_token_is", "bypass_pg_geo_rs")
    ]
    for correction in others:
        assert advise(in_run(facts, correction=correction)) == first


def test_a_trainer_in_the_advised_mode_is_told_to_change_nothing():
    for clips, mode in ((FACTS.clip_by_step, "bypass"), (WIDE, "decoupled")):
        facts = replace(FACTS, clip_by_step=clips)
        for bypass in (False, True):
            running = in_run(facts, correction=RolloutCorrectionConfig(bypass_mode=bypass))
            first = rules.advise(running, of_recipe=False)[0]
            done = ("bypass" if bypass else "decoupled") == mode
            assert ("change nothing" in first.sentence, first.remedy) == (
                done,
                "" if done else rules.WORDS[False, mode],
            )


def test_a_gap_to_close_at_its_source_is_no_reason_to_change_nothing():
    facts = replace(FACTS, stale_nats=0.04, exact_ess=0.9 * rules.MIN_ESS, clip_by_step=WIDE)
    again = advise(in_run(facts, correction=correction_of(advise(facts))))
    assert (again.kind, again.yaml) == ("repair", "")
    assert "change nothing" not in again.verdict
