import pytest
import torch
from instruments.doctor.faults import (
    assert_named,
    check,
    finding_of,
    rounded_by_the_model,
    separate,
)

from tests.planted.plants import feeding, rounded, scheduled, with_timesteps

FRACTIONS = {"sampling": {"num_inference_steps": 7, "sde_window_range": (1, 3)}}  # timesteps 833.5 and 667
DIVIDED, TRUNCATED, ROUNDED = {"divided by 1000"}, {"truncated to integers"}, {"rounded to bfloat16"}
FAULTS = {
    "divided by 1000": (
        scheduled(with_timesteps(lambda timesteps: timesteps / 1000)),
        DIVIDED,
    ),
    "divided by 1000 unnoticed": (feeding(lambda timesteps: timesteps / 1000), DIVIDED),
    "truncated": (scheduled(with_timesteps(torch.trunc)), TRUNCATED),
    "truncated unnoticed": (feeding(torch.trunc), TRUNCATED),
    "rounded unnoticed": (feeding(rounded), ROUNDED),
    "of another table": (
        scheduled(with_timesteps(lambda timesteps: timesteps + 3)),
        set(),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_other_timesteps(small_run, fault):
    plant, fits = FAULTS[fault]
    run = small_run(**FRACTIONS)
    engine = separate(run)
    plant(engine)
    report = check(run, engine)
    assert_named(report, "timesteps")
    assert set(finding_of(report, "timesteps").numbers["fits"]) == fits


@pytest.mark.parametrize(
    ("plant", "rollout"),
    [(scheduled(with_timesteps(rounded)), {}), (rounded_by_the_model, {"dtype": "bfloat16"})],
)
def test_rounding_that_is_to_be_replayed_warns(small_run, plant, rollout):
    run = small_run(rollout=rollout, **FRACTIONS)
    engine = separate(run)
    plant(engine)
    report = check(run, engine, float32=False)
    assert report.causes() == []
    assert report.causes("warning") == ["timesteps"]


def test_a_float32_table_made_in_another_order_is_the_schedule(small_run):
    run = small_run(**FRACTIONS)
    engine = separate(run)
    scheduled(with_timesteps(lambda timesteps: timesteps * (1 + 2**-23)))(engine)
    assert finding_of(check(run, engine), "timesteps").level == "healthy"


def test_ways_that_these_steps_cannot_tell_apart_are_all_named(small_run):
    """Timesteps 1000 and 800.2 become 1000 and 800 either way."""
    run = small_run(sampling={"num_inference_steps": 6, "sde_window_range": (0, 2)})
    engine = separate(run)
    expected = torch.tensor(engine.plan.schedule.timesteps)[:2]
    assert torch.equal(torch.trunc(expected), rounded(expected))
    scheduled(with_timesteps(torch.trunc))(engine)
    report = check(run, engine)
    assert_named(report, "timesteps")
    assert set(finding_of(report, "timesteps").numbers["fits"]) >= TRUNCATED | ROUNDED
