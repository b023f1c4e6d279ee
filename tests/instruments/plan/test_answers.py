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


def test_a_gpu_that_is_too_small_is_told_so_with_what_to_change(tiny):
    small = replace(tiny, gpu=replace(H100, memory=0.9 * tiny.memory.trainer))
    assert small.verdict().startswith("Does not fit")
    assert not small.fitting
    close = replace(tiny, gpu=replace(H100, memory=1.05 * tiny.memory.trainer))
    assert close.verdict().startswith("May not fit")
    none = replace(tiny, gpu=replace(H100, memory=1e6), largest_micro_batch=0)
    assert "No actor.micro_batch_size fits" in none.advice()[0]
    assert "a smaller model.lora.rank" in none.advice()[1]


def test_sizes_and_times_are_short():
    assert (gigabytes(2.04e9), gigabytes(3.2e7)) == ("2.0 GB", "32.0 MB")
    assert (duration(61.2), duration(0.123)) == ("61 s", "0.12 s")
