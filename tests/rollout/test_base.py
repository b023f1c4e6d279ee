"""What engines share."""

import pytest
from torch import nn

from flowcorr.rollout.base import attention_name, needs_base


@pytest.mark.parametrize(
    ("sections", "needed"),
    [
        ({}, False),
        ({"rollout": {"staleness": 1}}, True),
        ({"rollout": {"emulate": "int8"}}, True),
        ({"rollout": {"dtype": "bfloat16"}}, True),
        ({"rollout": {"dtype": "bfloat16"}, "model": {"path": "tiny_ocr", "dtype": "bfloat16"}}, False),
        ({"rollout": {"name": "vllm_omni", "dtype": "bfloat16"}}, False),  # has a transformer of its own
    ],
)
def test_engines_that_cannot_share_the_transformer_keep_the_untrained_one(make_config, sections, needed):
    assert needs_base(make_config(**sections)) == needed


def test_attention_is_named_by_its_processors(make_run):
    assert attention_name(make_run().family.transformer) == "JointAttnProcessor2_0"
    assert attention_name(nn.Linear(2, 2)) == "its own"
