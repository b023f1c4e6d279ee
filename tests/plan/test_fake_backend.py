"""The fake device as torch knows it."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorDeviceMismatchError  # has no public name
from torch.nn import functional

from flowcorr.plan.fake_backend import DEVICE

# The fake device has to be registered before a process computes its first gradient.
pytestmark = pytest.mark.fake_device


def test_a_cpu_tensor_that_meets_a_device_tensor_raises(new_device):
    with new_device(), pytest.raises(FakeTensorDeviceMismatchError, match="fakegpu:0 and cpu"):
        torch.ones(4, device=DEVICE) + torch.ones(4)


def test_the_device_is_gone_outside_of_its_context(new_device):
    before = functional.scaled_dot_product_attention
    with new_device():
        assert torch.accelerator.is_available()
    assert not torch.accelerator.is_available()
    assert functional.scaled_dot_product_attention is before
    assert torch.ones(2).sum().item() == 2.0


def test_a_device_is_made_by_its_name_within_its_context(new_device):
    with new_device():
        values = torch.tensor([1.0, 2.0], device=DEVICE)
        assert values.device.type == DEVICE
        assert torch.accelerator.current_accelerator().type == DEVICE
