"""The audit's numbers against their definitions, its rules at their edges, and the embedded model at work."""

import json
import math
import shlex
from dataclasses import replace

import pytest
import torch
import yaml

from flowcorr.config import load
from flowcorr.config.schema import ActorConfig
from flowcorr.correction import PRESETS, RolloutCorrectionConfig
from flowcorr.diagnostics import audit_advice as rules
from flowcorr.diagnostics import audit_page
from flowcorr.diagnostics.audit import Cost, Gap, _outliers, _presets, _scales, audit, score
from flowcorr.diagnostics.audit_advice import Facts, advise, as_overrides
from flowcorr.diagnostics.report import ratio_distance
from flowcorr.errors import BackendError, ConfigError

SHORT = {"num_inference_steps": 3, "sde_window_range": (0, 2)}
D = 512


def small(make_config, **sections):
    data = {"path": "tiny_words", "num_train": 8}
    return make_config(**{"sampling": SHORT, "data": data, **sections})


def normal_gap(r, *, samples=4096, num_elements=D):
    """A gap of random direction and size `r` at two steps, as the model of the log-ratio has it."""
    draw = torch.Generator().manual_seed(0)
    noise = torch.randn((samples, 2), generator=draw, dtype=torch.float64)
    return Gap(
        log_probs=-(r**2) / 2 + r / math.sqrt(num_elements) * noise,
        rollout_log_probs=torch.zeros_like(noise),
        step_kl=torch.full_like(noise, r**2 / 2),
        stds=torch.full_like(noise, 0.5),
        sigmas=torch.tensor([[1.0, 0.9]]).expand(samples, 2),
        step_indices=torch.tensor([[0, 1]]).expand(samples, 2),
    )


FACTS = Facts(
    num_steps=2,
    num_elements=D,
    joint_nats=0.05,
    exact_ess=math.exp(-0.1),
    stale_nats=0.0,
    clip_limit=1e-3,
    clip_by_step={0: 5e-4, 1: 2e-4},
    window_end=2,
    loss_mode="flow_grpo",
    ratio_level="step",
    unscaled=False,
    outliers=0.0,
    outlier_band=4e-3,
    recompute_share=0.1,
)
WIDE = {0: 5e-3, 1: 2e-4}


def correction_of(advice):
    section = yaml.safe_load(advice.yaml)["algorithm"]["rollout_correction"]
    return RolloutCorrectionConfig.from_mapping(section)


# Numbers -------------------------------------------------------------------------------------------------


def test_scales_agree_with_the_exact_kl():
    gap = normal_gap(0.01)
    joint = gap.joint_nats(D)
    assert joint == pytest.approx(2 * D * 0.01**2 / 2)
    worth = {(row.scale, row.level): row for row in _scales(gap, D)}
    assert worth["sum", "sequence"].expected_ess == pytest.approx(math.exp(-2 * D * 0.01**2))
    assert worth["sum", "token"].expected_ess == pytest.approx(math.exp(-D * 0.01**2))
    assert worth["sqrt", "sequence"].expected_ess == pytest.approx(math.exp(-2 * 0.01**2))
    for row in worth.values():
        assert row.ess == pytest.approx(row.expected_ess, rel=0.02)
    # A density ratio's chi-squared is exp(x) - 1; `mean` makes of it next to nothing.
    assert worth["sum", "sequence"].chi2 == pytest.approx(math.expm1(2 * D * 0.01**2), rel=0.15)
    assert abs(worth["mean", "sequence"].chi2) < 1e-3


def test_a_share_is_expected_of_all_gaps_not_of_the_mean_one():
    """A third of the samples with nine times the KL: few weights carry all, though the mean gap is moderate."""
    small, large = normal_gap(0.02, samples=2 * 200_000), normal_gap(0.06, samples=200_000)
    gap, share = Gap.concatenate([small, large]), {}
    for row in _scales(gap, D):
        share[row.scale, row.level] = row.expected_ess
        if row.scale != "sum":  # whose measured share has too heavy tails
            assert row.ess == pytest.approx(row.expected_ess, rel=1e-3)
    squares = [D * 0.02**2, D * 0.06**2]
    exact = 3 / (2 * math.exp(squares[0]) + math.exp(squares[1]))
    assert share["sum", "token"] == pytest.approx(exact)
    assert share["sum", "sequence"] == pytest.approx(
        3 / (2 * math.exp(2 * squares[0]) + math.exp(2 * squares[1]))
    )
    assert share["sum", "sequence"] < math.exp(-2 * gap.joint_nats(D)) / 3


def test_weights_that_overflow_have_no_chi2():
    gap = normal_gap(0.01)
    gap = replace(gap, log_probs=torch.full((4096, 2), 1.0), step_kl=torch.full_like(gap.step_kl, 1e3))
    last = _scales(gap, D)[-1]
    assert (last.scale, last.chi2, last.ess, last.expected_ess) == ("sum", None, pytest.approx(1.0), 0.0)


def test_every_preset_has_an_outcome():
    outcomes = _presets(normal_gap(0.03), D, 10)
    names = [name for outcome in outcomes for name in (outcome.name, *outcome.aliases)]
    assert sorted(names) == sorted(PRESETS)
    found = {outcome.name: outcome for outcome in outcomes}
    delta = normal_gap(0.03).delta
    band = (math.log(0.999), math.log(1.001))
    outside = (delta.mean(1) < band[0]) | (delta.mean(1) > band[1])
    assert found["decoupled_geo_rs"].rejected_samples == float(outside.double().mean()) > 0
    alone = (delta < band[0]) | (delta > band[1])
    assert found["bypass_ppo_clip_geo_rs"].rejected_terms == float(alone.double().mean())
    assert found["bypass_ppo_clip_geo_rs"].mean_weight is None
    assert found["decoupled_seq_is"].ess == pytest.approx(1, abs=1e-4)
    assert found["disabled"].rejected_samples == 0


def test_outliers_stand_out_of_the_noise():
    gap = normal_gap(0.03)
    share, band = _outliers(gap, D)
    assert share == 0
    assert band > float(gap.delta.expm1().abs().max())
    gap.log_probs[:40, 0] = 0.05
    share, spared = _outliers(gap, D)
    assert share == pytest.approx(40 / gap.delta.numel())
    assert spared == pytest.approx(band, rel=0.05)


def distance_of(gap, actor):
    return ratio_distance(gap.delta, gap.step_kl, gap.stds, gap.step_indices, actor)


@pytest.mark.parametrize(
    ("actor", "expected"),
    [
        ({}, [[0.2, 0.1]]),
        ({"loss_mode": "grpo_guard"}, [[0.15, 0.1]]),
        ({"ratio_level": "trajectory_mean"}, [[0.05, 0.05]]),
        ({"ratio_level": "trajectory_sum"}, [[0.1, 0.1]]),
    ],
)
def test_distance_is_of_the_ratio_that_the_loss_uses(actor, expected):
    steps = torch.tensor([[0.2, -0.1]], dtype=torch.float64)
    gap = Gap(
        log_probs=steps,
        rollout_log_probs=torch.zeros_like(steps),
        step_kl=torch.tensor([[0.1, 0.3]], dtype=torch.float64),
        stds=torch.full((1, 2), 0.5),
        sigmas=torch.ones(1, 2),
        step_indices=torch.tensor([[0, 1]]),
    )
    sign = torch.tensor([[1.0, 1.0 if actor else -1.0]], dtype=torch.float64)
    log_ratio = sign * torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(distance_of(gap, ActorConfig(**actor)), log_ratio.expm1().abs())


@pytest.mark.parametrize("loss_mode", ["flow_grpo", "grpo_guard", "importance_cap"])
def test_distance_is_from_the_centre_that_the_loss_takes_off(loss_mode):
    gap, plain = normal_gap(0.03), ActorConfig(loss_mode=loss_mode)
    gap.log_probs[:, 1] += 0.01
    distance = distance_of(gap, replace(plain, clip_center="drift"))
    if loss_mode == "importance_cap":
        assert torch.equal(distance, distance_of(gap, plain))
        return
    exponent = gap.delta + (gap.step_kl if loss_mode == "grpo_guard" else 0.0)
    exponent = (exponent - exponent.mean(0)) * (gap.stds if loss_mode == "grpo_guard" else 1.0)
    torch.testing.assert_close(distance, exponent.expm1().abs(), rtol=1e-4, atol=1e-7)


def test_cost_is_a_share_of_the_step():
    assert Cost(rollout=3.0, recompute=1.0, update=4.0).share == 0.125


# Rules ---------------------------------------------------------------------------------------------------


def test_no_gap_needs_no_correction():
    advice = advise(replace(FACTS, joint_nats=rules.NEGLIGIBLE_NATS, outliers=0.01))
    assert (advice.kind, advice.mode, advice.alternative) == ("none", "bypass", "")
    assert advice.verdict.startswith("no correction needed")
    assert correction_of(advice) == RolloutCorrectionConfig.bypass_ppo_clip()
    assert advise(replace(FACTS, joint_nats=2 * rules.NEGLIGIBLE_NATS)).kind == "leave"


def test_bypass_needs_headroom_in_the_clip_range():
    assert advise(FACTS).mode == "bypass"
    advice = advise(replace(FACTS, clip_by_step=WIDE))
    assert advice.mode == "decoupled"
    assert correction_of(advice) == RolloutCorrectionConfig.disabled()
    other = yaml.safe_load(advice.alternative)
    # A step whose noise fits keeps its range.
    assert other["actor"] == {"clip_ratio": [5e-3, 1e-3]}
    assert other["algorithm"]["rollout_correction"] == {"bypass_mode": True}


@pytest.mark.parametrize("level", ["step", "trajectory_mean", "trajectory_sum"])
@pytest.mark.parametrize("outliers", [0.0, 0.01])
def test_advice_loads_at_every_level_of_the_ratio(level, outliers):
    facts = replace(FACTS, ratio_level=level, outliers=outliers)
    noisy = replace(facts, clip_by_step={0: 5e-3, 1: 5e-3})
    for lines in (advise(facts).yaml, advise(noisy).yaml, advise(noisy).alternative):
        load("tiny_ocr_lora", [f"actor.ratio_level={level}", *shlex.split(as_overrides(lines))])
    assert "bypass_mode: true" in advise(facts).yaml
    assert "bypass_mode: true" in advise(noisy).alternative


def test_log_probs_that_are_no_densities_are_not_weighed():
    facts = replace(FACTS, stale_nats=0.05)
    assert advise(facts).kind == "correct"
    advice = advise(replace(facts, unscaled=True))
    assert advice.kind == "leave"
    assert "log_ratio_scale" not in advice.yaml
    assert any("with sampling.cps_unscaled differences" in reason for reason in advice.reasons)


@pytest.mark.parametrize(
    ("limit", "needed", "window_end", "pasted"),
    [
        (1e-3, {0: 5e-3, 1: 4e-3}, 2, 5e-3),  # alike, but for chance
        (1e-3, {0: 5e-3, 1: 2.2e-3}, 2, [5e-3, 2.2e-3]),
        (1e-3, {1: 5e-3, 2: 2.2e-3}, 4, [5e-3, 5e-3, 2.2e-3, 5e-3]),  # not sampled: as the noisiest
        ((1e-3, 4e-3), {0: 5e-3, 1: 2e-3}, 2, [5e-3, 4e-3]),
        ((5e-3, 1e-3), {0: 5e-3, 1: 2e-3}, 2, [5e-3, 2e-3]),
    ],
)
def test_a_range_a_step_where_the_noise_differs(limit, needed, window_end, pasted):
    facts = replace(FACTS, clip_limit=limit, clip_by_step=needed, window_end=window_end)
    assert not facts.has_headroom
    assert yaml.safe_load(advise(facts).alternative)["actor"] == {"clip_ratio": pasted}


def test_headroom_is_judged_step_by_step():
    needed = {0: 5e-3, 1: 2e-3}
    assert replace(FACTS, clip_limit=(5e-3, 2e-3), clip_by_step=needed).has_headroom
    assert not replace(FACTS, clip_limit=(1e-2, 1.9e-3), clip_by_step=needed).has_headroom
    reasons = " ".join(advise(replace(FACTS, clip_limit=(1e-2, 1.9e-3), clip_by_step=needed)).reasons)
    assert "above the range of [0.01, 0.0019]" in reasons


def test_clip_range_is_four_times_the_noise():
    distance = torch.linspace(0, 1, 101, dtype=torch.float64)
    assert rules.clip_needed(distance) == pytest.approx(4 * 0.99)
    assert rules.round_up(0.00312) == 0.0032
    assert rules.round_up(0.003) == 0.003
    assert rules.round_up(0.0) == 0.0


def test_only_staleness_is_corrected_and_only_by_density_ratios():
    stale = replace(FACTS, stale_nats=0.04)
    advice = advise(stale)
    assert (advice.kind, advice.mode) == ("correct", "decoupled")
    assert correction_of(advice) == RolloutCorrectionConfig.from_preset(
        "decoupled_seq_is", log_ratio_scale="sum"
    )
    assert advise(replace(stale, stale_nats=0.02)).kind == "leave"
    assert advise(replace(stale, exact_ess=rules.MIN_ESS)).kind == "correct"
    assert advise(replace(stale, exact_ess=0.99 * rules.MIN_ESS)).kind == "repair"


def test_a_large_gap_is_to_be_closed():
    nats = rules.LARGE_R**2 * FACTS.num_steps * D / 2
    assert advise(replace(FACTS, joint_nats=0.99 * nats)).kind == "leave"
    advice = advise(replace(FACTS, joint_nats=1.01 * nats))
    assert advice.kind == "repair"
    assert "flowcorr doctor" in " ".join(advice.reasons)


def test_outliers_are_rejected_as_the_mode_can():
    few = replace(FACTS, outliers=0.01)
    bypass = correction_of(advise(few))
    assert (bypass.bypass_mode, bypass.rollout_rs) == (True, "token_k1")
    assert bypass.rollout_rs_threshold == pytest.approx((1 / 1.004, 1.004), rel=1e-8)
    decoupled = correction_of(advise(replace(few, clip_by_step=WIDE)))
    assert (decoupled.rollout_rs, decoupled.rollout_rs_threshold) == ("step_z", 6.0)
    both = correction_of(advise(replace(few, stale_nats=0.05)))
    assert (both.rollout_rs, both.rollout_is) == ("step_z", "sequence")
    assert correction_of(advise(replace(FACTS, outliers=0.1))).rollout_rs is None


@pytest.mark.parametrize(
    ("loss_mode", "limit"),
    [("flow_grpo", 1e-3), ("grpo_guard", 1e-3), ("flow_dppo", None), ("importance_cap", 0.5)],
)
def test_what_bounds_the_ratio(loss_mode, limit):
    actor = ActorConfig(loss_mode=loss_mode, importance_cap=1.5)
    assert rules.clip_limit(actor) == limit
    advice = advise(replace(FACTS, loss_mode=loss_mode, clip_limit=limit, clip_by_step={0: 0.6}))
    assert advice.mode == "decoupled"
    if loss_mode == "importance_cap":
        assert yaml.safe_load(advice.alternative)["actor"] == {"importance_cap": 1.6}
    if limit is None:
        assert advice.alternative == ""
        assert "bounds no ratio" in " ".join(advice.reasons)
        assert "is to be corrected" not in " ".join(advice.reasons)  # it is to be left as it is


# The embedded model --------------------------------------------------------------------------------------


@pytest.fixture
def shared(make_config):
    return audit(small(make_config))


def test_one_model_for_both_needs_no_correction(shared):
    assert shared.advice.kind == "none"
    assert shared.advice.mode == "bypass"
    assert shared.joint_nats < 1e-8
    assert shared.outside_clip == 0
    assert (shared.num_samples, shared.num_steps, shared.num_elements) == (16, 2, D)
    assert [step.step_index for step in shared.steps] == [0, 1]
    assert sum(step.num_terms for step in shared.steps) == 32
    assert 0 < shared.cost.share < 1


def test_rounded_weights_change_the_advice(make_config, shared):
    report = audit(small(make_config, rollout={"prompts_per_step": 2, "n": 4, "emulate": "int4"}))
    assert report.advice.kind in ("leave", "repair")
    assert report.advice.mode == "decoupled"
    assert report.precision_nats == report.joint_nats > 1e3 * shared.joint_nats
    assert report.outside_clip > 0
    for step in report.steps:
        assert 0 < step.abs_delta[0] <= step.abs_delta[1] <= step.abs_delta[2]
        assert step.clip_needed == pytest.approx(4 * step.abs_delta[2], rel=0.1)
    pasted = yaml.safe_load(report.advice.alternative)["actor"]["clip_ratio"]
    assert len(pasted) == 2  # the second step is noisier by far
    assert pasted == [max(1e-3, rules.round_up(step.clip_needed)) for step in report.steps]
    wide = {"clip_ratio": tuple(pasted)}
    sections = {
        "rollout": {"prompts_per_step": 2, "n": 4, "emulate": "int4"},
        "actor": {"mini_batches": 1, **wide},
    }
    again = audit(small(make_config, **sections))
    assert again.advice.mode == "bypass"
    assert again.outside_clip == 0
    assert [step.outside_clip for step in again.steps] == [0, 0]


def test_one_ratio_a_window_has_one_range(make_config):
    actor = {"mini_batches": 1, "ratio_level": "trajectory_sum"}
    report = audit(
        small(make_config, rollout={"prompts_per_step": 2, "n": 4, "emulate": "int4"}, actor=actor),
        num_batches=1,
    )
    assert isinstance(yaml.safe_load(report.advice.alternative)["actor"]["clip_ratio"], float)


def test_staleness_is_measured_after_something_was_learned(make_config):
    config = small(make_config, rollout={"prompts_per_step": 2, "n": 4, "staleness": 2})
    report = audit(config, num_batches=1)
    assert report.precision_nats < 1e-8
    assert report.stale_nats == pytest.approx(report.joint_nats, rel=1e-3)
    assert report.joint_nats > rules.NEGLIGIBLE_NATS
    assert report.advice.kind == "correct"
    assert report.num_samples == 8


def test_the_engine_and_staleness_are_told_apart(make_config):
    rollout = {"prompts_per_step": 2, "n": 4}
    int4 = audit(small(make_config, rollout={**rollout, "emulate": "int4"}), num_batches=1)
    both = audit(small(make_config, rollout={**rollout, "emulate": "int4", "staleness": 1}), num_batches=1)
    assert int4.stale_nats == 0
    assert both.precision_nats == pytest.approx(int4.precision_nats, rel=0.5)  # other weights, other prompts
    assert rules.NEGLIGIBLE_NATS < both.stale_nats < both.precision_nats / 2
    assert both.advice.kind == int4.advice.kind == "repair"
    sides = [math.sqrt(nats) for nats in (both.precision_nats, both.stale_nats, both.joint_nats)]
    assert max(sides) < sum(sides) - max(sides)  # distances of three policies


def test_batches_are_needed(make_config):
    with pytest.raises(ConfigError, match="--batches 0 measures nothing"):
        audit(make_config(), num_batches=0)


def test_unusable_rollouts(make_run):
    run = make_run(sampling=SHORT)
    with pytest.raises(BackendError, match="returns no step means"):
        score(run.actor, run.sample(with_means=False))
    rollout = run.sample()
    rollout.log_probs[0, 0] = math.nan
    with pytest.raises(BackendError, match="not finite"):
        score(run.actor, rollout)


def test_the_page_stands_alone(shared, tmp_path):
    pytest.importorskip("matplotlib")
    files = audit_page.save(shared, tmp_path / "new", title="a <recipe>")
    assert [file.name for file in files] == ["audit.json", "audit.html", "audit.png"]
    page = files[1].read_text(encoding="utf-8")
    assert "Audit of a &lt;recipe&gt;" in page
    assert json.loads(files[0].read_text(encoding="utf-8"))["recipe"] == "a <recipe>"
    assert rules.BASIS in page
    assert "no correction needed" in page
    assert "data:image/png;base64," in page
    for foreign in ("http:", "https:", "<script", "<link", "@import"):
        assert foreign not in page
    assert all(name in page for name in PRESETS)


def test_a_folder_that_cannot_be_made(shared, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BackendError, match="give another --out DIR"):
        audit_page.save(shared, tmp_path / "file", title="recipe")
