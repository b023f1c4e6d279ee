import pytest

from flowcorr.errors import ConfigError
from flowcorr.plan.devices import CUSTOM, GPUS, find_gpu


def test_a_known_gpu_is_found_by_its_name():
    gpu = find_gpu("h100-80gb")
    assert (gpu.memory, gpu.bandwidth, gpu.bf16) == (85.0e9, 3350e9, 989e12)


def test_any_other_gpu_is_described_by_numbers():
    gpu = find_gpu("memory=48, bandwidth=864, bf16=362")
    assert (gpu.memory, gpu.bandwidth, gpu.bf16) == (48e9, 864e9, 362e12)
    assert gpu.float32 == 362e12 / 16
    assert find_gpu(CUSTOM).float32 == 91.6e12


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h100", "did you mean"),
        ("memory=48", "needs positive numbers for memory"),
        ("memory=48,bandwidth=864,bf16=lots", "'bf16=lots' is not a number"),
        ("memory=48,bandwidth=0,bf16=362", "needs positive numbers"),
        ("memory=1e400,bandwidth=1,bf16=362", "needs positive numbers"),
        ("memory=nan,bandwidth=1,bf16=362", "needs positive numbers"),
        ("memory=48,bandwidth=864,bf16=362,fp8=724", "needs positive numbers"),
    ],
)
def test_a_device_that_is_neither_known_nor_described_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        find_gpu(text)


def test_a_newer_or_larger_gpu_has_more_of_everything():
    for smaller, larger in (
        ("a100-40gb", "a100-80gb"),
        ("a100-80gb", "h100-80gb"),
        ("h100-80gb", "b200-180gb"),
    ):
        one, other = GPUS[smaller], GPUS[larger]
        assert one.memory <= other.memory
        assert one.bandwidth < other.bandwidth
        assert one.bf16 <= other.bf16
