"""What model families share."""

import pytest
import torch
from torch import nn

from flowcorr.config.schema import SamplingConfig
from flowcorr.errors import ConfigError
from flowcorr.models import Guidance
from flowcorr.models.base import (
    check_sampling,
    positions,
    repeated_blocks,
    with_negative,
)
from flowcorr.models.qwen_image import QwenImage
from flowcorr.models.sd3 import SD3
from flowcorr.records import Prompt
from flowcorr.references import Reference


@pytest.mark.parametrize(
    ("family", "reads", "unread"),
    [(SD3, "guidance_scale", "true_cfg_scale"), (QwenImage, "true_cfg_scale", "guidance_scale")],
)
def test_guidance_that_a_family_does_not_read_warns(family, reads, unread):
    sampling = SamplingConfig(guidance_scale=3.0, true_cfg_scale=4.0)
    message = (
        f"^sampling.{unread}=.* has no effect: a model of the family {family.name} reads sampling.{reads}$"
    )
    with pytest.warns(UserWarning, match=message) as seen:
        check_sampling(sampling, family)
    assert len(seen) == 1
    check_sampling(SamplingConfig(**{reads: 4.0}), family)


def test_several_frames_are_asked_of_models_that_make_videos():
    for num_frames in (None, 1):
        check_sampling(SamplingConfig(num_frames=num_frames), SD3)
    with pytest.raises(
        ConfigError, match=r"sampling.num_frames=9 asks for videos, .* family sd3 makes images"
    ):
        check_sampling(SamplingConfig(num_frames=9), SD3)
    with pytest.raises(ConfigError, match="sampling.num_frames=0 is out of range"):
        SamplingConfig(num_frames=0)


def test_guidance_is_two_velocities_of_one_batch():
    latents, timesteps = torch.arange(4.0).view(2, 2), torch.tensor([10.0, 20.0])
    conditioning = {
        "embeds": torch.ones(2, 3),
        "negative_embeds": torch.zeros(2, 3),
        "references": torch.tensor([[5.0], [6.0]]),
    }
    both, times, rows = with_negative(latents, timesteps, conditioning)
    assert torch.equal(both, torch.cat([latents, latents]))
    assert times.tolist() == [10.0, 20.0, 10.0, 20.0]
    assert rows.keys() == {"embeds", "references"}
    assert rows["references"][:, 0].tolist() == [5.0, 6.0, 5.0, 6.0]  # of both sides
    assert rows["embeds"][:, 0].tolist() == [0.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("scale", "negative", "expected"),
    [
        (2.0, True, 2 * 3.0 - 1.0),
        (1.0, True, 3.0),  # and one pass
        (2.0, False, 3.0),  # a model without a negative prompt
    ],
)
def test_guidance_leads_away_from_the_negative_prompt(scale, negative, expected):
    batches = []

    class Constant(SD3):
        def predict(self, transformer, latents, timesteps, conditioning, guidance):
            batches.append(len(latents))
            return conditioning["embeds"].expand_as(latents)

    conditioning = {"embeds": torch.tensor([[3.0], [3.0]])}
    if negative:
        conditioning["negative_embeds"] = torch.tensor([[1.0], [1.0]])
    family = object.__new__(Constant)  # its guidance needs no pipeline
    velocity = family.velocity(
        None, torch.zeros(2, 4), torch.tensor([10.0, 20.0]), conditioning, Guidance(guidance_scale=scale)
    )
    assert torch.equal(velocity, torch.full((2, 4), expected))
    assert batches == [4 if scale > 1 and negative else 2]


def test_places_run_along_the_rows():
    places = positions(2, 3, device=torch.device("cpu"))
    assert places.tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]


def test_blocks_are_those_of_all_lists_of_modules():
    transformer = nn.Module()
    transformer.first = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    transformer.head = nn.Linear(1, 1)
    transformer.second = nn.ModuleList([nn.Linear(1, 1)])
    assert repeated_blocks(transformer) == [*transformer.first, *transformer.second]


@pytest.mark.parametrize(
    ("allowed", "count", "wrong"),
    [((0, 0), 1, "takes 0"), ((1, 1), 0, "takes 1"), ((1, 3), 4, "takes 1 to 3"), ((0, 1), 1, None)],
)
def test_a_prompt_has_as_many_references_as_its_family_takes(monkeypatch, allowed, count, wrong):
    monkeypatch.setattr(SD3, "num_references", allowed)
    images = (Reference(path="cat.png", digest="0"),) * count
    prompts = [Prompt(text="a cat", images=images, place="edits.jsonl:7")]
    if wrong is None:
        SD3.check_references(prompts)
        return
    with pytest.raises(
        ConfigError, match=f"^edits.jsonl:7 has {count} reference images, and .* family sd3 {wrong};"
    ):
        SD3.check_references(prompts)
