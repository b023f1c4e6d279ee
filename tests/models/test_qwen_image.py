"""Text and guidance of Qwen-Image; tests of all families are in `test_families.py`."""

from dataclasses import replace

import pytest
import torch

from flowcorr.models import Guidance
from flowcorr.models.prompt_cache import PromptCache
from flowcorr.models.qwen_image import QwenImage
from tests.models.families import QWEN
from tests.prompts import prompts_of
from tests.tolerances import MEANS

GUIDED, PROMPTS = QWEN.guided, QWEN.texts


@pytest.fixture
def family(tiny_folders):
    return QWEN.load(tiny_folders("qwen_image"))


def test_prompts_of_any_length_become_rows_of_one_shape(family):
    got = family.encode(prompts_of(PROMPTS), GUIDED)
    assert set(got) == {
        "prompt_embeds", "prompt_embeds_mask", "negative_prompt_embeds", "negative_prompt_embeds_mask"
    }  # fmt: skip
    for prefix, texts in (("prompt", PROMPTS), ("negative_prompt", ["bad", "bad"])):
        embeds, mask = got[f"{prefix}_embeds"], got[f"{prefix}_embeds_mask"]
        assert embeds.shape == (2, QWEN.length, 32)
        assert mask.dtype == torch.bool
        for row, text in enumerate(texts):
            alone, _ = family.pipeline.encode_prompt([text], max_sequence_length=QWEN.length)
            count = alone.shape[1]
            assert mask[row].tolist() == [True] * count + [False] * (QWEN.length - count)
            torch.testing.assert_close(embeds[row, :count], alone[0])
            assert (embeds[row, count:] == 0).all()
    assert got["prompt_embeds_mask"][0].sum() < got["prompt_embeds_mask"][1].sum()
    assert set(family.encode(prompts_of(PROMPTS), Guidance(guidance_scale=4.0))) == {
        "prompt_embeds",
        "prompt_embeds_mask",
    }


def test_a_long_prompt_is_cut_and_said_so(family, caplog):
    family.encode(prompts_of(PROMPTS), Guidance())
    assert not caplog.records
    got = family.encode(prompts_of(["cat", "x" * 100]), Guidance())
    assert got["prompt_embeds"].shape == (2, QWEN.length, 32)
    assert got["prompt_embeds_mask"][1].all()
    assert "58 tokens" in caplog.text


def test_prompts_can_be_cached(family):
    direct = family.encode(prompts_of(PROMPTS), GUIDED)
    cache = PromptCache(family, GUIDED, prompts_of(PROMPTS))
    for name, rows in cache(prompts_of(PROMPTS[::-1])).items():
        torch.testing.assert_close(rows, direct[name].flip(0)[:, : rows.shape[1]], **MEANS)
    assert family.pipeline.text_encoder is None


@torch.no_grad()
def test_text_is_cut_to_the_longest_prompt_without_changing_the_velocity(tiny_folders):
    family = replace(QWEN, length=200).load(tiny_folders("qwen_image"))
    direct = family.encode(prompts_of(PROMPTS), GUIDED)
    cached = PromptCache(family, GUIDED, prompts_of(PROMPTS))(prompts_of(PROMPTS))
    longest = max(int(direct[name].sum(1).max()) for name in direct if name.endswith("_mask"))
    assert {rows.shape[1] for rows in direct.values()} == {200}
    assert {rows.shape[1] for rows in cached.values()} == {-(-longest // 16) * 16}
    velocities = [
        family.velocity(family.transformer, QWEN.noise(), torch.tensor([900.0, 300.0]), rows, GUIDED)
        for rows in (cached, direct)
    ]
    torch.testing.assert_close(*velocities, **MEANS)


def test_guidance_keeps_the_norm_of_every_token():
    positive, negative = torch.randn(2, 2, 24, 16, generator=torch.Generator().manual_seed(0))
    guided = object.__new__(QwenImage).guide(negative, positive, 3.0)
    torch.testing.assert_close(guided.norm(dim=-1), positive.norm(dim=-1))
    direction = negative + 3.0 * (positive - negative)
    torch.testing.assert_close(torch.cosine_similarity(guided, direction, dim=-1), torch.ones(2, 24))
