"""Every residual has a metric and a limit, which grows with the rounding of a run."""

import math

import pytest

from flowcorr.health.rules import units_of
from flowcorr.health.table import find_metric
from flowcorr.questions.residual_terms import PREFIX, RESIDUALS, UNSEEN
from tests.judging import examine_step


def limits(config):
    """The limit of each residual in a run."""
    units = units_of(config, {})
    return {name: find_metric(PREFIX + name).rule.limits(units)[1] for name in RESIDUALS}


def test_each_residual_is_explained_and_judged(make_config):
    units = units_of(make_config(), {})
    for name, limit in limits(make_config()).items():
        metric = PREFIX + name
        assert find_metric(metric + UNSEEN).rule is None
        assert 0 < limit < math.inf
        assert examine_step({metric: limit}, units) == []
        (finding,) = examine_step({metric: 2 * limit}, units)
        assert (finding.cause, finding.numbers["limit"]) == (name, limit)


@pytest.mark.parametrize(
    ("changes", "larger"),
    [
        (
            {"model": {"dtype": "bfloat16"}},
            {"velocity_length", "velocity_common", "path_before", "path_after", "image_error"},
        ),
        (
            {"rollout": {"emulate": "fp8"}},
            {"velocity_length", "velocity_common", "path_before", "path_after"},
        ),
        (
            {"model": {"dtype": "bfloat16"}, "rollout": {"name": "vllm_omni", "dtype": "float32"}},
            set(RESIDUALS) - {"step_noise", "step_noise_rounding"},
        ),
    ],
)
def test_limits_grow_with_the_rounding_of_a_run(changes, larger, make_config):
    before, after = limits(make_config()), limits(make_config(**changes))
    assert {name for name, limit in after.items() if limit > before[name]} == larger
