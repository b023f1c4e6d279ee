"""A prompt's own negative prompt takes the place of the run's, in every family that reads one."""

import importlib.util
import warnings
from dataclasses import replace

import pytest
import torch
from tiny_pipelines import FAMILIES

from flowcorr.config import ModelConfig
from flowcorr.models import Guidance, load_family
from flowcorr.models.negatives import check_negative_prompts
from flowcorr.models.prompt_cache import PromptCache
from tests.prompts import prompts_of
from tests.tolerances import MEANS

TEXTS, NEGATIVES = ["cat", "two dogs", "elk", "cat"], [None, "sun", "a blurry photo", "sun"]


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request, tmp_path_factory):
    if "edit" in request.param and importlib.util.find_spec("torchvision") is None:
        pytest.skip("its processor needs torchvision")
    tiny = FAMILIES[request.param]
    path = tiny.build(tmp_path_factory.mktemp(request.param))
    return tiny, ModelConfig(path=str(path), max_sequence_length=16)


@pytest.fixture
def family(tiny):
    return load_family(tiny[1], reference_size=tiny[0].size)


@pytest.fixture
def guidance(tiny):
    return Guidance(**tiny[0].guidance, negative_prompt="bad")


@pytest.fixture
def prompts(tiny):
    images = prompts_of(TEXTS, images=tiny[0].images)
    return [
        replace(prompt, negative_prompt=negative) for prompt, negative in zip(images, NEGATIVES, strict=True)
    ]


def test_each_prompt_has_the_rows_of_its_own_negative_prompt(family, guidance, prompts):
    rows = family.encode(prompts, guidance)
    alone = [
        family.embed([prompt], replace(guidance, negative_prompt=prompt.negative_prompt or "bad"))
        for prompt in prompts
    ]
    for name, values in rows.items():
        torch.testing.assert_close(values, torch.cat([own[name] for own in alone]), **MEANS)
        if name.startswith("negative_") and values.is_floating_point():
            assert not torch.allclose(values[0], values[1], **MEANS), name


@pytest.mark.parametrize("max_bytes", [1, 2**30])
def test_the_cache_has_the_same_rows(family, guidance, prompts, max_bytes):
    direct = family.encode(prompts, guidance)
    length = {name: rows.shape[1] for name, rows in direct.items() if rows.dim() > 1}
    order = [3, 1, 0, 2, 1]
    cached = PromptCache(family, guidance, prompts, max_bytes=max_bytes)([prompts[row] for row in order])
    assert cached.keys() == direct.keys()
    for name, rows in cached.items():
        expected = direct[name][order][:, : rows.shape[1]] if name in length else direct[name][order]
        mask = cached.get(f"{name}_mask")
        if mask is not None:  # beyond a text its padding has no meaning
            rows, expected = rows[mask], expected[mask]
        torch.testing.assert_close(rows, expected, **MEANS)


def said(family, prompts, guidance):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_negative_prompts(family, prompts, guidance)
    return [str(warning.message) for warning in caught]


def test_where_guidance_reads_none_it_is_said(family, guidance, prompts):
    off = Guidance(negative_prompt="bad")
    for given, is_read in ((guidance, family.encodes_negative), (off, False)):
        messages = said(family, prompts, given)
        assert len(messages) == int(not is_read)
        assert all("negative_prompt of 3 prompts" in text and "no effect" in text for text in messages)
    bare = [replace(prompt, negative_prompt=None) for prompt in prompts]
    assert len(said(family, bare, guidance)) == int(not family.encodes_negative)
