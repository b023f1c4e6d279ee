"""Devices by the names that configurations give them."""

import pytest
import torch

from flowcorr.devices import empty_cache, facts, free_memory, keep_float32, named_device
from flowcorr.errors import ConfigError


def test_auto_takes_a_gpu_where_there_is_one():
    assert named_device("trainer.device", "auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert named_device("trainer.device", "cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["gpu", "cuda:99"])
def test_a_device_that_is_not_there_is_named_with_its_key(name):
    with pytest.raises(ConfigError, match=rf"^trainer\.device='{name}' .* auto, cpu "):
        named_device("trainer.device", name)


def test_a_cpu_has_the_memory_of_the_system():
    assert 0 < free_memory(torch.device("cpu")) < 2**50
    empty_cache(torch.device("cpu"))  # keeps nothing


def test_convolutions_stay_in_float32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    keep_float32()
    assert not torch.backends.cudnn.allow_tf32


def test_a_devices_facts_are_its_name_and_memory():
    found = facts(torch.device("cpu"))
    assert found["device"] == "cpu"
    assert found["memory"] > 1e8
