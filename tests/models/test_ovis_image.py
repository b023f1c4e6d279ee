"""Ovis-Image; what it shares with other families of packed latents is in `test_packed.py`."""

import pytest
import torch

from flowcorr.models import Guidance
from flowcorr.models.ovis_image import OvisImage
from tests.models.packed import OVIS, PROMPTS
from tests.prompts import prompts_of
from tests.tolerances import MEANS


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    return OVIS.load(str(OVIS.build(tmp_path_factory.mktemp("ovis_image"))))


def test_encode_is_the_pipelines_own(family):
    got = family.encode(prompts_of(PROMPTS), OVIS.guidance)
    assert got.keys() == {"prompt_embeds", "negative_prompt_embeds"}
    for name, prompts in (("prompt_embeds", PROMPTS), ("negative_prompt_embeds", ["bad", "bad"])):
        expected = family.pipeline.encode_prompt(
            prompts, do_classifier_free_guidance=False, max_sequence_length=OVIS.length
        )[0]
        assert got[name].shape == (2, OVIS.length, 32)
        torch.testing.assert_close(got[name], expected, **MEANS)
    assert family.encode(prompts_of(PROMPTS), Guidance()).keys() == {"prompt_embeds"}


def test_the_engine_adapts_seven_of_its_twelve_targets():
    assert [target for target in OvisImage.lora_targets if not OvisImage.vllm_omni.adapts(target)] == [
        "attn.to_out.0",
        "ff.net.0.proj",
        "ff.net.2",
        "ff_context.net.0.proj",
        "ff_context.net.2",
    ]
