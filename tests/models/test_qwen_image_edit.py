"""Reference images of Qwen-Image-Edit; tests of all families are in `test_families.py`."""

import pytest
import torch

from flowcorr.models.prompt_cache import PromptCache
from tests.models.families import QWEN_EDIT, QWEN_EDIT_PLUS

pytest.importorskip("torchvision")  # which the pipelines' processor needs


@pytest.fixture(params=[QWEN_EDIT, QWEN_EDIT_PLUS], ids=lambda case: case.name)
def case(request):
    return request.param


@pytest.fixture
def family(case, tiny_folders):
    return case.load(tiny_folders(case.name))


def test_what_encoder_and_transformer_see(case, family):
    conditioning, count = family.encode(case.prompts, case.guided), case.tiny.images
    assert conditioning["references"].shape == (2, count, 26, 39, 16)  # 832 x 1248 pixels
    assert not torch.equal(*conditioning["negative_prompt_embeds"])  # of one text, beside other images
    lengths = conditioning["prompt_embeds_mask"].sum(1)
    assert (lengths > count * {"qwen_image_edit": 1300, "qwen_image_edit_plus": 180}[case.name]).all()


def test_the_cache_keeps_each_prompts_own_negative(case, family, monkeypatch):
    monkeypatch.setattr("flowcorr.models.prompt_cache.CHUNK", 1)
    expected = family.encode(case.prompts, case.guided)
    found = PromptCache(family, case.guided, case.prompts)(case.prompts)
    assert found.keys() == expected.keys()
    for key, values in found.items():
        length = values.shape[1]
        torch.testing.assert_close(values, expected[key][:, :length], rtol=0, atol=1e-5)
        assert key == "references" or not expected[key][:, length:].any()
