from dataclasses import replace

import pytest

from flowcorr.config import load
from flowcorr.instruments.plan.answers import duration, gigabytes
from flowcorr.instruments.plan.devices import GPUS
from flowcorr.instruments.plan.estimate import plan_of

H100 = GPUS["h100-80gb"]


@pytest.fixture
def tiny(traces):
    return plan_of(traces, load("tiny_jpeg_lora"), gpu=H100)


def test_a_run_fits_with_a_margin(tiny):
    for room, fits in ((0.9, False), (1.05, False), (1.2, True)):
        assert replace(tiny, gpu=replace(H100, memory=room * tiny.memory.trainer)).fitting == fits


def test_sizes_and_times_are_short():
    assert (gigabytes(2.04e9), gigabytes(3.2e7)) == ("2.0 GB", "32.0 MB")
    assert (duration(61.2), duration(0.123)) == ("61 s", "0.12 s")
