"""The gate stops a run at what only a fault explains, and at nothing else."""

import math

import pytest

from flowcorr.config import load
from flowcorr.errors import RolloutFault
from flowcorr.health.gate import Gate
from flowcorr.health.table import RULES, rows_of
from flowcorr.metrics import Metrics, maximum

SIZE = {"rollout/num_elements": 512, "rollout/usual_gap": 1e-3, "rollout/velocity_distance": 0.8}
USUAL_KL = (
    (1e-3 * 0.8) ** 2 / 2 + 6 * 1e-3 * 0.8 / math.sqrt(512 * 192) + 1e-5
)  # as `_usual_kl` says, 96 x 2 terms


def gate(*overrides):
    config = load("tiny_ocr_lora", ["sampling.sde_window_size=2", "rollout.n=12", *overrides])
    return Gate(config, rows_of(config))


def causes(one, values, step=1):
    """The causes for which a training step is stopped; none if it passes."""
    metrics = Metrics({name: maximum(value) for name, value in (SIZE | values).items()})
    try:
        one.check(step, metrics, lambda: None)
    except RolloutFault as fault:
        return [finding.cause for finding in fault.findings]
    return []


@pytest.mark.parametrize(
    ("metric", "passes", "stops", "cause"),
    [
        ("rollout/other_windows", 0.0, 0.01, "windows"),
        ("rollout/coarse_latents", 0.0, 0.01, "coarse_latents"),
        ("rollout/broken_trajectories", 0.0, 0.01, "trajectories"),
        ("rollout/log_prob_error", 1e-6, 1.1e-5, "log_prob_error"),
        ("rollout/std_error", 1e-7, 1.1e-4, "std_error"),
        ("rollout/noise_z_max", 5.9, 6.1, "seeded_noise"),
        ("rollout_corr/replay/before", 7.9, 8.1, "replay_before"),
        ("rollout_corr/replay/window", 1.9e-3, 2.1e-3, "replay_window"),
        ("rollout_corr/replay/decode", 0.17, math.inf, "replay_decode"),
        ("rollout_corr/residual/step_noise", 9e-4, 1.1e-3, "step_noise"),
        ("rollout_corr/kl", 1.9 * USUAL_KL, 2.1 * USUAL_KL, "kl"),
        ("rollout_corr/kl", -1.9 * USUAL_KL, -2.1 * USUAL_KL, "kl"),
    ],
)
def test_a_value_stops_a_run_where_only_a_fault_explains_it(metric, passes, stops, cause):
    one = gate()
    assert causes(one, {metric: passes}) == []
    assert causes(one, {metric: stops}) == [cause]
    assert causes(gate("trainer.on_fault=warn"), {metric: stops}) == []


def test_chance_learning_and_judges_stop_nothing():
    """A reward that samples its answers does not repeat its scores; old weights move the KL as far as they learned."""
    odd = {
        "rollout_corr/replay/reward": 3.0,
        "rollout/noise_std": 1.5,
        "rollout_corr/rejected_ratio": 1.0,
        "rollout_corr/rollout_is_mean": 9.0,
        "reward/zero_std_group_fraction": 1.0,
    }
    assert causes(gate(), odd) == []
    assert causes(gate("rollout.staleness=2"), {"rollout_corr/kl": 3.0}) == []


def test_a_broken_equality_names_the_part_before_the_gaps_that_follow_from_it():
    broken = {"rollout_corr/kl": 1.0, "rollout/std_error": 0.14}
    assert causes(gate(), broken) == ["std_error", "kl"]


def test_ten_steps_in_a_row_without_an_update_end_a_run():
    one = gate()
    for step in range(1, 10):
        assert causes(one, {}, step) == []  # before the update, which has not been measured yet
        assert causes(one, {"actor/updates": 0.0}, step) == []
    assert causes(one, {"actor/updates": 1.0}, 10) == []
    for step in range(11, 20):
        assert causes(one, {"actor/updates": 0.0}, step) == []
    assert causes(one, {"actor/updates": 0.0}, 20) == ["no_update"]


def test_the_error_holds_what_was_found():
    metrics = Metrics({name: maximum(value) for name, value in SIZE.items()})
    metrics = metrics.merge({"rollout/std_error": maximum(0.14)})
    terms = object()
    with pytest.raises(RolloutFault) as caught:
        gate().check(7, metrics, lambda: terms)
    (finding,) = caught.value.findings
    assert (caught.value.step, caught.value.terms) == (7, terms)
    assert (finding.level, finding.fault, finding.numbers["value"]) == ("serious", True, 0.14)
    assert caught.value.metrics["rollout/std_error"] == 0.14


def test_faults_of_a_part_are_told_without_the_steps_before_and_the_broken_equality_first():
    one, sound = gate(), SIZE | {"actor/updates": 1.0}
    assert one.faults(sound) == []
    findings = one.faults(sound | {"rollout_corr/kl": 1.0, "rollout/std_error": 0.14})
    assert [(finding.cause, finding.level) for finding in findings] == [
        ("std_error", "serious"),
        ("kl", "serious"),
    ]
    assert gate("trainer.on_fault=warn").faults(sound | {"rollout/std_error": 0.14}) == []


def test_every_rule_that_stops_a_run_has_a_limit_to_break():
    stopping = [rule for rule in RULES if rule.fault != math.inf]
    assert len(stopping) > 20
    assert all((rule.low, rule.high) != (-math.inf, math.inf) for rule in stopping)
