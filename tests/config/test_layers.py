"""The names of layers are those of diffusers' own blocks."""

import torch
from diffusers.models.transformers.transformer_flux import FluxTransformerBlock

from flowcorr.config.layers import JOINT_ATTENTION, JOINT_FEED_FORWARD


def test_a_blocks_linear_layers_are_those_of_attention_feed_forward_and_norms():
    with torch.device("meta"):
        block = FluxTransformerBlock(dim=16, num_attention_heads=2, attention_head_dim=8)
    linear = {name for name, module in block.named_modules() if isinstance(module, torch.nn.Linear)}
    assert {*JOINT_ATTENTION, *JOINT_FEED_FORWARD, "norm1.linear", "norm1_context.linear"} == linear
