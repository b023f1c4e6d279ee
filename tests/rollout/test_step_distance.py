"""A gap of velocities moves the means of SDE steps by a bounded number of standard deviations."""

import pytest

from flowcorr.config.schema import SamplingConfig
from flowcorr.rollout.precision import ROUNDINGS
from flowcorr.rollout.step_distance import step_distance


@pytest.mark.parametrize(
    ("end", "distance"),
    [
        (4, 0.06),
        (10, 0.26),
    ],  # of the step means of int4 rollouts, early and everywhere: examples/mismatch_study
)
def test_a_velocity_gap_moves_step_means_by_no_more_than_the_schedule_allows(end, distance):
    sampling = SamplingConfig(num_inference_steps=10, sde_window_range=(0, end), sde_window_size=2)
    assert distance <= step_distance(sampling, ROUNDINGS["int4"].plain) <= 2 * distance


def test_the_distance_of_step_means_is_known_for_every_transition():
    for kind in ("sde", "cps", "dance_sde"):
        for end in (4, 10):
            sampling = SamplingConfig(
                sde_type=kind, num_inference_steps=10, sde_window_range=(0, end), sde_window_size=2
            )
            assert step_distance(sampling, 0.01) > 0
