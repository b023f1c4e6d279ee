import pytest

from flowcorr.errors import ConfigError
from flowcorr.instruments.plan.devices import CUSTOM, GPUS, NETWORK, PCIE_4, find_gpu


def test_a_known_gpu_is_found_by_its_name():
    gpu = find_gpu("h100-80gb")
    assert (gpu.memory, gpu.bandwidth, gpu.bf16) == (85.0e9, 3350e9, 989e12)


def test_any_other_gpu_is_described_by_numbers():
    gpu = find_gpu("memory=48, bandwidth=864, bf16=362")
    assert (gpu.memory, gpu.bandwidth, gpu.bf16) == (48e9, 864e9, 362e12)
    assert gpu.float32 == 362e12 / 16
    assert find_gpu(CUSTOM).float32 == 91.6e12
    assert (gpu.link, find_gpu("memory=48,bandwidth=864,bf16=362,link=450").link) == (PCIE_4 * 1e9, 450e9)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("h100", "h100-80gb"),
        ("memory=48", "needs positive numbers"),
        ("memory=48,bandwidth=864,bf16=lots", "'bf16=lots' "),
        ("memory=48,bandwidth=0,bf16=362", "needs positive numbers"),
        ("memory=1e400,bandwidth=1,bf16=362", "needs positive numbers"),
        ("memory=nan,bandwidth=1,bf16=362", "needs positive numbers"),
        ("memory=48,bandwidth=864,bf16=362,fp8=724", "needs positive numbers"),
    ],
)
def test_a_device_that_is_neither_known_nor_described_is_refused(text, named):
    with pytest.raises(ConfigError, match=f"^--gpu[ =]'{text}'.*{named}"):
        find_gpu(text)


def test_a_newer_or_larger_gpu_has_more_of_everything():
    for smaller, larger in (
        ("a100-40gb-sxm", "a100-80gb-sxm"),
        ("a100-80gb-sxm", "h100-80gb"),
        ("h100-80gb", "b200-180gb"),
    ):
        one, other = GPUS[smaller], GPUS[larger]
        assert one.memory <= other.memory
        assert one.bandwidth < other.bandwidth
        assert one.bf16 <= other.bf16


def test_ranks_of_one_machine_have_its_links_and_more_ranks_have_the_networks():
    assert GPUS["h100-80gb"].link_among(8) == GPUS["h100-80gb"].link > 10 * GPUS["l40s-48gb"].link
    assert GPUS["h100-80gb"].link_among(16) == NETWORK
    assert GPUS["l40s-48gb"].link_among(16) == GPUS["l40s-48gb"].link  # slower than the network


def test_boards_of_one_gpu_differ_in_their_links():
    for size in ("40gb", "80gb"):
        sxm, pcie = GPUS[f"a100-{size}-sxm"], GPUS[f"a100-{size}-pcie"]
        assert (sxm.memory, sxm.bf16) == (pcie.memory, pcie.bf16)
        assert sxm.link > 9 * pcie.link


def test_a_geforce_reaches_more_of_its_halved_rate():
    assert GPUS["rtx5090-32gb"].half > GPUS["rtx5090-32gb"].bf16
    assert GPUS["h100-80gb"].half == GPUS["h100-80gb"].bf16
