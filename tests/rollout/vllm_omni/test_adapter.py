"""Trained tensors in the names and parts that the engine takes them in."""

import pytest
import torch

from flowcorr.models.qwen_image import QwenImage
from flowcorr.rollout.vllm_omni import adapter


def test_adapters_get_the_names_of_peft_and_of_the_engine():
    tensors = {
        "blocks.0.attn.to_out.0.lora_A.default.weight": torch.zeros(2, 3),
        "blocks.0.attn.to_out.0.lora_B.default.weight": torch.zeros(3, 2),
    }
    assert list(adapter.peft_tensors(tensors, ("", ""))) == [
        "base_model.model.blocks.0.attn.to_out.0.lora_A.weight",
        "base_model.model.blocks.0.attn.to_out.0.lora_B.weight",
    ]
    suffix = QwenImage.vllm_omni.layer_suffix
    assert "base_model.model.blocks.0.attn.to_out.lora_A.weight" in adapter.peft_tensors(tensors, suffix)
    config = adapter.peft_config(tensors, suffix, rank=2, alpha=4.0)
    assert config["target_modules"] == ["blocks.0.attn.to_out"]
    assert (config["r"], config["lora_alpha"]) == (2, 4.0)


def test_buckets_hold_everything_once_and_no_more_than_the_limit():
    state = {name: torch.full((size,), float(size)) for name, size in zip("abcd", (3, 4, 20, 1), strict=True)}
    parts = list(adapter.buckets(state.items(), torch.float32, limit=32))
    assert [list(part) for part in parts] == [["a", "b"], ["c"], ["d"]]
    (half,) = adapter.buckets(list(state.items())[:3], torch.bfloat16, limit=54)
    assert {name: tensor.dtype for name, tensor in half.items()} == dict.fromkeys("abc", torch.bfloat16)
    assert list(adapter.buckets([], torch.float32)) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_digest_follows_from_every_bit_and_adds_up(dtype):
    tensor = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = adapter.digest(tensor)
    assert whole == adapter.digest(tensor.T) == adapter.digest(torch.nn.functional.pad(tensor, (0, 3)))
    assert whole == (adapter.digest(tensor[:2]) + adapter.digest(tensor[2:])) % 2**64
    moved = tensor.clone()
    moved[3, 2] = torch.nextafter(moved[3, 2], torch.tensor(9.0, dtype=dtype))
    assert adapter.digest(moved) != whole
    assert adapter.digest(-tensor) != whole


def test_what_workers_hold_is_compared_whole_and_in_shards():
    expected = {"a.lora_A": 5, "a.lora_B": 7}
    alone = {"a.lora_A": [5], "a.lora_B": [7]}
    shards = [{"a.lora_A": [5], "a.lora_B": [3]}, {"a.lora_A": [5], "a.lora_B": [4]}]
    fused = {"a.lora_A": [5, 5], "a.lora_B": [2, 5]}
    for held in ([alone], shards, [fused], [alone, alone]):
        assert adapter.differing(expected, held) == []
    assert adapter.differing(expected, [{}]) == ["a.lora_A", "a.lora_B"]
    assert adapter.differing(expected, [alone, {**alone, "a.lora_B": [8]}]) == ["a.lora_B"]
    assert adapter.differing({"a.lora_A": 5}, [alone]) == ["a.lora_B"]
    assert adapter.differing({**expected, "b.lora_B": 0}, [alone]) == []
