"""Trained tensors in the names and parts that the engine takes them in."""

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
