"""Every residual has a metric and a limit, which grows with the rounding of a run."""

import math

import pytest

from flowcorr.instruments.metrics.table import find_metric
from flowcorr.instruments.rules import units_of
from flowcorr.rollout.precision import usual_gap
from flowcorr.trainer.residuals import PREFIX, RESIDUALS, UNSEEN
from tests.judging import examine_step


def test_each_residual_is_explained_and_judged(make_config):
    units = units_of(make_config(), {})
    for residual in RESIDUALS:
        metric = find_metric(PREFIX + residual.name)
        assert metric.unit == residual.unit
        assert find_metric(PREFIX + residual.name + UNSEEN).rule is None
        limit = residual.limit(make_config(), units.usual_gap)
        assert metric.rule.limits(units) == (-math.inf, limit)
        assert examine_step({metric.name: limit}, units) == []
        (finding,) = examine_step({metric.name: 2 * limit}, units)
        assert (finding.cause, finding.numbers["limit"]) == (residual.name, limit)


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
            {residual.name for residual in RESIDUALS} - {"step_noise", "step_noise_rounding"},
        ),
    ],
)
def test_limits_grow_with_the_rounding_of_a_run(changes, larger, make_config):
    before, after = (
        {residual.name: residual.limit(config, usual_gap(config)) for residual in RESIDUALS}
        for config in (make_config(), make_config(**changes))
    )
    assert {name for name, limit in after.items() if limit > before[name]} == larger
