"""What model families share."""

import pytest
import torch
from torch import nn

from flowcorr.errors import ConfigError
from flowcorr.models import Guidance
from flowcorr.models.base import repeated_blocks
from flowcorr.models.negatives import with_negative
from flowcorr.models.sd3 import SD3
from flowcorr.records import Prompt
from flowcorr.references import Reference


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


def test_blocks_are_those_of_all_lists_of_modules():
    transformer = nn.Module()
    transformer.first = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    transformer.head = nn.Linear(1, 1)
    transformer.second = nn.ModuleList([nn.Linear(1, 1)])
    assert repeated_blocks(transformer) == [*transformer.first, *transformer.second]


def test_references_under_another_name_are_refused_where_a_model_would_read_them(monkeypatch):
    prompts = [Prompt(text="a cat", metadata={"edit_image": "cat.png"}, place="edits.jsonl:7")]
    SD3.check_references(prompts)
    monkeypatch.setattr(SD3, "num_references", (0, 4))
    with pytest.raises(ConfigError, match=r'^edits\.jsonl:7 .*"edit_image", .*"images"'):
        SD3.check_references(prompts)


@pytest.mark.parametrize(
    ("allowed", "count", "wrong"),
    [((0, 0), 1, "takes 0"), ((1, 1), 0, "takes 1"), ((1, 3), 4, "takes 1 to 3"), ((0, 1), 1, None)],
)
def test_a_prompt_has_as_many_references_as_its_family_takes(monkeypatch, allowed, count, wrong):
    monkeypatch.setattr(SD3, "num_references", allowed)
    images = (Reference(path="cat.png", digest="0", size=(64, 64)),) * count
    prompts = [Prompt(text="a cat", images=images, place="edits.jsonl:7")]
    if wrong is None:
        SD3.check_references(prompts)
        return
    with pytest.raises(ConfigError, match=rf"^edits\.jsonl:7 .* {count} .* sd3 {wrong};"):
        SD3.check_references(prompts)
