"""Audits of the embedded model."""

import math

import pytest
import yaml

from flowcorr.errors import ConfigError
from flowcorr.instruments.audit import advice as rules
from flowcorr.instruments.audit import audit, measure
from flowcorr.instruments.audit.facts import NEGLIGIBLE_NATS


class Built(Exception):
    """Ends an audit where its engine would be built."""


def kind_in(report):
    """The kind of the advice, by its level and its keys."""
    (found,) = [finding for finding in report.findings if finding.cause == "gap"]
    if "rollout_is" in found.keys:
        return "correct"
    return {level: kind for kind, level in rules.LEVELS.items() if kind != "correct"}[found.level]


@pytest.mark.parametrize(
    ("prompts", "n", "taken"), [(2, 4, 2), (32, 16, 6), (48, 24, 4), (8, 12, 8), (8, 90, 2)]
)
def test_an_audit_samples_no_more_than_it_needs(small, monkeypatch, prompts, n, taken):
    def build(config, _, texts):
        assert config.rollout.prompts_per_step == taken
        assert len(texts) == taken * measure.NUM_BATCHES
        raise Built

    monkeypatch.setattr(measure, "build_stacks", build)
    with pytest.raises(Built):
        audit(small(rollout={"prompts_per_step": prompts, "n": n}, actor={"mini_batches": 2}))


def test_one_model_for_both_needs_no_correction(shared):
    assert kind_in(shared) == "none"
    assert shared.fact("mode") == "bypass"
    assert shared.fact("joint_nats") < 1e-8
    assert shared.fact("outside_clip") == 0
    assert (shared.fact("num_samples"), shared.fact("num_steps"), shared.fact("num_elements")) == (16, 2, 128)
    assert [step["step_index"] for step in shared.table("steps")] == [0, 1]
    assert sum(step["num_terms"] for step in shared.table("steps")) == 32
    assert 0 < shared.fact("recompute_share") < 1


def test_what_a_step_would_not_learn_from_is_not_scored(small, shared):
    report = audit(small(rollout={"n": 4, "n_learned": 2}))
    assert report.fact("num_samples") == shared.fact("num_samples") // 2
    assert 0 < report.fact("recompute_share") < 1


def test_rounded_weights_change_the_advice(small, shared):
    report = audit(small(rollout={"prompts_per_step": 2, "n": 4, "emulate": "int4"}))
    assert kind_in(report) == "leave"
    assert report.fact("mode") == "decoupled"
    assert report.fact("precision_nats") == report.fact("joint_nats") > 1e3 * shared.fact("joint_nats")
    assert report.fact("outside_clip") > 0
    for step in report.table("steps"):
        assert 0 < step["abs_delta_50"] <= step["abs_delta_90"] <= step["abs_delta_99"]
        assert step["clip_needed"] == pytest.approx(4 * step["abs_delta_99"], rel=0.1)
    pasted = yaml.safe_load(report.findings[1].keys)["actor"]["clip_ratio"]
    assert len(pasted) == 2  # the second step is noisier by far
    assert pasted == [max(1e-3, rules.round_up(step["clip_needed"])) for step in report.table("steps")]
    wide = {"clip_ratio": tuple(pasted)}
    sections = {
        "rollout": {"prompts_per_step": 2, "n": 4, "emulate": "int4"},
        "actor": {"mini_batches": 1, **wide},
    }
    again = audit(small(**sections))
    assert again.fact("mode") == "bypass"
    assert again.fact("outside_clip") == 0
    assert [step["outside_clip"] for step in again.table("steps")] == [0, 0]


def test_steps_that_no_window_held_are_told(small, shared):
    assert "unmeasured" not in shared.causes("note")
    wide = {"num_inference_steps": 6, "sde_window_range": (1, 6), "sde_window_size": 2}
    report = audit(small(rollout={"prompts_per_step": 1, "n": 2}, sampling=wide), num_batches=1)
    (found,) = [finding for finding in report.findings if finding.cause == "unmeasured"]
    measured = [step["step_index"] for step in report.table("steps")]
    assert sorted([*measured, *found.numbers["steps"]]) == [1, 2, 3, 4, 5]


def test_one_ratio_a_window_has_one_range(small):
    actor = {"mini_batches": 1, "ratio_level": "trajectory_sum"}
    report = audit(
        small(rollout={"prompts_per_step": 2, "n": 4, "emulate": "int4"}, actor=actor),
        num_batches=1,
    )
    assert isinstance(yaml.safe_load(report.findings[1].keys)["actor"]["clip_ratio"], float)


def test_staleness_is_measured_after_something_was_learned(small):
    config = small(rollout={"prompts_per_step": 2, "n": 4, "staleness": 2})
    report = audit(config, num_batches=1)
    assert report.fact("precision_nats") < 1e-8
    assert report.fact("stale_nats") == pytest.approx(report.fact("joint_nats"), rel=1e-3)
    assert report.fact("joint_nats") > NEGLIGIBLE_NATS
    assert kind_in(report) == "correct"
    assert report.fact("num_samples") == 8


def test_the_engine_and_staleness_are_told_apart(small):
    rollout = {"prompts_per_step": 2, "n": 4}
    int4 = audit(small(rollout={**rollout, "emulate": "int4"}), num_batches=1)
    both = audit(small(rollout={**rollout, "emulate": "int4", "staleness": 1}), num_batches=1)
    assert int4.fact("stale_nats") == 0
    assert both.fact("precision_nats") == pytest.approx(
        int4.fact("precision_nats"), rel=0.5
    )  # other weights, other prompts
    assert NEGLIGIBLE_NATS < both.fact("stale_nats") < both.fact("precision_nats") / 2
    assert kind_in(both) == kind_in(int4)
    sides = [
        math.sqrt(nats)
        for nats in (both.fact("precision_nats"), both.fact("stale_nats"), both.fact("joint_nats"))
    ]
    assert max(sides) < sum(sides) - max(sides)  # distances of three policies


def test_batches_are_needed(small):
    with pytest.raises(ConfigError, match="^--batches 0 .* 1 "):
        audit(small(), num_batches=0)
