"""Captions and schedules of Z-Image; tests of all families are in `test_families.py`."""

import pytest
import torch

from flowcorr.models import Guidance
from tests.models.families import Z_IMAGE, assert_is_the_pipelines_own_call
from tests.prompts import prompts_of
from tests.tolerances import MEANS


@pytest.fixture
def family(tiny_folders):
    return Z_IMAGE.load(tiny_folders("z_image"))


def test_a_dynamic_shift_is_the_pipelines(family):
    family.pipeline.scheduler.register_to_config(use_dynamic_shifting=True)
    assert_is_the_pipelines_own_call(Z_IMAGE, family, Guidance(), 2)


def test_encode_is_the_pipelines_own(family):
    got = family.encode(Z_IMAGE.prompts, Z_IMAGE.guided)
    positive, negative = family.pipeline.encode_prompt(
        list(Z_IMAGE.texts), negative_prompt=["bad"] * 2, max_sequence_length=Z_IMAGE.length
    )
    assert all(rows.shape[:2] == (2, Z_IMAGE.length) for rows in got.values())
    for row in range(2):
        for prefix, expected in (("", positive[row]), ("negative_", negative[row])):
            embeds, mask = got[f"{prefix}prompt_embeds"][row], got[f"{prefix}prompt_embeds_mask"][row]
            assert mask.sum() == len(expected) < Z_IMAGE.length
            torch.testing.assert_close(embeds[mask], expected, **MEANS)
            assert embeds[~mask].abs().max() == 0
    assert family.encode(Z_IMAGE.prompts, Guidance()).keys() == {"prompt_embeds", "prompt_embeds_mask"}


def test_a_long_prompt_is_cut_off_as_the_pipeline_does(family):
    mask = family.encode(prompts_of(["word " * 100, "cat"]), Guidance())["prompt_embeds_mask"]
    assert mask.sum(1).tolist() == [Z_IMAGE.length, 17]


@torch.no_grad()
def test_velocity_depends_on_the_length_of_a_caption(family):
    conditioning = family.encode(prompts_of([Z_IMAGE.texts[1]] * 2), Guidance())
    conditioning["prompt_embeds_mask"][1, 20:] = False
    same = Z_IMAGE.noise(batch=1).expand(2, *Z_IMAGE.shape)
    got = family.velocity(family.transformer, same, torch.full((2,), 500.0), conditioning, Guidance())
    assert (got[0] - got[1]).abs().max() > 1e-3
