"""Facts of model families, and the checks of `sampling` that follow from them."""

from dataclasses import fields

import pytest

from flowcorr.config.families import FAMILIES, GUIDANCE_KEYS, Family, check_sampling, find_family
from flowcorr.config.schema import SamplingConfig
from flowcorr.errors import ConfigError
from flowcorr.models import resolve_family

IMAGES, VIDEOS = (
    {"guidance_key": "guidance_scale", "makes_videos": makes_videos} for makes_videos in (False, True)
)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_adapter_has_the_facts_of_its_row(name):
    adapter, row = resolve_family(name), FAMILIES[name]
    assert adapter.name == name
    facts = {field.name for field in fields(Family)} - {"adapter"}
    assert {fact: getattr(adapter, fact) for fact in facts} == {fact: getattr(row, fact) for fact in facts}
    assert row.guidance_key in GUIDANCE_KEYS


def test_each_class_of_pipelines_has_one_family():
    assert len({family.pipeline_class for family in FAMILIES.values()}) == len(FAMILIES)


def test_an_unknown_family_is_named_with_those_that_are_known():
    with pytest.raises(ConfigError, match=r"^model\.family='sd4' .*sd3\?\).* auto, sd3, "):
        find_family("sd4")


@pytest.mark.parametrize(
    ("reads", "unread"), [("guidance_scale", "true_cfg_scale"), ("true_cfg_scale", "guidance_scale")]
)
def test_guidance_that_a_family_does_not_read_warns(reads, unread):
    facts = {"guidance_key": reads, "makes_videos": False}
    sampling = SamplingConfig(guidance_scale=3.0, true_cfg_scale=4.0)
    with pytest.warns(UserWarning, match=rf"^sampling\.{unread}=.* mine .*sampling\.{reads}$") as seen:
        check_sampling(sampling, "mine", **facts)
    assert len(seen) == 1
    check_sampling(SamplingConfig(**{reads: 4.0}), "mine", **facts)


def test_several_frames_are_asked_of_models_that_make_videos():
    for num_frames in (None, 1):
        check_sampling(SamplingConfig(num_frames=num_frames), "mine", **IMAGES)
    check_sampling(SamplingConfig(num_frames=9), "mine", **VIDEOS)
    with pytest.raises(ConfigError, match=r"sampling\.num_frames=9 .* mine "):
        check_sampling(SamplingConfig(num_frames=9), "mine", **IMAGES)
