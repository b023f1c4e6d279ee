"""The table of faults of the real engine."""

import contextlib
import inspect
import re
from types import SimpleNamespace

import pytest

from flowcorr.rollout import sampler
from tests.planted import engine_faults
from tests.planted.engine_faults import FAULTS


def test_every_fault_has_a_name_and_words():
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names) >= 73
    assert all(re.fullmatch("[a-z0-9_]+", name) for name in names)
    assert all(fault.stands_for and (fault.size is None or fault.size > 0) for fault in FAULTS)


@pytest.mark.parametrize("line", ["ARRIVED", "EULER", "MOVED", "STARTED", "LEVELS"])
def test_lines_of_the_loop_that_faults_change_are_there(line):
    assert getattr(engine_faults, line) in inspect.getsource(sampler.sample_sde_window)


def test_a_changed_loop_is_taken_back():
    place = SimpleNamespace(module=SimpleNamespace(sample_sde_window=sampler.sample_sde_window))
    with contextlib.ExitStack() as undo:
        engine_faults.noise("1.01 * z")(place, undo)
        assert place.module.sample_sde_window is not sampler.sample_sde_window
    assert place.module.sample_sde_window is sampler.sample_sde_window
