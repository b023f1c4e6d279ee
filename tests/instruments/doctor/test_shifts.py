"""Schedules of a model's scheduler with another shift."""

import pytest

from flowcorr.config import ModelConfig
from flowcorr.instruments.doctor.shifts import own_shift, schedule, scheduler_with, spacing_of, with_shift
from flowcorr.models import load_family
from tests.shallow import SHALLOW

SHAPE, STEPS = (4, 4, 8), 5
PLACES = range(STEPS + 1)


@pytest.fixture(scope="module")
def family():
    return load_family(ModelConfig(path=SHALLOW))


def test_the_models_own_shift_gives_its_own_schedule(family):
    own = own_shift(family, SHAPE)
    assert own == family.pipeline.scheduler.config.shift
    assert with_shift(family, PLACES, SHAPE, own) == family.schedule(STEPS, SHAPE)
    assert with_shift(family, PLACES, SHAPE, 2 * own).sigmas[2] > family.schedule(STEPS, SHAPE).sigmas[2]


def test_longer_steps_have_the_sigmas_at_which_they_begin(family):
    full = family.schedule(STEPS, SHAPE)
    for found in (
        schedule(family, [0, 1, 3, 5], SHAPE),
        with_shift(family, [0, 1, 3, 5], SHAPE, own_shift(family, SHAPE)),
    ):
        assert found.sigmas == (*full.sigmas[:2], full.sigmas[3], 0.0)
        assert found.timesteps == (*full.timesteps[:2], full.timesteps[3])


def test_the_scheduler_is_put_back(family):
    before = family.pipeline.scheduler
    with scheduler_with(family, {"shift": 7.0}):
        assert family.pipeline.scheduler.config.shift == 7.0
    assert family.pipeline.scheduler is before


def test_a_schedule_that_cannot_be_made_is_none(family):
    with scheduler_with(family, {"use_dynamic_shifting": True}):
        assert schedule(family, PLACES, SHAPE, "equal steps") is None


def test_equal_steps_are_told_from_those_of_the_pipeline(family):
    equal, own = (schedule(family, PLACES, SHAPE, spacing).sigmas for spacing in ("equal steps", "pipeline"))
    assert equal != own
    assert [spacing_of(family, sigmas, SHAPE) for sigmas in (equal, own)] == ["equal steps", "pipeline"]
    assert spacing_of(family, (1.0, 0.9, 0.0), SHAPE) == "pipeline"
