"""The parts of a run: which mode it begins in, and how it ends."""

import contextlib
import threading

import pytest

from flowcorr.errors import BackendError
from flowcorr.trainer.setup import build_run
from tests.trainer.runs import small_config

CORRECTION = "algorithm.rollout_correction"


@pytest.mark.parametrize(
    ("override", "mode"),
    [
        (f"{CORRECTION}=null", "off"),
        (f"{CORRECTION}.preset=seq_is", "decoupled"),
        (f"{CORRECTION}.bypass_mode=auto", "bypass"),
    ],
)
def test_a_run_begins_in_its_mode(override, mode):
    run, _ = build_run(small_config(override))
    correction = run.mode.correction
    assert correction.mode == mode
    run.close()


@pytest.mark.parametrize("fails", [False, True])
def test_close_ends_the_thread_of_the_reward(fails, monkeypatch):
    """Also where the engine's processes cannot be ended."""

    def threads():
        return [thread for thread in threading.enumerate() if thread.name == "rewards"]

    def fail():
        raise BackendError

    before = threads()
    run, _ = build_run(small_config())
    assert len(threads()) == len(before) + 1
    if fails:
        monkeypatch.setattr(run.engine, "close", fail)
    with pytest.raises(BackendError) if fails else contextlib.nullcontext():
        run.close()
    assert threads() == before
